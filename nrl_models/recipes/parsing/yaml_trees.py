"""Check YAML before it is parsed, and flatten parsed YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from nrl_models.common.config.spelling import ALIKE

MOST_LEVELS = 32
"""Levels of the most nested recipe that is read."""


def why_unreadable(tokens: Iterable[Any]) -> str | None:
    """Check YAML tokens before parsing, which would not end for deeply nested files. Returns the problem, if any."""
    level = 0
    for token in tokens:
        kind = type(token).__name__
        level += kind in ("BlockMappingStartToken", "BlockSequenceStartToken", "FlowMappingStartToken")
        level += (kind == "FlowSequenceStartToken") - (kind in ("BlockEndToken", "FlowMappingEndToken"))
        level -= kind == "FlowSequenceEndToken"
        if kind in ("AliasToken", "AnchorToken"):
            return "has an anchor or alias (& or *): write it out"
        if level > MOST_LEVELS:
            return f"is nested deeper than {MOST_LEVELS} levels"
    return None


def leaves_by_key(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a tree that are not mappings, by dotted key."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {
        key: value
        for name, inner in tree.items()
        for key, value in leaves_by_key(inner, f"{path}.{name}" if path else str(name)).items()
    }


def nearest_keys(name: Any, known: Iterable[str], elsewhere: Iterable[str]) -> list[str]:
    """Return the keys that an unknown key most likely means.

    Args:
        name: The unknown key, without the keys above it.
        known: Keys that are valid in its place.
        elsewhere: Dotted keys of other places. Their last part is compared.
    """
    known = list(known)
    others: dict[str, list[str]] = {}
    for key in elsewhere:
        others.setdefault(key.rpartition(".")[2], []).append(key)
    if name in others:
        return others[name]
    if matches := get_close_matches(str(name), known, n=2):
        return matches
    return [key for match in get_close_matches(str(name), others, cutoff=ALIKE) for key in others[match]]


def leave_out_null(tree: Any, parts: list[str]) -> None:
    """Remove a key that was overridden by null."""
    for part in parts[:-1]:
        tree = tree.get(part) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and parts[-1] in tree and tree[parts[-1]] is None:
        del tree[parts[-1]]
