"""The mutation run: plant each bug into an architecture, and run the generated tests until one fails.

The tests are called directly. A pytest session for each bug would take longer than most of the tests.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models import registry
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies, suite
from nrl_models.testing.tiny import silent_transformers
from tools.architectures import require_registered
from tools.coverage_pages.results import Kind, Record, Records, grouped, read_records, write_record
from tools.mutants import CATALOG, Mutant
from tools.mutants.probe import probe
from tools.variants import SEPARATOR, case_of, with_variants


@dataclass(frozen=True, eq=False)
class Check:
    """One generated test with its parameters.

    Args:
        name: The pytest name, without the architecture.
        test: The function.
        arguments: Its parameters, without fixtures.
    """

    name: str
    test: Callable[..., None]
    arguments: dict[str, Any]

    @property
    def function(self) -> str:
        """The test's name without parameters."""
        return self.test.__name__


SLOW = ("test_full_size_names_and_shapes",)


def checks() -> list[Check]:
    """Return every generated test with every set of parameters, in file order. Slow tests come last."""
    found = []
    for name, test in suite().items():
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        for values in itertools.product(*([*mark.args[1]] for mark in marks)):
            arguments = {mark.args[0]: value for mark, value in zip(marks, values, strict=True)}
            ids = "-".join(str(value).removeprefix("torch.") for value in values)
            found.append(Check(f"{name}[{ids}]" if ids else name, test, arguments))
    return sorted(found, key=lambda check: check.function in SLOW)


@dataclass
class Outcome:
    """The outcomes of the mutants of one architecture, by name.

    Attributes:
        killed: For each mutant that a test found, the test.
        survived: Mutants that no test found.
        inert: Mutants without an effect on this model.
        impossible: Mutants that need a structure this model does not have.
    """

    killed: dict[str, str] = field(default_factory=dict)
    survived: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)

    @property
    def applicable(self) -> int:
        """Return the number of mutants that the architecture can have."""
        return len(self.killed) + len(self.survived)

    @property
    def not_run(self) -> list[str]:
        """Return the mutants that were added to the catalog after this run."""
        tried = {*self.killed, *self.survived, *self.inert, *self.impossible}
        return [mutant.name for mutant in CATALOG if mutant.name not in tried]

    def followed_by(self, other: Outcome) -> Outcome:
        """Merge this outcome with a later one of its survivors and of mutants that had not run."""
        return Outcome(
            self.killed | other.killed, other.survived, self.inert + other.inert, self.impossible + other.impossible
        )

    def to_json(self) -> dict[str, Any]:
        """Format the record: mutants by the test that found them."""
        return asdict(self) | {"killed": grouped((test, mutant) for mutant, test in self.killed.items())}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Outcome:
        """Read a record, without mutants that are no longer in the catalog."""
        known = {mutant.name for mutant in CATALOG}
        lists = {
            key: [mutant for mutant in content[key] if mutant in known] for key in ("survived", "inert", "impossible")
        }
        killers = {mutant: test for test, mutants in content["killed"].items() for mutant in mutants if mutant in known}
        return cls(killers, **lists)


