"""Results of the differential test of configuration keys that loading needs.

`python -m tools.ledger` records the effect of every key of every architecture, and writes this table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "families" / "config_keys.json"
"""`{"outputs": {key: architecture}, "supported": {architecture: {path: default}}, "training": [key]}`."""


@cache
def _table() -> Mapping[str, Any]:
    return json.loads(FILE.read_text())


def architecture_that_computes_with(key: str) -> str | None:
    """Return an architecture whose outputs a key changes.

    None if the key changes no outputs, or if it also changes shapes of parameters (a wrong value then fails to load),
    training (dropout) or the initialization of weights in some architecture.
    """
    return _table()["outputs"].get(key)


def supported_at_default_only(architecture: str) -> Mapping[str, Any]:
    """Return the keys, by path, that an architecture supports only at their default, with the default."""
    return _table()["supported"].get(architecture, {})


@cache
def keys_of_training() -> frozenset[str]:
    """Return the keys that change only training (dropout) or the initialization of weights, in all architectures."""
    return frozenset(_table()["training"])
