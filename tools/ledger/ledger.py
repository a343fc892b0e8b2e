"""The ledger: the effect of each configuration key of a registered architecture, measured by a differential test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recorded")
"""The recorded ledgers, one file per family: `{architecture: ledger}`. `python -m tools.ledger` writes them."""


class KeyKind(StrEnum):
    """The effect of a configuration key: the first kind that applies, in nrl_models exactly as in transformers.

    Keys of the kinds from `SHAPES` to `REFUSED` are consumed.
    """

    SHAPES = "shapes"
    """Changes the parameters."""
    OUTPUTS = "outputs"
    """Changes the output of a forward."""
    TRAINING = "training"
    """Changes the output of a forward in training mode, the loss included."""
    WEIGHTS = "weights"
    """Changes how new weights are initialized."""
    REFUSED = "refused"
    """Every other value that was tried raises an error."""
    INERT = "inert"
    """Has no effect."""
    DEFAULT_ONLY = "default only"
    """Only the default is supported, because no code or not this family implements another value
    (`FamilyModel.config_values`). Other values raise an error (`nrl_models.common.config.validate`).
    """
    UNTRIED = "untried"
    """Is read, but no other value has been tried."""

    @property
    def is_consumed(self) -> bool:
        """Whether the key has an effect."""
        return self not in (KeyKind.INERT, KeyKind.DEFAULT_ONLY, KeyKind.UNTRIED)


@dataclass(frozen=True)
class Ledger:
    """The record of one architecture.

    Args:
        kinds: The kind of each key of the tiny configuration, by path (`text_config.hidden_size`).
        supported: The default of each key that is supported only at its default.
        departures: For each key whose effect differs from transformers, the difference. Empty unless there is a bug.
        transformers: The transformers version of the test.
    """

    kinds: Mapping[str, KeyKind]
    supported: Mapping[str, Any] = field(default_factory=dict)
    departures: Mapping[str, str] = field(default_factory=dict)
    transformers: str = field(kw_only=True)

    def count(self, kind: KeyKind) -> int:
        """Return the number of keys of a kind."""
        return sum(found == kind for found in self.kinds.values())

    @property
    def consumed(self) -> int:
        """Return the number of keys with an effect."""
        return sum(kind.is_consumed for kind in self.kinds.values())

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Ledger:
        """Read a recorded ledger: paths by kind, separated by spaces, and the defaults of `DEFAULT_ONLY` keys."""
        supported = content.get(KeyKind.DEFAULT_ONLY, {})
        kinds = {key: kind for kind in KeyKind if kind in content for key in _paths(content[kind])}
        return cls(kinds, supported, content.get("departures", {}), transformers=content["transformers"])


def _paths(listed: str | Mapping[str, Any]) -> list[str]:
    return listed.split() if isinstance(listed, str) else list(listed)


@cache
def recorded() -> Mapping[str, Ledger]:
    """Return the ledgers of the repository, by architecture."""
    return read_ledgers(FOLDER)


def read_ledgers(folder: Path) -> dict[str, Ledger]:
    """Read the ledgers in a folder, by architecture. Empty if the folder does not exist."""
    contents = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    return {name: Ledger.from_json(ledger) for content in contents for name, ledger in content.items()}
