"""The table derived from the ledger that loading uses. It is part of the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.config.recorded_keys import FILE
from tools.coverage_pages.results import as_json
from tools.ledger.ledger import KeyKind, Ledger


def loading_table(ledgers: Mapping[str, Ledger]) -> dict[str, Any]:
    """Return the table that `nrl_models.common.config.recorded_keys` reads."""
    supported = {name: dict(sorted(ledger.supported.items())) for name, ledger in ledgers.items() if ledger.supported}
    effects = _effects(ledgers)
    return {
        "outputs": dict(sorted(_outputs(effects).items())),
        "supported": dict(sorted(supported.items())),
        "training": sorted(key for key, kinds in effects.items() if kinds.keys() <= TRAINING),
    }


TRAINING = {KeyKind.TRAINING, KeyKind.WEIGHTS}
"""Effects on new weights, or in training mode only."""


def _effects(ledgers: Mapping[str, Ledger]) -> dict[str, dict[KeyKind, str]]:
    """Map each key to its effects, each with an architecture that has it."""
    found: dict[str, dict[KeyKind, str]] = {}
    for architecture, ledger in ledgers.items():
        for path, kind in ledger.kinds.items():
            found.setdefault(path.rpartition(".")[2], {}).setdefault(kind, architecture)
    return found


def _outputs(effects: Mapping[str, Mapping[KeyKind, str]]) -> dict[str, str]:
    """Map each key that only changes outputs to an architecture whose outputs it changes."""
    others = {KeyKind.SHAPES, *TRAINING}
    return {
        key: kinds[KeyKind.OUTPUTS]
        for key, kinds in effects.items()
        if KeyKind.OUTPUTS in kinds and not kinds.keys() & others
    }


def write_loading_table(ledgers: Mapping[str, Ledger], file: Path = FILE) -> None:
    """Write the table."""
    write_whole(file, as_json(loading_table(ledgers)) + "\n")
