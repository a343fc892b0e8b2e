"""The outcomes of the generated tests: run, recorded by architecture, and what they say of each feature."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nrl_models import registry
from nrl_models.onboarding.inspect import kinds_of
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import FEATURES, SUITE, generated_tests
from tools.coverage_pages.errors import CoverageError
from tools.coverage_pages.overview import Verdict
from tools.coverage_pages.results import Kind, Record, Records, grouped, write_record

Row = Mapping[str, Any]
"""The outcome of one test, as `pytest --nrl-results` writes it."""


@dataclass(frozen=True)
class GeneratedTests:
    """The outcomes of the generated tests of one architecture.

    Args:
        model_type: what `config.json` calls its configuration.
        kinds: see `nrl_models.onboarding.inspect.kinds_of`.
        passed: how many passed.
        features: for each verdict the features that have it; the others are not applicable.
        failed: for each test that failed the reason.
        skipped: for each reason why a test does not apply how many it was said of.
    """

    model_type: str
    kinds: Sequence[str]
    passed: int
    features: Mapping[str, Sequence[str]]
    failed: Mapping[str, str]
    skipped: Mapping[str, int]

    @classmethod
    def of(cls, architecture: str, rows: Sequence[Row]) -> GeneratedTests:
        """The outcomes of a run that tried an architecture."""
        config = FamilyCase(registry.model_class(architecture)).config  # type: ignore[arg-type]
        features = grouped((verdict_of(rows, feature), feature) for feature in FEATURES)
        features.pop(Verdict.NOT_APPLICABLE, None)
        return cls(
            config.model_type,
            kinds_of(config),
            sum(row["outcome"] == "passed" for row in rows),
            features,
            {row["check"]: row["reason"] for row in rows if row["outcome"] == "failed"},
            dict(Counter(row["reason"].removeprefix("Skipped: ") for row in rows if row["outcome"] == "skipped")),
        )

    def verdicts(self) -> dict[str, Verdict]:
        """For each feature its verdict."""
        found = {feature: Verdict(verdict) for verdict, features in self.features.items() for feature in features}
        return {feature: found.get(feature, Verdict.NOT_APPLICABLE) for feature in FEATURES}


def verdict_of(rows: Iterable[Row], feature: str) -> Verdict:
    """Whether the tests behind a feature passed: the worst of their outcomes."""
    proofs = generated_tests()
    outcomes = {row["outcome"] for row in rows if proofs.get(row["check"].split("[")[0]) == feature}
    worst_first = {"failed": Verdict.FAILS, "limited": Verdict.LIMITED, "passed": Verdict.YES}
    return next((verdict for outcome, verdict in worst_first.items() if outcome in outcomes), Verdict.NOT_APPLICABLE)


def read_generated_tests(records: Records) -> dict[str, GeneratedTests]:
    """What is recorded of the generated tests, by architecture."""
    return {name: GeneratedTests(**record.outcome) for name, record in records[Kind.TESTS].items()}


def run_generated_tests(architectures: Sequence[str], results: Path) -> None:
    """Run the generated tests and write the outcome of each to a file.

    Args:
        architectures: of which, or classes as MODULE:CLASS; of every registered one if there are none.
        results: the file.

    Raises:
        UnknownArchitectureError: names that no family serves.
        CoverageError: pytest could not run them. Failed tests are results, not errors.
    """
    registry.require_served(name for name in architectures if ":" not in name)
    parallel = ["-n", "auto", "--dist", "loadgroup"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, f"--nrl-results={results}"]
    chosen = [f"--nrl-family={name}" for name in architectures] or [str(SUITE)]
    run = subprocess.run([*command, *chosen], check=False)
    if run.returncode not in (0, 1) or not results.is_file():
        raise CoverageError(f"pytest ended with exit status {run.returncode} and left no results in {results}")


def record_generated_tests(results: Path, pages: Path) -> list[str]:
    """Record the outcomes of those architectures that a run of the generated tests tried.

    What was skipped whole, because it needs what is not installed, was not tried: what is recorded of it stays.

    Args:
        results: what `pytest --nrl-results` wrote.
        pages: the folder of the coverage pages.

    Returns:
        The architectures.

    Raises:
        CoverageError: the file is not there, or holds something else.
    """
    try:
        content = json.loads(results.read_text())
        versions, rows = content["versions"], grouped((row["architecture"], row) for row in content["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CoverageError(f"{results} is not what pytest --nrl-results writes: {error!r}") from error
    tried = [name for name, outcomes in rows.items() if any(row["outcome"] != "skipped" for row in outcomes)]
    for name in tried:
        outcome = asdict(GeneratedTests.of(name, rows[name]))
        write_record(pages, Kind.TESTS, name, Record(versions, outcome))
    return tried
