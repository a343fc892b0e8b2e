"""Pure-Python packages for a machine without a network.

`make gpu-wheels` downloads them where there is a package index: `python -m benchmarks.gpu.wheels FOLDER`. `make gpu`
then uses those that the machine lacks, without installing anything.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from benchmarks.gpu.outcomes import ROOT

PACKAGES = (
    "iniconfig",
    "lazy-loader",
    "markdown-it-py",
    "mdurl",
    "pluggy",
    "pygments",
    "pytest",
    "pytest-timeout",
    "rich",
)
"""Packages that the kit imports and that torch, transformers, accelerate, safetensors and einops may not install."""


def download(folder: Path, python: str) -> int:
    """Download the wheels, in the versions of constraints.txt, for a Python version. Return pip's exit status."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--python-version", python, "--implementation", "py", "--abi", "none", "--platform", "any"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder), *PACKAGES]
    return subprocess.run(command, check=False).returncode


def unpack(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels of packages that are not installed.

    Args:
        wheels: Folder of wheels.
        target: Folder to add to the Python path.

    Returns:
        Names of the unpacked packages.
    """
    unpacked = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        if is_installed(name):
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        unpacked.append(name)
    return unpacked


def is_installed(name: str) -> bool:
    """Return True if a distribution is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in PACKAGES if not is_installed(name)]


if __name__ == "__main__":
    sys.exit(download(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "3.11"))
