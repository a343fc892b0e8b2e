"""Check YAML before it is parsed, and flatten parsed YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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


def leave_out_null(tree: Any, parts: list[str]) -> None:
    """Remove a key that was overridden by null."""
    for part in parts[:-1]:
        tree = tree.get(part) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and parts[-1] in tree and tree[parts[-1]] is None:
        del tree[parts[-1]]
