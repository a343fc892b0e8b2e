"""Writing a checkpoint atomically.

transformers writes the files, into a directory beside or inside the target; then they are moved into
place in an order that keeps the target loadable: the old weights are either all there or all
replaced. Killing the process at any point leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nrl_models.common.checkpoint.files import INDEX_NAME, WEIGHTS_NAME
from nrl_models.common.garbage import no_collections

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_DETOUR = re.compile(r".*\.saving-\w+-" + _SHARD.pattern)
"""Names that shards have while the shards they replace are still there; an interrupted save leaves them."""


@contextmanager
def staged(target: str | Path) -> Iterator[Path]:
    """A directory to write a checkpoint into; on success its files replace those of `target`.

    If the body raises, or the process dies in it, `target` is untouched. If the body writes nothing
    (in a process that is not the writer), nothing is changed. Garbage collection is off meanwhile: safetensors makes
    several objects for each tensor.
    """
    target = Path(target)
    if target.is_file():
        raise NotADirectoryError(f"cannot save into {target}: it is a file, expected a directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside an existing target, so that moving never crosses file systems.
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.saving-", dir=target if target.is_dir() else target.parent))
    try:
        with no_collections():
            yield stage
        if target.is_dir():
            _publish(stage, target)
        elif any(stage.iterdir()):
            stage.chmod(0o777 & ~_umask())  # mkdtemp makes private directories
            os.rename(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _publish(stage: Path, target: Path) -> None:
    """Move a staged checkpoint over the one in `target`, which stays loadable throughout.

    A loader takes `model.safetensors` if it is there, else what the index names. So single files swap
    in one step, and shards whose names are taken first come in under names of their own, with an index
    that points to them, before they take the names of the old ones.
    """
    new_files = {path.relative_to(stage) for path in stage.rglob("*") if path.is_file()}
    shards = {path.name for path in new_files if _SHARD.fullmatch(path.name)}
    weights = {path for path in new_files if path.name in shards or path.name in (WEIGHTS_NAME, INDEX_NAME)}
    for path in sorted(new_files - weights):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / path, target / path)
    if Path(WEIGHTS_NAME) in weights:
        os.replace(stage / WEIGHTS_NAME, target / WEIGHTS_NAME)
        (target / INDEX_NAME).unlink(missing_ok=True)
    elif Path(INDEX_NAME) in weights:
        _publish_shards(stage, target, shards)
        (target / WEIGHTS_NAME).unlink(missing_ok=True)
    else:
        return  # no weights of these names were saved, so those in `target` are still the ones that load
    for path in target.iterdir():
        if path.name not in shards and (_SHARD.fullmatch(path.name) or _DETOUR.fullmatch(path.name)):
            path.unlink(missing_ok=True)


def _publish_shards(stage: Path, target: Path, shards: set[str]) -> None:
    index = stage / INDEX_NAME
    taken = {name for name in shards if (target / name).exists()}
    for name in shards - taken:
        os.replace(stage / name, target / name)
    if not taken:
        os.replace(index, target / INDEX_NAME)
        return
    own_name = {name: f"{stage.name.lstrip('.')}-{name}" for name in taken}
    content = json.loads(index.read_text())
    detour = content | {"weight_map": {key: own_name.get(file, file) for key, file in content["weight_map"].items()}}
    detour_index = stage / f"detour-{INDEX_NAME}"
    detour_index.write_text(json.dumps(detour))
    for name, own in own_name.items():
        os.replace(stage / name, target / own)
    os.replace(detour_index, target / INDEX_NAME)  # from here on the new checkpoint is the one that loads
    for name, own in own_name.items():
        _link(target / own, stage / name)
        os.replace(stage / name, target / name)
    os.replace(index, target / INDEX_NAME)


def _link(path: Path, other: Path) -> None:
    """A second name for a file, or a copy of it where the file system has no such names."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file atomically: beside it first, then renamed, so that it is never incomplete."""
    beside = file.with_name(f".{file.name}.part")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(file)
