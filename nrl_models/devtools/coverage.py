"""The model coverage pages: written from the results of the generated tests, never by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nrl_models import families, registry
from nrl_models.common.config.ledger import DEFAULT_ONLY, INERT, UNTRIED, recorded
from nrl_models.devtools import overview
from nrl_models.devtools import sharding_outcomes as sharded_outcomes
from nrl_models.devtools.mutants.campaign import Outcome, read_outcomes
from nrl_models.devtools.overview import Row, grouped, table
from nrl_models.devtools.quirk_pages import class_subject, page_lines
from nrl_models.devtools.sharding_outcomes import Sharded, in_words
from nrl_models.errors import NRLModelsError
from nrl_models.onboarding.inspect import combined_groups, kinds_of
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import FEATURES, SUITE, generated_tests

Result = dict[str, Any]
Results = Mapping[str, list[Result]]


class CoverageError(NRLModelsError):
    """The results do not cover what is registered, or could not be made."""


def run_generated_tests(results: Path) -> Path:
    """Run the generated tests of every registered architecture and record their outcome in `results`.

    Raises:
        CoverageError: pytest could not run them. Failed tests are results, not errors.
    """
    parallel = ["-n", "auto", "--dist", "loadgroup"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel]
    done = subprocess.run([*command, f"--nrl-results={results}", str(SUITE)], check=False)
    if done.returncode not in (0, 1) or not results.is_file():
        raise CoverageError(f"pytest ended with exit status {done.returncode} and left no results in {results}")
    return results


def read_results(file: Path) -> tuple[dict[str, str], dict[str, list[Result]]]:
    """What `pytest --nrl-results` wrote: versions by package, and results by architecture.

    Raises:
        CoverageError: the file is not there, or holds something else.
    """
    try:
        content = json.loads(file.read_text())
        return content["versions"], grouped((one["architecture"], one) for one in content["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CoverageError(f"{file} is not what pytest --nrl-results writes: {error!r}") from error


def write_pages(results_file: Path, out: Path) -> list[Path]:
    """Write an overview, as Markdown and as data, and a page for each family to `out`.

    With the outcomes that `nrl-models mutate` and `make distributed-coverage` have left beside the results.

    Args:
        results_file: what `pytest --nrl-results` wrote.
        out: the folder; pages of families that are gone are removed.

    Raises:
        CoverageError: the file is not there, or has no results, or none of some architecture that is registered.
    """
    versions, by_architecture = read_results(results_file)
    untested = [name for names in registry.FAMILIES.values() for name in names if name not in by_architecture]
    if untested:
        raise CoverageError(f"{results_file} has no results for {', '.join(untested)}: run nrl-models coverage again")
    mutants = read_outcomes(results_file.with_name(MUTANTS))
    sharded = Sharded.read(results_file.with_name(sharded_outcomes.RESULTS))
    out.mkdir(parents=True, exist_ok=True)
    rows = {
        family: [_row(family, name, by_architecture[name], sharded) for name in architectures]
        for family, architectures in registry.FAMILIES.items()
    }
    every_row = [row for ones in rows.values() for row in ones]
    counts = Counter(one["outcome"] for results in by_architecture.values() for one in results)
    pages = {out / "index.md": _index(every_row, counts, versions, mutants, sharded)}
    for family, ones in rows.items():
        page = _family_page(family, ones, by_architecture, versions, sharded)
        pages[out / f"{family}.md"] = page + mutants_section(registry.FAMILIES[family], mutants)
    for stale in set(out.glob("*.md")) - pages.keys():
        stale.unlink()
    for path, text in pages.items():
        path.write_text(text)
    overview.write(every_row, out / overview.FILE)
    return sorted(pages)


def verdict(results: list[Result], feature: str) -> str:
    """`yes`, `no`, `limited` or `n/a`: whether the tests behind a feature passed."""
    proofs = generated_tests()
    outcomes = {one["outcome"] for one in results if proofs.get(one["check"].split("[")[0]) == feature}
    if "failed" in outcomes:
        return "no"
    if "limited" in outcomes:
        return "limited"
    return "yes" if "passed" in outcomes else "n/a"


MUTANTS = "mutants.json"
"""Where the outcomes of the mutation run are, beside the results."""


def mutants_section(architectures: Iterable[str], outcomes: Mapping[str, Outcome]) -> str:
    """How many planted bugs the generated tests found in a family's architectures; empty without outcomes."""
    if not outcomes:
        return ""
    lines = ["", "## Mutants", "", "Bugs planted one by one, and how many of them the generated tests found:", ""]
    for name in architectures:
        if (outcome := outcomes.get(name)) is None:
            lines.append(f"- {name}: not tried")
            continue
        survivors = f"; survived: {', '.join(outcome.survived)}" if outcome.survived else ""
        lines.append(f"- {name}: {len(outcome.killed)} of {outcome.applicable}{survivors}")
    return "\n".join([*lines, ""])


