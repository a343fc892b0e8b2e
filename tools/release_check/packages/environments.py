"""Environments with other versions of some packages, on top of the environment that runs the release check.

An environment is a virtual environment without pip that also contains the packages of the base environment. pip only
installs differences. Its folder name is derived from the requested versions and the base environment's packages, so
equal environments are reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

from tools.checkout import ROOT
from tools.release_check.errors import InstallError

READY = ".ready"
BASE_PACKAGES = "base_packages.pth"
MINUTES = 60.0
"""Seconds of a minute, for timeouts."""

SECONDS = 3600


def cache_folder() -> Path:
    """Return the folder of environments and wheels: `$NRL_MODELS_RELEASE_CACHE`, or a folder in the user's cache."""
    if folder := os.environ.get("NRL_MODELS_RELEASE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nrl_models" / "release_check"


def wheels_folder() -> Path:
    """Return the folder of wheels that are read for names and sources."""
    return cache_folder() / "wheels"


@dataclass(frozen=True)
class Environment:
    """An environment in which a checkout of nrl_models runs.

    Args:
        folder: The virtual environment.
        checkout: The repository whose nrl_models and tests are used.
    """

    folder: Path
    checkout: Path

    @property
    def python(self) -> Path:
        """The path of its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The folder into which pip installs packages that differ from the base environment."""
        return self.folder / sysconfig.get_path("purelib", vars={"base": "", "platbase": ""}).lstrip("/")

    @cached_property
    def versions(self) -> dict[str, Version]:
        """Versions of all packages in it, by lowercase name."""
        text = self.output(["-m", "tools.release_check.packages.installed"])
        return {name: Version(version) for name, version in json.loads(text).items()}

    def variables(self) -> dict[str, str]:
        """Environment variables to run the tools of this repository on the checkout's nrl_models."""
        stage = self.folder / "tools_of" / hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
        if not (stage / "tools").exists():  # only `tools`: the repository also has an nrl_models
            stage.mkdir(parents=True, exist_ok=True)
            (stage / "tools").symlink_to(ROOT / "tools")
        # The checkout may also have `tools`, and the base environment has an nrl_models.
        path = os.pathsep.join(map(str, (stage, self.checkout)))
        return os.environ | {
            "PYTHONPATH": path,
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def run(self, arguments: Sequence[str], log: Path, *, timeout: float, cwd: Path | None = None) -> int:
        """Run Python with arguments, and append its output to `log`.

        Returns:
            The exit status. -1 if it took longer than `timeout` seconds.
        """
        with log.open("a") as file:
            try:
                return subprocess.run(
                    [str(self.python), *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.variables(),
                    cwd=cwd or self.folder,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return -1

    def output(self, arguments: Sequence[str]) -> str:
        """Run Python with arguments, and return its output.

        Raises:
            InstallError: It fails, so the environment is broken.
        """
        command = [str(self.python), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.variables(), cwd=self.folder, check=False
        )
        if done.returncode:
            raise InstallError(f"{self.folder}: {_last_line(done.stderr)}. Delete the folder and run this again")
        return done.stdout


def make_environment(
    requirements: Mapping[str, Version], checkout: Path, *, pinned: Mapping[str, Version] | None = None
) -> Environment:
    """Create an environment with these package versions, or return an existing equal one.

    Args:
        requirements: Versions by package.
        checkout: The repository whose nrl_models is used.
        pinned: Versions that pip must not change.

    Raises:
        InstallError: pip cannot install the packages.
    """
    wanted = [f"{name}=={version}" for name, version in sorted(requirements.items())]
    key = json.dumps([wanted, sorted(_base_packages().items()), sys.prefix, sys.version])
    names = "-".join(f"{name}{version}" for name, version in sorted(requirements.items())) or "base"
    folder = cache_folder() / "environments" / f"{names[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    environment = Environment(folder, checkout.resolve())
    if (folder / READY).is_file():
        return environment
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    venv.create(folder, with_pip=False, symlinks=True)
    (environment.packages / BASE_PACKAGES).write_text(f"{sysconfig.get_path('purelib')}\n")
    try:
        if wanted:
            _install(environment, wanted, pinned or {})
    except InstallError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / READY).touch()
    return environment


def _install(environment: Environment, wanted: Sequence[str], pinned: Mapping[str, Version]) -> None:
    constraints = environment.folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pinned.items())))
    command = [sys.executable, "-m", "pip", "--python", str(environment.python), "install", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary", ":all:", "--no-compile"]
    command += ["--constraint", str(constraints), *wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{', '.join(wanted)}: pip took more than {SECONDS} s") from error
    if done.returncode:
        raise InstallError(f"{', '.join(wanted)}: pip cannot install it: {_last_line(done.stderr)}")


def _base_packages() -> dict[str, str]:
    return {found.name.lower(): found.version for found in distributions()}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1]
