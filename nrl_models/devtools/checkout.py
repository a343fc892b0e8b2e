"""Where the repository keeps the coverage pages; without torch, so that it is said at once where there is none."""

from __future__ import annotations

from pathlib import Path

from nrl_models.errors import NRLModelsError

ROOT = Path(__file__).parents[2]
"""The repository, where this package is used from a checkout."""

PAGES = ROOT / "docs" / "model-coverage"
"""The coverage pages; the recorded outcomes are in a folder beside them."""


class CoverageError(NRLModelsError):
    """What was recorded is not here, does not cover what is asked for, or could not be made."""


def pages_folder() -> Path:
    """The folder of the coverage pages.

    Raises:
        CoverageError: this package is not used from a checkout.
    """
    if not PAGES.is_dir():
        raise CoverageError(f"needs a checkout of the repository: docs/model-coverage is not in {ROOT}")
    return PAGES