def mutants_summary(mutants: Mapping[str, Outcome]) -> list[str]:
    """The same of all architectures, in a paragraph; none without outcomes."""
    if not mutants:
        return []
    killed = sum(len(one.killed) for one in mutants.values())
    applicable = sum(one.applicable for one in mutants.values())
    survivors = [f"{name} ({', '.join(one.survived)})" for name, one in mutants.items() if one.survived]
    return [
        f"Of {applicable:,} bugs planted one by one into {len(mutants)} architectures the generated tests found "
        f"{killed:,}. Survivors: {'; '.join(survivors) or 'none'}.",
        "",
    ]


GENERATED = "<!-- Generated by `nrl-models coverage` from results.json; do not edit. -->"


COLUMNS = (*FEATURES, *sharded_outcomes.FEATURES.values())
"""The features that pages have a column for."""


def _row(family: str, architecture: str, results: list[Result], sharded: Sharded) -> Row:
    if all(one["outcome"] == "skipped" for one in results):  # it needs what was not installed
        return Row(family, architecture, "", (), {}, 0)
    config = FamilyCase(registry.model_class(architecture)).config  # type: ignore[arg-type]
    features = {feature: verdict(results, feature) for feature in FEATURES} | sharded.verdicts(architecture)
    passed = sum(one["outcome"] == "passed" for one in results)
    return Row(family, architecture, config.model_type, tuple(kinds_of(config)), features, passed)


def _index(
    rows: list[Row], counts: Mapping[str, int], versions: dict[str, str], mutants: dict[str, Outcome], sharded: Sharded
) -> str:
    return "\n".join(
        [
            GENERATED,
            "# Model coverage",
            "",
            f"{len(registry.FAMILIES)} families, {len(rows)} architectures. {counts['passed']:,} generated tests "
            f"passed, {counts['failed']:,} failed; with {in_words(versions)}.",
            "",
            f"The columns up to {FEATURES[-1]} stand for tests against transformers' own class with the same weights; "
            "`n/a` where a model has no such thing (a classifier does not generate). What was not tested needs a "
            "package that was not installed, which its page names.",
            "",
            *sharded.summary(),
            *mutants_summary(mutants),
            "An architecture that is not here loads as transformers' own class, with the identity adapter "
            "and one warning; parity and export work for it all the same.",
            "",
            "By kind, below; `nrl-models coverage --kind moe --feature TP --feature 'packed sequences'` prints those "
            "architectures that are of a kind and have features (`--feature TP=refused`: another verdict than yes).",
            "",
            *overview.sections(rows, COLUMNS),
            "",
        ]
    )


