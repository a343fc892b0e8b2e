"""The ledger: for each key of a registered architecture's configuration, what a differential test found it to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recorded")
"""The recorded ledgers, a file for each family: `{architecture: ledger}`. `python -m tools.ledger` writes them."""


class KeyKind(StrEnum):
    """What a key of a configuration does: the first of these that applies, here exactly as in transformers.

    From `SHAPES` to `REFUSED` it is consumed.
    """

    SHAPES = "shapes"
    """It changes the parameters."""
    OUTPUTS = "outputs"
    """It changes what a forward returns."""
    TRAINING = "training"
    """It changes what a forward in training mode returns, the loss included."""
    WEIGHTS = "weights"
    """It changes how new weights are drawn."""
    REFUSED = "refused"
    """Every other value that was tried is refused."""
    INERT = "inert"
    """It changes nothing."""
    DEFAULT_ONLY = "default only"
    """Another value than the default asks for something that no code does, or that the family does not do
    (`FamilyModel.config_values`). It is refused (`nrl_models.common.config.validate`)."""
    UNTRIED = "untried"
    """Something reads it, and no other value was tried yet."""

    @property
    def is_consumed(self) -> bool:
        """Whether the key has an effect."""
        return self not in (KeyKind.INERT, KeyKind.DEFAULT_ONLY, KeyKind.UNTRIED)


@dataclass(frozen=True)
class Ledger:
    """What is recorded of one architecture.

    Args:
        kinds: for each key of the tiny configuration, by its path (`text_config.hidden_size`), what it does.
        supported: for each key that is supported at its default only, that default.
        departures: for each key with which the model changes differently from transformers', how; empty unless
            something is wrong.
        transformers: the version it was found with.
    """

    kinds: Mapping[str, KeyKind]
    supported: Mapping[str, Any] = field(default_factory=dict)
    departures: Mapping[str, str] = field(default_factory=dict)
    transformers: str = field(kw_only=True)

    def count(self, kind: KeyKind) -> int:
        """How many keys are of a kind."""
        return sum(found == kind for found in self.kinds.values())

    @property
    def consumed(self) -> int:
        """How many keys have an effect."""
        return sum(kind.is_consumed for kind in self.kinds.values())

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Ledger:
        """As it is recorded: the paths by kind, with spaces between; with their defaults where only these do."""
        supported = content.get(KeyKind.DEFAULT_ONLY, {})
        kinds = {key: kind for kind in KeyKind if kind in content for key in _paths(content[kind])}
        return cls(kinds, supported, content.get("departures", {}), transformers=content["transformers"])


def _paths(listed: str | Mapping[str, Any]) -> list[str]:
    return listed.split() if isinstance(listed, str) else list(listed)


@cache
def recorded() -> Mapping[str, Ledger]:
    """The ledgers of the repository, by architecture."""
    return read_ledgers(FOLDER)


def read_ledgers(folder: Path) -> dict[str, Ledger]:
    """The ledgers in the files of a folder, by architecture; none if it is not there."""
    contents = (json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    return {name: Ledger.from_json(ledger) for content in contents for name, ledger in content.items()}
