"""The versions that a release check tests, with their environment and output folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from nrl_models.errors import did_you_mean
from tools.release_check.errors import ReleaseCheckError
from tools.release_check.findings import Phase
from tools.release_check.packages.environments import MINUTES, Environment, wheels_folder
from tools.release_check.upstream_code.sources import Sources, sources_of


@dataclass(frozen=True)
class Subject:
    """The versions to check, and the environment and folder for it.

    Args:
        environment: The environment in which they are installed.
        versions: Versions under test by package.
        tested: Versions that the checkout's constraints pin.
        names_only: Packages that are too large to install. Only their names are looked up.
        out: Folder for outcomes.
        jobs: Number of parallel processes.
        names: Architectures. If empty, all of them, and one of each pattern in the generated suite.
    """

    environment: Environment
    versions: Mapping[str, Version]
    tested: Mapping[str, Version]
    names_only: frozenset[str]
    out: Path
    jobs: int
    names: tuple[str, ...] = ()

    @property
    def checkout(self) -> Path:
        """The repository whose nrl_models is checked."""
        return self.environment.checkout

    @cached_property
    def _subjects(self) -> dict[str, Any]:
        return json.loads(self.environment.output(["-m", "tools.release_check.subjects"]))

    @property
    def quick_architectures(self) -> tuple[str, ...]:
        """The architectures of the generated suite."""
        return self.names or tuple(self._subjects["quick"])

    def family_of(self, architecture: str) -> str:
        """Return the family of an architecture."""
        return self._subjects["families"].get(architecture, architecture)

    def sources(self, package: str) -> tuple[Sources, Sources] | None:
        """Return sources of the tested version and of the one under test. None if they are the same."""
        before, after = self.tested.get(package), self.versions.get(package)
        if before is None or after is None or before == after:
            return None
        return sources_of(package, before, wheels_folder()), sources_of(package, after, wheels_folder())

    def has_new(self, package: str) -> bool:
        """Return True if the environment has another version of a package than the tested one."""
        found = None if package in self.names_only else self.versions.get(package)
        return found is not None and found != self.tested.get(package)

    def require_known_names(self) -> None:
        """Raise an error if the checkout does not have an architecture in `names`.

        Raises:
            ReleaseCheckError: It lacks one.
        """
        known = self._subjects["families"] if self.names else {}
        if unknown := [name for name in self.names if name not in known]:
            raise ReleaseCheckError(*(f"--name {name}: not registered{did_you_mean(name, known)}" for name in unknown))

    def file(self, phase: Phase) -> Path:
        """Return the file of a phase's outcomes."""
        return self.out / f"{phase}.jsonl"

    def run(self, phase: Phase, arguments: Sequence[str], *, minutes: float, cwd: Path | None = None) -> int:
        """Run a module in the environment, and write its output to the phase's log."""
        log = self.out / f"{phase}.log"
        return self.environment.run(arguments, log, timeout=minutes * MINUTES, cwd=cwd)
