"""What the registry has to know of a family before it imports the family's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """The facts of one family, said as `FAMILY` in its folder's `__init__.py`.

    Args:
        architectures: the classes that its `model.py` has, as `config.architectures` names them.
        aliases: other names that configurations have for an architecture, each with the name of its class. What is
            saved has the class's own.
        requires: for each architecture that needs more than this package does the requirement, `"timm>=1.0"`.
        configs: for each `model_type` that transformers lacks its configuration class, `"configuration:ClassConfig"`,
            the module in the family's folder.
    """

    architectures: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, str] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
