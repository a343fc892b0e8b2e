"""Replacing the checkpoint in a directory by one rename, and then the files at their names.

A checkpoint's files have fixed names, beside files of others, in a directory that may be a mount point: it cannot be
exchanged as a whole. So this is a redo log:

1. What was written aside becomes a whole directory: it gets links to what stays, and a record of what it replaces.
2. It is renamed to `PUBLISHED`. From here on our readers take it, and whoever writes next goes on where this writer is
   killed.
3. Its files get their names, for other readers. The weights (the single file, or the index) are taken away first and
   come last, the configuration next to them: who reads by names finds the old checkpoint, none, or the new one. To take
   the configuration away would not do: transformers' model classes take their defaults for it.
4. It is renamed again, and removed.

Every step may be repeated. The caller holds the directory's lock.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.durable import sync
from nrl_models.common.checkpoint.generations import PUBLISHED, RECORD, read_record, version_at, written_since
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from nrl_models.common.checkpoint.locks import TEMPORARY
from nrl_models.errors import SaveError

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

TOKENIZER_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
"""Names that files of tokenizers have. A checkpoint with some of them replaces all of them."""

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

_ENTRIES = {WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, INDEX_NAME}
"""Where a reader begins to read weights."""

_OURS = ".nrl-"
_MOVING = f"{_OURS}moving"


def publish(stage: Path, target: Path) -> None:
    """Replace the checkpoint in `target` by the files in `stage`, a directory inside it; they are on the disk already.

    Raises:
        SaveError: a directory is where a file has to go, or something is in `PUBLISHED` that is not this library's, and
            nothing has changed; or files did not get their names, and the checkpoint is in `PUBLISHED`.
        OSError: the disk failed before anything changed.
    """
    complete(target)
    record = _make_whole(stage, target)
    sync(stage / RECORD)
    sync(stage)
    try:
        os.rename(stage, target / PUBLISHED)
    except OSError as error:
        if not (target / PUBLISHED).exists():
            raise
        detail = f"{target / PUBLISHED} is there, and no save of this library left it; move it away"
        raise SaveError(f"cannot save into {target}: {detail}") from error
    try:
        sync(target)
        _finish(target, record, stage)
    except BaseException as error:  # interrupted: once more, so that other readers need not wait for the next save
        if (target / PUBLISHED).exists():
            with suppress(OSError):
                _finish(target, record, stage)
        if not isinstance(error, OSError) or not (target / PUBLISHED).exists():
            raise
        detail = f"the checkpoint is saved, and this library reads it, but other readers do not see it yet: {error}"
        raise SaveError(f"{target}: {detail}. Make room, and save again") from error


def complete(target: Path) -> None:
    """Move files that a killed writer published in `target` to their names.

    Where another program has written files since, its files stay, and what was published is dropped.
    """
    if not (target / PUBLISHED).exists() or (record := read_record(target / PUBLISHED)) is None:
        return
    retired = target / f"{TEMPORARY}{secrets.token_hex(4)}"
    if written_since(target):
        _retire(target, retired)
    else:
        _finish(target, record, retired)


def _finish(target: Path, record: Mapping[str, Any], retired: Path) -> None:
    """Give the published files their names, and remove their directory, by way of the name `retired`."""
    published = target / PUBLISHED
    files = sorted(record["files"], key=_rank)
    stale = record["replaces"].keys() - set(files)
    (published / _MOVING).unlink(missing_ok=True)
    if not _ENTRIES.isdisjoint(files):
        for name in sorted({*files, *stale}, key=_rank, reverse=True):
            if _rank(name) and not _is_moved(published / name, target / name):
                (target / name).unlink(missing_ok=True)
        sync(target)
    for name in sorted(stale):
        (target / name).unlink(missing_ok=True)
    for name in files:
        _move(published, target, name)
    sync(target)
    _retire(target, retired)


def _retire(target: Path, retired: Path) -> None:
    os.rename(target / PUBLISHED, retired)
    shutil.rmtree(retired, ignore_errors=True)


def _rank(name: str) -> int:
    """When a file comes: after what can do no harm (0) configurations, the model's last, and then the weights."""
    order = ("", CONFIG_NAME, WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, INDEX_NAME)
    return order.index(name) + 1 if name in order else int("/" not in name and name.endswith("config.json"))


def _make_whole(stage: Path, target: Path) -> dict[str, Any]:
    """Add to the files in `stage` what a reader finds beside them in `target`, and the record of what they replace.

    Returns:
        The record.
    """
    files = sorted(
        os.path.relpath(os.path.join(folder, name), stage) for folder, _, names in os.walk(stage) for name in names
    )
    if blocked := [name for name in files if (target / name).is_dir()]:
        raise SaveError(f"cannot save into {target}: {', '.join(blocked)} is a directory there, expected a file")
    there = os.listdir(target)
    stale = [name for name in there if name not in files and _is_stale(name, files)]
    replaces = {name: version for name in [*files, *stale] if (version := version_at(target / name)) is not None}
    kept = {name for name in there if not name.startswith(_OURS)} - {*stale, *os.listdir(stage)}
    for name in sorted(kept):
        with suppress(OSError):  # a file system without symbolic links: what is beside is seen when all has moved
            os.symlink(os.path.join("..", name), stage / name)
    record = {"replaces": replaces, "files": files}
    (stage / RECORD).write_text(json.dumps(record))
    return record


def _is_stale(name: str, files: list[str]) -> bool:
    """Whether a file belongs to the checkpoint that `files` replace, and would be read as part of theirs."""
    if _SHARD.fullmatch(name) or name in (WEIGHTS_NAME, INDEX_NAME):
        return WEIGHTS_NAME in files or INDEX_NAME in files
    return name in TOKENIZER_NAMES and not TOKENIZER_NAMES.isdisjoint(files)


def _is_moved(source: Path, place: Path) -> bool:
    try:
        return os.path.samefile(source, place)
    except OSError:
        return False


def _move(published: Path, target: Path, name: str) -> None:
    """Give a published file its name, by a second link to it, or a copy where the file system has no such links."""
    source, place, moving = published / name, target / name, published / _MOVING
    if _is_moved(source, place):
        return
    if not place.parent.is_dir():
        place.parent.mkdir(parents=True)
    try:
        os.link(source, moving)
    except OSError:
        shutil.copy2(source, moving)
        sync(moving)
    os.replace(moving, place)