class Hunt:
    """Run the generated tests against the mutants of one case.

    Args:
        case: The class under test, without a bug.
        only: Names of the generated tests to run. All if None.
    """

    def __init__(self, case: FamilyCase, only: Sequence[str] | None = None) -> None:
        self.case = case
        limits = case.model_class.limits
        # Tests of features that a family does not support fail without a bug.
        self._checks = [
            check
            for check in checks()
            if check.test.feature not in limits  # type: ignore[attr-defined]
            and applies(check.test, case)
            and (only is None or check.function in only)
        ]
        self._passes: dict[Check, bool] = {}

    def run(self, mutants: Iterable[Mutant] = CATALOG, progress: Callable[[str], None] = lambda line: None) -> Outcome:
        """Plant one mutant after the other.

        Args:
            mutants: The mutants.
            progress: Called with a line for each mutant: its name, and the test that found it.
        """
        outcome = Outcome()
        for mutant in mutants:
            if not mutant.bug.is_possible(self.case):
                outcome.impossible.append(mutant.name)
                progress(f"{mutant.name}: not applicable")
                continue
            likely = [check for name in mutant.killers for check in self._checks if check.function == name]
            others = [check for check in self._checks if check not in likely]
            killer = self.killer(mutant, likely)
            if killer is None and mutant.bug.is_inert(self.case, self._expected):
                outcome.inert.append(mutant.name)
                progress(f"{mutant.name}: no effect on this model")
            elif (killer := killer or self.killer(mutant, others)) is None:
                outcome.survived.append(mutant.name)
                progress(f"{mutant.name}: SURVIVED")
            else:
                outcome.killed[mutant.name] = killer
                progress(f"{mutant.name}: found by {killer}")
        return outcome

    def killer(self, mutant: Mutant, among: Iterable[Check]) -> str | None:
        """Return the first test that passes without the bug and fails with it."""
        for check in among:
            # Run without the bug first, so that the objects the case caches are correct.
            if not self._passes_clean(check):
                continue
            with mutant.bug.planted(self.case) as mutated:
                failure = failure_of(check, mutated)
            if failure is not None:
                raised = "" if isinstance(failure, AssertionError) else f" ({type(failure).__name__})"
                return check.name + raised
        return None

    def _passes_clean(self, check: Check) -> bool:
        if check not in self._passes:
            self._passes[check] = failure_of(check, self.case, skipped=True) is None
        return self._passes[check]

    @cached_property
    def _expected(self) -> list[torch.Tensor]:
        return probe(self.case)


def failure_of(check: Check, case: FamilyCase, *, skipped: bool = False) -> BaseException | None:
    """Return the exception that a test raises for a case, or None if it passes.

    Args:
        check: The test.
        case: The case to run it on.
        skipped: Whether a skipped test counts as failed.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            given = {"family_case": case, "tmp_path": Path(folder)}
            wanted = inspect.signature(check.test).parameters
            check.test(**{name: value for name, value in given.items() if name in wanted}, **check.arguments)
    except pytest.skip.Exception as error:
        return error if skipped else None
    except (Exception, pytest.fail.Exception) as error:
        return error.with_traceback(None)  # the traceback's frames would keep models alive
    return None


def architectures_in_order(chosen: Sequence[str] | None = None) -> list[str]:
    """Return the architectures, or all registered ones with their variants: first one of each family, then the others.

    Raises:
        UnknownArchitectureError: A name is not registered.
    """
    if chosen:
        require_registered(name.partition(SEPARATOR)[0] for name in chosen)
        return list(chosen)
    families = [[name for name in names if name not in registry.ALIASES] for names in registry.FAMILIES.values()]
    return [
        *(names[0] for names in families if names),
        *(name for names in families for name in with_variants(names)[1:]),
    ]


def run_mutants(
    architectures: Iterable[str],
    pages: Path,
    *,
    again: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[str, Outcome]]:
    """Run the catalog on architectures one after the other, and record each outcome.

    An interrupted run resumes. For architectures recorded with the installed versions, only survivors and new mutants
    run.

    Args:
        architectures: Registered names. Architectures whose packages are not installed are skipped.
        pages: The folder of the coverage pages, which contains the outcomes.
        again: Also run mutants with a recorded outcome.
        progress: Called with a line for each mutant.

    Yields:
        Each architecture with its outcome.
    """
    versions = {package: version(package) for package in ("torch", "transformers")}
    records = read_records(pages)[Kind.MUTANTS]
    for architecture in architectures:
        if registry.unmet_requirement(architecture):
            continue
        record = records.get(architecture)
        known = Outcome.from_json(record.outcome) if record and record.versions == versions and not again else None
        missing = [mutant for mutant in CATALOG if known is None or mutant.name in (*known.survived, *known.not_run)]
        outcome = known or Outcome()
        if missing:
            with silent_transformers():
                outcome = outcome.followed_by(Hunt(case_of(architecture)).run(missing, progress))
            write_record(pages, Kind.MUTANTS, architecture, Record(versions, outcome.to_json()))
        yield architecture, outcome


def read_outcomes(records: Records) -> dict[str, Outcome]:
    """Read the recorded outcomes of mutants, by architecture."""
    return {name: Outcome.from_json(record.outcome) for name, record in records[Kind.MUTANTS].items()}
