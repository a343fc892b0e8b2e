"""What the registry knows about a family before it imports the family's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """The facts of one family: `FAMILY` in its folder's `__init__.py`.

    Args:
        architectures: the classes in its `model.py`, as `config.architectures` names them.
        aliases: other names of architectures in configurations, each with the name of its class. Checkpoints are saved
            under the class's own name.
        requires: additional requirements by architecture, `("timm>=1.0",)`.
        configs: configuration classes by `model_type`, for those that transformers lacks: `"module:Class"`,
            the module in the family's folder.
    """

    architectures: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