def _family_page(
    family: str, rows: Sequence[Row], by_architecture: Results, versions: dict[str, str], sharded: Sharded
) -> str:
    tested = {row.architecture: by_architecture[row.architecture] for row in rows if row.features}
    untested = {row.architecture: by_architecture[row.architecture] for row in rows if not row.features}
    rows = [row for row in rows if row.features]
    reasons = [f"not tested: {reason.rpartition(': ')[0]}" for reason in _by_reason(untested, "skipped")]
    if not rows:
        return "\n".join([GENERATED, f"# {family}", "", *_bullets(reasons), ""])
    subjects: dict[str, Any] = {
        name: class_subject(registry.model_class(name))  # type: ignore[arg-type]
        for name in tested
    }
    flags = next(iter(subjects.values())).flags.names
    groups = grouped((group, name) for name, subject in subjects.items() for group in combined_groups(subject.model))
    limits = grouped(
        (f"{what}: {why}", name) for name, one in subjects.items() for what, why in one.model.limits.items()
    )
    outcomes = []
    for row in rows:
        counts = Counter(one["outcome"] for one in tested[row.architecture])
        numbers = (str(counts[outcome]) for outcome in ("passed", "failed", "skipped"))
        outcomes.append((row.architecture, row.model_type, ", ".join(row.kinds), *numbers))
    headings = ("architecture", "model type", "kind", "tests passed", "failed", "not applicable")
    parts = {
        "Architectures": table(headings, outcomes),
        "Combined projections": _bullets(
            group + ("" if len(names) == len(subjects) else f" ({', '.join(names)})") for group, names in groups.items()
        )
        or ["None: the hub's layout is combined already, or nothing reads one input."],
        "Flags": [", ".join(f"`{flag}`" for flag in flags) or "None."],
        "Quirks": [*page_lines(subjects), "", "For those of every model see [the catalogue](../quirks.md)."],
        "Features": [
            *table(("architecture", *COLUMNS), [(row.architecture, *row.features.values()) for row in rows]),
            *_after_blank(_bullets(sharded.reasons(tested))),
        ],
        "Configuration keys": _ledger_lines(tested),
        "Limits": _bullets(
            [
                *(f"{limit} ({', '.join(names)})" for limit, names in limits.items()),
                *_by_reason(tested, "failed"),
                *reasons,
            ]
            or ["None known."]
        ),
        "Not applicable": _bullets(_by_reason(tested, "skipped")),
    }
    lines = [GENERATED, f"# {family}", "", _about(family), ""]
    lines += [f"Source: `{families.module_of(family)}`. Tested with {in_words(versions)}."]
    for title, part in parts.items():
        lines += ["", f"## {title}", "", *part] if part else []
    return "\n".join([*lines, ""])


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _after_blank(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def _ledger_lines(architectures: Iterable[str]) -> list[str]:
    """What each key of the configurations was found to do."""
    found = {name: recorded().of[name] for name in architectures if name in recorded().of}
    if not found:
        return ["No ledger is recorded: run `nrl-models ledger`."]
    kinds = ["consumed", INERT, DEFAULT_ONLY]
    kinds += [UNTRIED] if any(ledger.count(UNTRIED) for ledger in found.values()) else []
    rows = [
        (name, str(len(ledger.kinds)), *(str(ledger.count(kind)) for kind in kinds)) for name, ledger in found.items()
    ]
    only = {f"`{path}={value!r}`": None for ledger in found.values() for path, value in ledger.supported.items()}
    supported = [f"Supported at their default only: {', '.join(only)}."] if only else []
    return [*table(("architecture", "keys", *kinds), rows), *_after_blank(supported)]


def _about(family: str) -> str:
    """What a family's module says of it; a row of the table says nothing."""
    if family in families.folders():
        return (sys.modules[families.module_of(family)].__doc__ or "").strip()
    return f"`transformers.models.{family}`, as a row of `nrl_models/families/table`."


def _by_reason(results: Results, outcome: str) -> list[str]:
    """Why tests failed, or did not apply, and of which architectures."""
    label = "failed: " if outcome == "failed" else ""
    reasons = grouped(
        (label + (one["reason"].removeprefix("Skipped: ") or f"`{one['check']}`"), name)
        for name, ones in results.items()
        for one in ones
        if one["outcome"] == outcome
    )
    return [f"{reason}: {', '.join(dict.fromkeys(names))}" for reason, names in reasons.items()]
