"""Remove secrets and personal data from the values of a capsule, which users attach to public reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from nrl_models.common.trust.servers import hidden, is_secret

LOCAL = ("_name_or_path", "name_or_path", "address", "adapter", "lora_path")
"""Keys of descriptions and configurations that hold paths and addresses."""

_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\",;)\]]+", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w./\\~:-])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\",:;()\[\]]+)+[/\\]?")
_LAST = re.compile(r"[^/\\]+(?=[/\\]?$)")

SHORTEST_SECRET = 6
"""Shorter values of environment variables are not searched for, because they occur in ordinary text."""


def redacted(value: Any) -> Any:
    """Return a JSON value without addresses, directories, user names, and secrets of the environment.

    Of a path, the last part stays. Keys that name a secret (`api_key`) or a local path are dropped.
    """
    return _redacted(value, [text for name, text in os.environ.items() if is_secret(name) and _is_long(text)])


def _is_long(text: str) -> bool:
    return len(text) >= SHORTEST_SECRET


def _redacted(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        text = _ADDRESS.sub("[address]", hidden(value, secrets))
        return _PATH.sub(_shortened, text)
    if isinstance(value, Mapping):
        return {
            key: _redacted(inner, secrets)
            for key, inner in value.items()
            if not (key in LOCAL or (is_secret(str(key)) and key != "key" and isinstance(inner, str)))
        }
    return [_redacted(inner, secrets) for inner in value] if isinstance(value, (list, tuple)) else value


def _shortened(path: re.Match[str]) -> str:
    """Return the last part of a path; of a home directory, nothing."""
    last = _LAST.search(path[0])
    parts = [part for part in re.split(r"[/\\]", path[0]) if part]
    is_home = len(parts) < 2 or parts[-2] in ("home", "Users", "users")
    return "[path]" if last is None or is_home else f"[path]/{last[0]}"
