"""Run the generated tests, record their outcomes by architecture, and derive a verdict for each feature."""

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
from tools.architectures import require_registered
from tools.coverage_pages.errors import CoverageError
from tools.coverage_pages.overview import Verdict
from tools.coverage_pages.results import Kind, Record, Records, grouped, write_record

Row = Mapping[str, Any]
"""The outcome of one test, as `pytest --nrl-results` writes it."""


@dataclass(frozen=True)
class GeneratedTests:
    """The outcomes of the generated tests of one architecture.

    Args:
        model_type: `model_type` of its configuration.
        kinds: See `nrl_models.onboarding.inspect.kinds_of`.
        passed: Number of tests that passed.
        features: By verdict, the features that have it. All other features are not applicable.
        failed: By name of a failed test, the reason.
        skipped: By reason for skipping, the number of tests skipped for it.
    """

    model_type: str
    kinds: Sequence[str]
    passed: int
    features: Mapping[str, Sequence[str]]
    failed: Mapping[str, str]
    skipped: Mapping[str, int]

    @classmethod
    def of(cls, architecture: str, rows: Sequence[Row]) -> GeneratedTests:
        """Collect the outcomes of a run that tested an architecture."""
        config = FamilyCase(registry.model_class(architecture)).config  # type: ignore[arg-type]
        features = grouped((str(verdict_of(rows, feature)), feature) for feature in FEATURES)
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
        """Return the verdict of each feature."""
        found = {feature: Verdict(verdict) for verdict, features in self.features.items() for feature in features}
        return {feature: found.get(feature, Verdict.NOT_APPLICABLE) for feature in FEATURES}


def verdict_of(rows: Iterable[Row], feature: str) -> Verdict:
    """Return the verdict of a feature: the worst outcome of its tests."""
    proofs = generated_tests()
    outcomes = {row["outcome"] for row in rows if proofs.get(row["check"].split("[")[0]) == feature}
    worst_first = {"failed": Verdict.FAILS, "limited": Verdict.LIMITED, "passed": Verdict.YES}
    return next((verdict for outcome, verdict in worst_first.items() if outcome in outcomes), Verdict.NOT_APPLICABLE)


def read_generated_tests(records: Records) -> dict[str, GeneratedTests]:
    """Read the recorded outcomes of the generated tests, by architecture."""
    return {name: GeneratedTests(**record.outcome) for name, record in records[Kind.TESTS].items()}


def run_generated_tests(architectures: Sequence[str], results: Path) -> None:
    """Run the generated tests and write the outcome of each to a file.

    Args:
        architectures: Registered names, or classes as MODULE:CLASS. If empty, every registered architecture.
        results: The file.

    Raises:
        UnknownArchitectureError: A name is not registered.
        CoverageError: pytest could not run the tests. Failed tests are results, not errors.
    """
    require_registered(name for name in architectures if ":" not in name)
    parallel = ["-n", "auto", "--dist", "loadgroup"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, f"--nrl-results={results}"]
    chosen = [f"--nrl-family={name}" for name in architectures] or [str(SUITE)]
    run = subprocess.run([*command, *chosen], check=False)
    if run.returncode not in (0, 1) or not results.is_file():
        raise CoverageError(f"pytest ended with exit status {run.returncode} and left no results in {results}")


def record_generated_tests(results: Path, pages: Path) -> list[str]:
    """Record the outcomes of the architectures that a run of the generated tests covered.

    An architecture whose tests are all skipped, because a package is not installed, keeps its previous record.

    Args:
        results: The file that `pytest --nrl-results` wrote.
        pages: The folder of the coverage pages.

    Returns:
        The recorded architectures.

    Raises:
        CoverageError: The file does not exist, or has other contents.
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
