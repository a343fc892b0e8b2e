"""Features that older versions of transformers do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from packaging.version import Version

from nrl_models import registry
from nrl_models.common.upstream import has_reached
from nrl_models.testing.case import FamilyCase


def tested_version() -> Version:
    """Return the transformers version that tests are written for."""
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    return next(Version(line.removeprefix("transformers==")) for line in lines if line.startswith("transformers=="))


def since(version: str) -> pytest.MarkDecorator:
    """Mark a test of a feature that transformers has since a version."""
    return pytest.mark.skipif(not has_reached(version), reason=f"transformers {version} has what is tested")


def needs(*architectures: str) -> pytest.MarkDecorator:
    """Mark tests of architectures that the installed transformers may not have."""
    unmet = next(filter(None, map(registry.unmet_requirement, architectures)), None)
    return pytest.mark.skipif(unmet is not None, reason=f"needs {unmet}")


def case_of(architecture: str) -> FamilyCase:
    """Return the shared case of an architecture. Skips the test if its requirements are not installed."""
    if unmet := registry.unmet_requirement(architecture):
        return cast(FamilyCase, _Lacking(unmet))
    return FamilyCase(registry.model_class(architecture))


class _Lacking:
    def __init__(self, unmet: str) -> None:
        self._unmet = unmet

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"needs {self._unmet}")
