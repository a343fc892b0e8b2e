"""Variants of architectures, which older checkouts of nrl_models do not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

try:
    from nrl_models.testing.variants import split_variant, with_variants
except ImportError:

    def with_variants(architectures: Iterable[str]) -> list[str]:
        """Return the architectures."""
        return list(architectures)

    def split_variant(name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the name, and no configuration values."""
        return name, {}


__all__ = ["split_variant", "with_variants"]
