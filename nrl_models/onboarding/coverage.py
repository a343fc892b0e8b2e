"""The model coverage pages: written from the results of the generated tests, never by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from nrl_models import families, registry
from nrl_models.common.ledger import DEFAULT_ONLY, INERT, UNTRIED, recorded
from nrl_models.errors import NRLModelsError
from nrl_models.onboarding import overview
from nrl_models.onboarding import sharded as sharded_outcomes
from nrl_models.onboarding.inspect import combined_groups, kinds_of
from nrl_models.onboarding.overview import Row
from nrl_models.onboarding.sharded import Sharded
from nrl_models.quirks import Subject
from nrl_models.quirks.listing import page_lines
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import FEATURES, SUITE, generated_tests
from nrl_models.testing.mutants.run import Outcome, Results

Result = dict[str, Any]


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


def write_pages(results_file: Path, out: Path) -> list[Path]:
    """Write an overview, as Markdown and as data, and a page for each family to `out`.

    With the outcomes that `nrl-models mutate` and `make distributed-coverage` have left beside the results.

    Args:
        results_file: what `pytest --nrl-results` wrote.
        out: the folder; pages of families that are gone are removed.

    Raises:
        CoverageError: the file holds no results, or none of some architecture that is registered.
        FileNotFoundError: there is no such file.
    """
    by_architecture: dict[str, list[Result]] = defaultdict(list)
    try:
        content = json.loads(results_file.read_text())
        for result in content["results"]:
            by_architecture[result["architecture"]].append(result)
    except (ValueError, KeyError, TypeError) as error:
        raise CoverageError(f"{results_file} is not what pytest --nrl-results writes: {error!r}") from error
    untested = [name for names in registry.FAMILIES.values() for name in names if name not in by_architecture]
    if untested:
        raise CoverageError(f"{results_file} has no results for {', '.join(untested)}: run nrl-models coverage again")
    mutants_file = results_file.with_name(MUTANTS)
    mutants = Results.read(mutants_file).outcomes if mutants_file.is_file() else {}
    sharded = Sharded.read(results_file.with_name(sharded_outcomes.RESULTS))
    out.mkdir(parents=True, exist_ok=True)
    rows = _rows(by_architecture, sharded)
    counts = Counter(one["outcome"] for results in by_architecture.values() for one in results)
    pages = {out / "index.md": _index(rows, counts, content["versions"], mutants, sharded)}
    for family, architectures in registry.FAMILIES.items():
        results = {name: by_architecture[name] for name in architectures}
        page = _family_page(family, results, content["versions"], sharded)
        pages[out / f"{family}.md"] = page + mutants_section(architectures, mutants)
    for stale in set(out.glob("*.md")) - pages.keys():
        stale.unlink()
    for path, text in pages.items():
        path.write_text(text)
    overview.write(rows, out / overview.FILE)
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


def _rows(by_architecture: Mapping[str, list[Result]], sharded: Sharded) -> list[Row]:
    rows = []
    for family, architectures in registry.FAMILIES.items():
        for name in architectures:
            results = by_architecture[name]
            if _was_tested(results):
                features = {feature: verdict(results, feature) for feature in FEATURES} | sharded.verdicts(name)
                passed = sum(one["outcome"] == "passed" for one in results)
                rows.append(Row(family, name, _model_type(name), _kinds(name), features, passed))
            else:
                rows.append(Row(family, name, "", (), {}, 0))
    return rows


def _index(
    rows: list[Row],
    counts: Mapping[str, int],
    versions: dict[str, str],
    mutants: dict[str, Outcome],
    sharded: Sharded,
) -> str:
    return "\n".join(
        [
            GENERATED,
            "# Model coverage",
            "",
            f"{len(registry.FAMILIES)} families, {len(rows)} architectures. {counts['passed']:,} generated tests "
            f"passed, {counts['failed']:,} failed; with {_with(versions)}.",
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


def _family_page(family: str, results: dict[str, list[Result]], versions: dict[str, str], sharded: Sharded) -> str:
    module = families.module_of(family)
    untested = {name: ones for name, ones in results.items() if not _was_tested(ones)}
    results = {name: ones for name, ones in results.items() if name not in untested}
    reasons = [f"not tested: {reason.rpartition(': ')[0]}" for reason in _by_reason(untested, "skipped")]
    if not results:
        return "\n".join([GENERATED, f"# {family}", "", *(f"- {reason}" for reason in reasons), ""])
    classes = {name: registry.model_class(name) for name in results}
    first: Any = next(iter(classes.values()))
    lines = [GENERATED, f"# {family}", "", _about(family), ""]
    lines += [f"Source: `{module}`. Tested with {_with(versions)}.", "", "## Architectures", ""]
    lines += [
        "| architecture | model type | kind | tests passed | failed | not applicable |",
        "|---|---|---|---|---|---|",
    ]
    for name, ones in results.items():
        count = {outcome: sum(one["outcome"] == outcome for one in ones) for outcome in ("passed", "failed", "skipped")}
        what = f"{name} | {_model_type(name)} | {', '.join(_kinds(name))}"
        lines.append(f"| {what} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    groups: dict[str, list[str]] = defaultdict(list)
    for name, model_class in classes.items():
        for group in _groups(model_class):
            groups[group].append(name)
    lines += ["", "## Combined projections", ""]
    for group, names in groups.items():
        where = "" if len(names) == len(classes) else f" ({', '.join(names)})"
        lines.append(f"- {group}{where}")
    if not groups:
        lines.append("None: the hub's layout is combined already, or nothing reads one input.")
    lines += ["", "## Flags", "", ", ".join(f"`{flag}`" for flag in first.flags.names) or "None.", ""]
    subjects = {name: Subject.of_class(model_class) for name, model_class in classes.items()}
    lines += [
        "## Quirks",
        "",
        *page_lines(subjects),
        "",
        "For those of every model see [the catalogue](../quirks.md).",
        "",
    ]
    lines += ["## Features", "", f"| architecture | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, ones in results.items():
        verdicts = [*(verdict(ones, feature) for feature in FEATURES), *sharded.verdicts(name).values()]
        lines.append(f"| {name} | {' | '.join(verdicts)} |")
    if reasons_of_sharding := sharded.reasons(results):
        lines += ["", *(f"- {one}" for one in reasons_of_sharding)]
    lines += ["", "## Configuration keys", "", *_ledger_lines(results)]
    stated: dict[str, list[str]] = defaultdict(list)
    for name, model_class in classes.items():
        for feature, reason in model_class.limits.items():
            stated[f"{feature}: {reason}"].append(name)
    limits = [f"{limit} ({', '.join(names)})" for limit, names in stated.items()]
    limits += [*_by_reason(results, "failed"), *reasons]
    lines += ["", "## Limits", "", *(f"- {limit}" for limit in limits or ["None known."])]
    if skipped := _by_reason(results, "skipped"):
        lines += ["", "## Not applicable", "", *(f"- {reason}" for reason in skipped)]
    return "\n".join([*lines, ""])


def _ledger_lines(architectures: Iterable[str]) -> list[str]:
    """What each key of the configurations was found to do."""
    found = {name: recorded().of[name] for name in architectures if name in recorded().of}
    if not found:
        return ["No ledger is recorded: run `nrl-models ledger`."]
    kinds = ["consumed", INERT, DEFAULT_ONLY]
    kinds += [UNTRIED] if any(ledger.count(UNTRIED) for ledger in found.values()) else []
    lines = [f"| architecture | keys | {' | '.join(kinds)} |", f"|---|---|{'---|' * len(kinds)}"]
    for name, ledger in found.items():
        lines.append(f"| {name} | {len(ledger.kinds)} | {' | '.join(str(ledger.count(kind)) for kind in kinds)} |")
    only = {f"`{path}={value!r}`": None for ledger in found.values() for path, value in ledger.supported.items()}
    return [*lines, *(["", f"Supported at their default only: {', '.join(only)}."] if only else [])]


def _was_tested(results: list[Result]) -> bool:
    """Whether any test ran: none does where the architecture needs what was not installed."""
    return any(one["outcome"] != "skipped" for one in results)


def _about(family: str) -> str:
    """What a family's module says of it; a row of the table says nothing."""
    if family in families.FAMILIES:
        return (sys.modules[families.module_of(family)].__doc__ or "").strip()
    return f"`transformers.models.{family}`, as a row of `nrl_models/families/standard/table.py`."


def _by_reason(results: dict[str, list[Result]], outcome: str) -> list[str]:
    """Why tests failed, or did not apply, and of which architectures."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, ones in results.items():
        for one in ones:
            if one["outcome"] == outcome:
                reason = one["reason"].removeprefix("Skipped: ") or f"`{one['check']}`"
                reasons[f"{outcome}: {reason}" if outcome == "failed" else reason].append(name)
    return [f"{reason}: {', '.join(dict.fromkeys(names))}" for reason, names in reasons.items()]


def _groups(model_class: Any) -> list[str]:
    config = FamilyCase(model_class).config  # found where models run, which they do not on meta
    with torch.device("meta"):
        model = model_class(config)
    return list(combined_groups(model))


def _kinds(architecture: str) -> tuple[str, ...]:
    return tuple(kinds_of(_config(architecture)))


def _model_type(architecture: str) -> str:
    """What `config.json` calls its configuration."""
    return _config(architecture).model_type


@cache  # the overview and the family's page ask
def _config(architecture: str) -> PreTrainedConfig:
    """Of the tiny model: nobody changes it."""
    model_class: Any = registry.model_class(architecture)
    return FamilyCase(model_class).config


def _with(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items() if package != "nrl_models")
