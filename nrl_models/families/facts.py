"""Facts about a family that the registry reads before it imports the family's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Facts about one family: `FAMILY` in its folder's `__init__.py`.

    Args:
        architectures: Classes in its `model.py`, by their names in `config.architectures`.
        aliases: Other names of architectures in configurations, with the names of their classes. Checkpoints are saved
            under the class's name.
        requires: Additional requirements by architecture, such as `("timm>=1.0",)`.
        configs: Configuration classes by `model_type` that transformers lacks: `"module:Class"`, with the module in the
            family's folder.
    """

    architectures: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
