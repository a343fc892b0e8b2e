"""The catalog of quirks as JSON, for `nrl-models quirks`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nrl_models.quirks.catalog import CATALOG
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject


def quirks_of(subject: Subject | None = None) -> list[Quirk]:
    """Return the quirks that affect a model, or all quirks without a model."""
    return [quirk for quirk in CATALOG if subject is None or quirk.applies(subject)]


def as_json(quirks: Iterable[Quirk], subject: Subject | None = None) -> dict[str, Any]:
    """Return `{"architecture", "quirks": [{"name", "where", "symptom", ...}]}`."""
    copied = ("name", "symptom", "where", "handling", "code", "expiry", "every_model", "sources")
    entries = [
        {key: getattr(quirk, key) for key in copied}
        | {"off": quirk.switch, "fixed": quirk.fixed or None, "fixed_here": quirk.is_fixed}
        | {"probe": quirk.probe or None, "needed_while": quirk.asks if not quirk.fixed else None}
        for quirk in quirks
    ]
    return {"architecture": None if subject is None else type(subject.model).__name__, "quirks": entries}
