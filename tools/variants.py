"""Names of tiny models: `Gemma4ForCausalLM`, and `Gemma4ForCausalLM#E2B` for a variant that its class declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nrl_models import registry
from nrl_models.errors import UnknownArchitectureError
from nrl_models.testing.case import FamilyCase

SEPARATOR = "#"


def with_variants(architectures: Iterable[str]) -> list[str]:
    """Return architectures, each followed by the names of its variants.

    Architectures that need other package versions have no variants here, because their classes cannot be imported.
    """
    return [name for architecture in architectures for name in (architecture, *_names_of(architecture))]


def split_variant(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the architecture of a name, and the configuration values of its variant; none without a variant.

    Raises:
        UnknownArchitectureError: The class declares no such variant.
    """
    architecture, separator, variant = name.partition(SEPARATOR)
    if not separator:
        return architecture, {}
    variants = _variants_of(architecture)
    if variant not in variants:
        known = ", ".join(variants) or "none"
        raise UnknownArchitectureError(f"{architecture} declares no variant {variant!r}; it declares {known}")
    return architecture, variants[variant]


def case_of(name: str, device: torch.device | None = None, tiny: Mapping[str, Any] | None = None) -> FamilyCase:
    """Return the case of a registered architecture or of its variant.

    Args:
        name: The architecture, or one of its variants.
        device: See `FamilyCase`.
        tiny: Further values for the tiny configuration.
    """
    architecture, values = split_variant(name)
    model_class: Any = registry.model_class(architecture)
    options = {} if device is None else {"device": device}
    return FamilyCase(model_class, tiny={**values, **(tiny or {})}, **options)


def _names_of(architecture: str) -> list[str]:
    if registry.unmet_requirement(architecture):
        return []
    return [f"{architecture}{SEPARATOR}{variant}" for variant in _variants_of(architecture)]


def _variants_of(architecture: str) -> Mapping[str, Mapping[str, Any]]:
    model_class: Any = registry.model_class(architecture)
    variants: Mapping[str, Mapping[str, Any]] = getattr(model_class, "variants", {})  # not all extend FamilyModel
    return variants
