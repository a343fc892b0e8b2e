"""Replace the checkpoint in a directory atomically: one rename, then moves of the files to their names.

A checkpoint's files have fixed names, share the directory with unrelated files, and the directory may be a mount point.
So the directory itself cannot be exchanged. The steps are those of a redo log:

1. Complete the staging directory: add links to files that stay, and a record of the files that are replaced.
2. Rename it to `PUBLISHED`. From here on, this library reads the new checkpoint. If the writer is killed, the next
   writer continues.
3. Move the files to their names, for other readers. The weights (the single file or the index) are removed first and
   moved last, the configuration just before them. A reader by names then finds the old checkpoint, no checkpoint, or
   the new one. The configuration is never removed, because transformers' model classes would use defaults without it.
4. Rename the directory again, and delete it.

Each step can be repeated. The caller holds the directory's lock.
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

from nrl_models.common.checkpoint.generations import PUBLISHED, RECORD, read_record, version_at, written_since
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from nrl_models.common.checkpoint.publication.durable import sync
from nrl_models.common.checkpoint.publication.locks import TEMPORARY
from nrl_models.errors import SaveError

_SHARD = "a shard"

_WEIGHTS = {
    _SHARD: re.compile(r"model(?:\.(?P<variant>.+))?-\d{5}-of-\d{5}\.safetensors"),
    WEIGHTS_NAME: re.compile(r"model(?:\.(?P<variant>.+))?\.safetensors"),
    INDEX_NAME: re.compile(r"model\.safetensors\.index(?:\.(?P<variant>.+))?\.json"),
}
"""Names of weight files, with transformers' `variant`: `model.fp16.safetensors`. The first match counts."""

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

_OURS = ".nrl-"
_MOVING = f"{_OURS}moving"


def publish(stage: Path, target: Path) -> None:
    """Replace the checkpoint in `target` with the files in `stage`, a directory inside it, which are synced to disk.

    Raises:
        SaveError: Before any change, if a directory has the name of a file, or `PUBLISHED` has files of another
            program. Also if files could not be moved to their names; the checkpoint is then in `PUBLISHED`.
        OSError: If the disk failed before any change.
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
        detail = f"{target / PUBLISHED} exists, but was not created by this library; move it away"
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

    If another program has written files since, its files stay, and the published ones are deleted.
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
    if any(_rank(name) > _rank(CONFIG_NAME) for name in files):
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
    """Return the order of a file: unrelated files (0), configurations with the model's last, then weights."""
    order = ("", CONFIG_NAME, WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, INDEX_NAME)
    name = _kind_and_variant(name)[0] or name
    return order.index(name) + 1 if name in order else int("/" not in name and name.endswith("config.json"))


def _kind_and_variant(name: str) -> tuple[str, str]:
    """Return the name of a weight file without its variant (`_SHARD` for shards), and the variant. Empty for others."""
    for kind, pattern in _WEIGHTS.items():
        if (match := pattern.fullmatch(name)) is not None:
            return kind, match["variant"] or ""
    return "", ""


def _make_whole(stage: Path, target: Path) -> dict[str, Any]:
    """Complete `stage` with links to the files of `target` that stay, and the record of replaced files.

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
    retained = {name for name in there if not name.startswith(_OURS)} - {*stale, *os.listdir(stage)}
    for name in sorted(retained):
        with suppress(OSError):  # without symbolic links, the other files are visible once all files are moved
            os.symlink(os.path.join("..", name), stage / name)
    record = {"replaces": replaces, "files": files}
    (stage / RECORD).write_text(json.dumps(record))
    return record


def _is_stale(name: str, files: list[str]) -> bool:
    """Return True if a file belongs to the replaced checkpoint, and would be read as part of the new one."""
    kind, variant = _kind_and_variant(name)
    if kind:
        return any((entry, variant) in map(_kind_and_variant, files) for entry in (WEIGHTS_NAME, INDEX_NAME))
    return name in TOKENIZER_NAMES and not TOKENIZER_NAMES.isdisjoint(files)


def _is_moved(source: Path, destination: Path) -> bool:
    try:
        return os.path.samefile(source, destination)
    except OSError:
        return False


def _move(published: Path, target: Path, name: str) -> None:
    """Move a published file to its name, by a hard link, or by a copy if the file system has no hard links."""
    source, destination, moving = published / name, target / name, published / _MOVING
    if _is_moved(source, destination):
        return
    if not destination.parent.is_dir():
        destination.parent.mkdir(parents=True)
    try:
        os.link(source, moving)
    except OSError:
        shutil.copy2(source, moving)
        sync(moving)
    os.replace(moving, destination)
