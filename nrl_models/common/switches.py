"""Switching off the handling of a known quirk, to see whether it is still needed.

The catalogue (`nrl_models.quirks`) describes each quirk; here are the names that code checks. A quirk whose
handling an argument chooses (`dtype=`, `strict=`, `layout=`) has no switch, and is not here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from nrl_models.errors import UnknownArgumentError, did_you_mean

SWITCHES = frozenset(
    {
        "engine-dummy-buffers",
        "engine-experts-on-cpu",
        "engine-tied-head",
        "engine-tokenizer",
        "engine-v0-runtime",
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
"""The environment variable with names of quirks to switch off for a whole process, separated by commas."""


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
    """Whether the quirk `name` (one of `SWITCHES`) is not to be handled."""
    return name in _off


@contextmanager
def quirks_off(*names: str) -> Iterator[None]:
    """While open, leave these quirks as they are upstream, in every thread.

    Raises:
        UnknownArgumentError: a name that is none of `SWITCHES`.
    """
    global _off
    before = _off
    _off = before | _checked(frozenset(names), "quirks_off")
    try:
        yield
    finally:
        _off = before
