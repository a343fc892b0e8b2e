"""Switches for the handling of known quirks, to check whether it is still needed.

The catalog (`nrl_models.quirks`) describes each quirk; this module has the names that code checks. A quirk whose
handling is selected by an argument (`dtype=`, `strict=`, `layout=`) has no switch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nrl_models.errors import UnknownArgumentError, did_you_mean

SWITCHES = frozenset(
    {
        "engine-batch-norms",
        "engine-dummy-buffers",
        "engine-experts-on-cpu",
        "engine-tied-head",
        "engine-tokenizer",
        "engine-v0-runtime",
        "image-masks-in-packed-rows",
        "masks-without-positions",
        "text-output-without-images",
        "mrope-packed-documents",
        "mrope-stale-offsets",
        "mtp-weights",
        "packed-documents",
        "shared-kv-reentrant-checkpointing",
        "shared-kv-unused-weights",
        "layers-across-documents",
        "strict-config-types",
        "token-types",
    }
)
"""The quirks that can be switched off by name."""

VARIABLE = "NRL_MODELS_QUIRKS_OFF"
"""Environment variable with a comma-separated list of quirks to switch off in a process."""


def _checked(names: frozenset[str], source: str) -> frozenset[str]:
    if unknown := sorted(names - SWITCHES):
        raise UnknownArgumentError(
            f"{source}: {', '.join(unknown)} cannot be switched off{did_you_mean(unknown[0], SWITCHES)}: expected some "
            f"of {', '.join(sorted(SWITCHES))}. `nrl-models quirks` shows how other quirks are."
        )
    return names


# A variable of this module, not of a context: it is read in any thread, and under torch.compile.
_off = _checked(frozenset(filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))), VARIABLE)


def is_off(name: str) -> bool:
    """Return True if the handling of quirk `name` (one of `SWITCHES`) is switched off."""
    return name in _off


@contextmanager
def quirks_off(*names: str) -> Iterator[None]:
    """Switch off the handling of quirks in all threads while the context is open.

    Raises:
        UnknownArgumentError: If a name is not in `SWITCHES`.
    """
    global _off
    before = _off
    _off = before | _checked(frozenset(names), "quirks_off")
    try:
        yield
    finally:
        _off = before
