"""The mutation run: plant each bug into an architecture, and run the generated tests until one fails.

The tests are called as they are, without a session of pytest for each bug, which would take longer than most of them.
"""

from __future__ import annotations

import inspect
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models import registry
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.devtools.mutants import CATALOGUE, Mutant
from nrl_models.devtools.mutants.probe import probe
from nrl_models.errors import UnknownArchitectureError
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import suite
from nrl_models.testing.tiny import silent_transformers


@dataclass(frozen=True, eq=False)
class Check:
    """One generated test with its parameters.

    Args:
        name: as pytest names it, without the architecture.
        test: the function.
        arguments: its parameters, without fixtures.
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
    """Every generated test with every set of parameters, in the order of the files; those that take long last."""
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
    """What became of the mutants of one architecture, by their names.

    Attributes:
        killed: for each mutant that a test found the test.
        survived: those that none found.
        inert: those of which nothing comes in this model.
        not_run: those that the catalogue has got since.
    """

    killed: dict[str, str] = field(default_factory=dict)
    survived: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    @property
    def applicable(self) -> int:
        """How many mutants the architecture can have."""
        return len(self.killed) + len(self.survived)

    def followed_by(self, other: Outcome) -> Outcome:
        """This outcome, and that of other mutants: of its survivors, and of those that were not run."""
        return Outcome(self.killed | other.killed, other.survived, self.inert + other.inert)


class Hunt:
    """The generated tests against the mutants of one case.

    Args:
        case: the class under test, without a bug.
        only: names of the generated tests to run; all if None.
    """

    def __init__(self, case: FamilyCase, only: Sequence[str] | None = None) -> None:
        self.case = case
        limits = case.model_class.limits
        # Those of what a family lacks fail anyhow.
        self._checks = [
            one
            for one in checks()
            if one.test.feature not in limits and (only is None or one.function in only)  # type: ignore[attr-defined]
        ]
        self._passes: dict[Check, bool] = {}

    def run(self, mutants: Iterable[Mutant] = CATALOGUE) -> Outcome:
        """Plant one after the other."""
        outcome = Outcome()
        for mutant in mutants:
            if not mutant.bug.is_possible(self.case):
                continue
            likely = [one for name in mutant.killers for one in self._checks if one.function == name]
            others = [one for one in self._checks if one not in likely]
            killer = self.killer(mutant, likely)
            if killer is None and mutant.bug.is_inert(self.case, self._expected):
                outcome.inert.append(mutant.name)
            elif (killer := killer or self.killer(mutant, others)) is None:
                outcome.survived.append(mutant.name)
            else:
                outcome.killed[mutant.name] = killer
        return outcome

    def killer(self, mutant: Mutant, among: Iterable[Check]) -> str | None:
        """The first test that passes without the bug and fails with it."""
        for check in among:
            # First without: so that whatever the case keeps is built right.
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
    """What a test raises for a case; None if it passes.

    Args:
        check: the test.
        case: what to run it on.
        skipped: whether skipping counts as failing.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            given = {"family_case": case, "tmp_path": Path(folder)}
            wanted = inspect.signature(check.test).parameters
            check.test(**{name: one for name, one in given.items() if name in wanted}, **check.arguments)
    except pytest.skip.Exception as error:
        return error if skipped else None
    except (Exception, pytest.fail.Exception) as error:
        return error.with_traceback(None)  # whose frames would keep models
    return None


def architectures_in_order(chosen: Sequence[str] | None = None) -> list[str]:
    """The given architectures, or every registered one: first one of each family, then the others.

    Raises:
        UnknownArchitectureError: names that no family serves.
    """
    if chosen:
        if unknown := [name for name in chosen if name not in registry.architectures()]:
            raise UnknownArchitectureError(f"no family serves {', '.join(unknown)}")
        return list(chosen)
    families = [[name for name in names if name not in registry.ALIASES] for names in registry.FAMILIES.values()]
    return [*(names[0] for names in families if names), *(name for names in families for name in names[1:])]


def run_mutants(architectures: Iterable[str], file: Path, *, again: bool = False) -> Iterator[tuple[str, Outcome]]:
    """Run the catalogue on architectures one after the other, and keep the results in a file.

    The file is written after each of them, so that a run that was cut short goes on where it was: of architectures
    that are in it only those mutants are run that survived, or that the catalogue has got since.

    Args:
        architectures: names in the registry; those that need a package that is not installed are left out.
        file: the results, see `read_outcomes`; made if it is not there.
        again: run what is in the file, too.

    Yields:
        Each architecture with its outcome.
    """
    outcomes = read_outcomes(file)
    for architecture in architectures:
        if registry.unmet_requirement(architecture):
            continue
        known = None if again else outcomes.get(architecture)
        missing = [one for one in CATALOGUE if known is None or one.name in (*known.survived, *known.not_run)]
        if missing:
            with silent_transformers():
                model_class: Any = registry.model_class(architecture)
                found = Hunt(FamilyCase(model_class)).run(missing)
            outcomes[architecture] = found if known is None else known.followed_by(found)
            _write(outcomes, file)
        yield architecture, outcomes[architecture]


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """The outcomes by architecture that `run_mutants` wrote; none without a file.

    It holds `{"versions", "mutants": {name: stands for}, "architectures": {name: outcome}}`, where an outcome is
    `{"killed": {test: [mutants]}, "survived": [mutants], "inert": [mutants]}`, with `"not_run"` where the catalogue has
    grown since. Mutants that left the catalogue are left out.
    """
    if not file.is_file():
        return {}
    content = json.loads(file.read_text())
    known = [mutant.name for mutant in CATALOGUE]
    outcomes = {}
    for architecture, one in content["architectures"].items():
        killers = {mutant: test for test, mutants in one["killed"].items() for mutant in mutants}
        outcomes[architecture] = Outcome(
            {mutant: test for mutant, test in killers.items() if mutant in known},
            [mutant for mutant in one["survived"] if mutant in known],
            [mutant for mutant in one["inert"] if mutant in known],
            [mutant for mutant in known if mutant in one.get("not_run", ()) or mutant not in content["mutants"]],
        )
    return outcomes


def _write(outcomes: Mapping[str, Outcome], file: Path) -> None:
    """Write the file, whole or not at all."""
    architectures = {}
    for name, outcome in sorted(outcomes.items()):
        killed: dict[str, list[str]] = {}
        for mutant, test in outcome.killed.items():
            killed.setdefault(test, []).append(mutant)
        architectures[name] = {"killed": killed, "survived": outcome.survived, "inert": outcome.inert}
        if outcome.not_run:
            architectures[name]["not_run"] = outcome.not_run
    versions = {package: version(package) for package in ("torch", "transformers")}
    stands_for = {mutant.name: mutant.stands_for for mutant in CATALOGUE}
    content = {"versions": versions, "mutants": stands_for, "architectures": architectures}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content, indent=1) + "\n")
