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
    return {"outputs": dict(sorted(_outputs(ledgers).items())), "supported": dict(sorted(supported.items()))}


def _outputs(ledgers: Mapping[str, Ledger]) -> dict[str, str]:
    """Map each key that only changes outputs to an architecture whose outputs it changes."""
    found: dict[str, dict[KeyKind, str]] = {}
    for architecture, ledger in ledgers.items():
        for path, kind in ledger.kinds.items():
            found.setdefault(path.rpartition(".")[2], {}).setdefault(kind, architecture)
    others = {KeyKind.SHAPES, KeyKind.TRAINING, KeyKind.WEIGHTS}
    return {
        key: kinds[KeyKind.OUTPUTS]
        for key, kinds in found.items()
        if KeyKind.OUTPUTS in kinds and not kinds.keys() & others
    }


def write_loading_table(ledgers: Mapping[str, Ledger], file: Path = FILE) -> None:
    """Write the table."""
    write_whole(file, as_json(loading_table(ledgers)) + "\n")
