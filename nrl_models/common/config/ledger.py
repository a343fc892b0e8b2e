"""The ledger: for each key of a registered architecture's configuration, what a differential test found it to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.writing import write_whole

CONSUMED = {
    "shapes": "the parameters",
    "outputs": "what a forward returns",
    "training": "what a forward in training mode returns, the loss included, and nothing before",
    "weights": "how new weights are drawn, and nothing else",
    "refused": "whether there is a model: every other value that was tried is refused",
}
"""What a consumed key moves, the first that applies, here exactly as in transformers."""

INERT = "inert"
"""The kind of a key that moves nothing, neither here nor in transformers."""

DEFAULT_ONLY = "default only"
"""The kind of a key that is supported at its default only: another value asks for something that no code does, or that
the family does not do (`FamilyModel.config_values`). It is refused (`nrl_models.common.config.validate`)."""

UNTRIED = "untried"
"""The kind of a key that something reads, and that was not changed yet (`nrl-models dev ledger` goes on with those)."""

FILE = Path(__file__).parents[2] / "families" / "ledger.json"
"""The recorded ledgers; `nrl-models dev ledger` writes it."""


@dataclass(frozen=True)
class Ledger:
    """What is recorded of one architecture.

    Args:
        kinds: for each key of the tiny configuration, by its path (`text_config.hidden_size`), what it is: one of
            `CONSUMED`, `INERT`, `DEFAULT_ONLY` or `UNTRIED`.
        supported: for each key that is supported at its default only, that default.
        departures: for each key with which the model moves otherwise than transformers', how; empty unless something
            is wrong.
    """

    kinds: Mapping[str, str]
    supported: Mapping[str, Any] = field(default_factory=dict)
    departures: Mapping[str, str] = field(default_factory=dict)

    def count(self, kind: str) -> int:
        """How many keys are `consumed`, `inert`, `default only` or `untried`."""
        return sum(found == kind or (kind == "consumed" and found in CONSUMED) for found in self.kinds.values())

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file: keys by kind, with spaces between."""
        written: dict[str, Any] = {
            kind: " ".join(sorted(key for key, found in self.kinds.items() if found == kind))
            for kind in (*CONSUMED, INERT, UNTRIED)
            if kind in self.kinds.values()
        }
        if self.supported:
            written[DEFAULT_ONLY] = dict(sorted(self.supported.items()))
        if self.departures:
            written["departures"] = dict(sorted(self.departures.items()))
        return written

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Ledger:
        """The other way."""
        kinds = {key: kind for kind in (*CONSUMED, INERT, UNTRIED) for key in content.get(kind, "").split()}
        supported = content.get(DEFAULT_ONLY, {})
        return cls(kinds | dict.fromkeys(supported, DEFAULT_ONLY), supported, content.get("departures", {}))


@dataclass(frozen=True)
class Ledgers:
    """What is recorded of all architectures.

    Args:
        transformers: the version it was found with.
        of: the ledgers, by architecture.
    """

    transformers: str
    of: Mapping[str, Ledger]

    def write(self, file: Path = FILE) -> None:
        """Write the file, a line for each kind of key of an architecture."""
        ledgers = {name: self.of[name].to_json() for name in sorted(self.of)}
        write_whole(file, json.dumps({"transformers": self.transformers, "ledgers": ledgers}, indent=1) + "\n")


def read_ledgers(file: Path = FILE) -> Ledgers:
    """The recorded ledgers; none if there is no file."""
    if not file.is_file():
        return Ledgers("", {})
    content = json.loads(file.read_text())
    return Ledgers(
        content["transformers"], {name: Ledger.from_json(ledger) for name, ledger in content["ledgers"].items()}
    )


@cache
def recorded() -> Ledgers:
    """The ledgers this package came with."""
    return read_ledgers()
