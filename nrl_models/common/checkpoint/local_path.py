"""Where a checkpoint is and what its configuration is called. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"

_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def is_local(path_or_id: str | Path) -> bool:
    """Whether a name stands for a local directory rather than for a hub repository.

    It does if it is a directory, starts with `.`, `/` or `~`, has no form that a repository's name can have
    (`name` or `owner/name`), or is a path below a directory that exists.
    """
    text = str(path_or_id)
    path = Path(text).expanduser()
    return (
        text.startswith((".", "/", "~"))
        or _REPOSITORY.fullmatch(text) is None
        or path.is_dir()
        or ("/" in text and path.parent.is_dir())
    )
