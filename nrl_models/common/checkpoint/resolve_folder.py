"""Find the directory of a checkpoint, or download it."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import list_repo_files, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from nrl_models.common.checkpoint.generations import (
    PUBLISHED,
    READ,
    FileWatch,
)
from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    around,
    as_path,
    checkpoints_below,
    find_gguf,
    is_gguf,
    is_local,
    not_permitted,
    resume_checkpoint_in,
    similar_checkpoint,
    similar_in_current_directory,
)
from nrl_models.common.checkpoint.named_weights import named_weights, note_repository, problem_of
from nrl_models.errors import CheckpointError, Problem, ProblemKind, did_you_mean, listed, one_line

DOWNLOADED = (*(f"*{suffix}" for suffix in READ if suffix not in (".gguf", ".safetensors")), "model*.safetensors")
"""Files of a hub repository that this library or transformers reads, apart from weights that only an index names."""


def folder_without_weights(path_or_id: str | Path, *, subfolder: str = "", revision: str | None = None) -> Path:
    """Return the local directory of a checkpoint. Downloads all files of a hub repository but its weights.

    Raises:
        CheckpointError: If the repository cannot be fetched. For a local path see `resolve_folder`.
    """
    if is_local(path_or_id):
        return resolve_folder(path_or_id, subfolder=subfolder)
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    patterns = [prefix + name for name in DOWNLOADED if not name.endswith(".safetensors")]
    return _downloaded(path_or_id, {"revision": revision, "allow_patterns": patterns}) / subfolder


def _downloaded(path_or_id: str | Path, options: Mapping[str, Any]) -> Path:
    try:
        return Path(snapshot_download(str(path_or_id), **options))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        similar = similar_in_current_directory(str(path_or_id))
        detail = f"is not a directory{similar}, and cannot be fetched as a hub repository: {one_line(error)}"
        problem = Problem(ProblemKind.FILE, str(path_or_id), detail)
        advice = ["check the path; for a hub repository check its name, your token and the network"]
        raise CheckpointError(f"cannot load {path_or_id}", [problem], advice) from error


def folder_on_disk(path_or_id: str | Path) -> Path | None:
    """Return the path of a checkpoint, or the directory of a Hub repository in the cache; None if there is none."""
    if not path_or_id:
        return None
    if is_local(path_or_id):
        path = as_path(path_or_id)
        return path if path.exists() else None
    try:
        return resolve_folder(path_or_id, local_files_only=True)
    except CheckpointError:
        return None


def resolve_folder(
    path_or_id: str | Path,
    *,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    gguf_file: str | None = None,
    local_files_only: bool = False,
    all_but: Sequence[str] = (),
    needs_config: bool = True,
) -> Path:
    """Return the local directory of a checkpoint: `path_or_id` itself, or the downloaded hub repository.

    Downloads configuration, tokenizer, chat templates, code, `model*.safetensors` and the shards of an index, or only
    the GGUF file. With `all_but`, also all other files that match none of these patterns. If the checkpoint is a GGUF
    file, returns that file: `path_or_id` itself, `gguf_file`, or the only one in a directory without safetensors.

    Raises:
        CheckpointError: If the directory does not exist, has no `config.json` (unless `needs_config` is False), or has
            a PEFT adapter. Also if the GGUF file does not exist, or there are several.
    """
    folder = as_path(path_or_id)
    if is_gguf(folder) and folder.is_file():
        return folder
    if not folder.is_dir():
        if is_local(path_or_id):
            missing = f"no such directory{similar_checkpoint(folder)}"
            detail = f"is a file, expected a directory{around(folder)}" if folder.is_file() else missing
            problem = Problem(ProblemKind.FILE, str(path_or_id), detail)
            advice = ["check the path, or pass the name of a hub repository (owner/name)"]
            raise CheckpointError(f"cannot load {path_or_id}", [problem], advice)
        prefix = f"{subfolder.strip('/')}/" if subfolder else ""
        names = DOWNLOADED if gguf_file is None else (gguf_file,)
        patterns = [prefix + name for name in names]
        options: Any = {"revision": revision, "token": token, "cache_dir": cache_dir, "allow_patterns": patterns}
        options |= {"ignore_patterns": [f"*{PUBLISHED}/*"], "local_files_only": local_files_only}
        folder = _downloaded(path_or_id, options)
        if shards := _other_shards(folder / subfolder):
            _downloaded(path_or_id, options | {"allow_patterns": [prefix + glob.escape(name) for name in shards]})
        if not local_files_only:

            def listed() -> list[str]:
                names = list_repo_files(str(path_or_id), revision=revision, token=token)
                return [name.removeprefix(prefix) for name in names if "/" not in name.removeprefix(prefix)]

            note_repository(folder / subfolder, "" if prefix or revision else str(path_or_id), listed)
        if all_but:
            ignored = [*options["ignore_patterns"], *all_but]
            _downloaded(path_or_id, options | {"allow_patterns": [prefix + "*"], "ignore_patterns": ignored})
    while True:
        with FileWatch(folder / subfolder) as watch:
            try:
                return _usable(watch.location, gguf_file, needs_config)
            except PermissionError as error:
                raise not_permitted(folder, error) from error
            except CheckpointError as error:
                if watch.changed():
                    continue
                if subfolder and not (folder / subfolder).is_dir():
                    raise _no_subfolder(folder, subfolder) from error
                raise


def _no_subfolder(folder: Path, subfolder: str) -> CheckpointError:
    """Return the error for a subfolder that does not exist. Lists those that have a checkpoint."""
    is_file = (folder / subfolder).is_file()
    existing = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_NAME}"))
    detail = "is a file, expected a directory" if is_file else f"no such directory{did_you_mean(subfolder, existing)}"
    detail += f"; directories with a {CONFIG_NAME}: {listed(existing) or 'none'}"
    advice = "pass one of these directories as subfolder" if existing else "leave out subfolder"
    return CheckpointError(f"cannot load {folder}", [Problem(ProblemKind.FILE, subfolder, detail)], [advice])


def _other_shards(folder: Path) -> list[str]:
    """Return the safetensors files that an index in a downloaded folder names and that are not called `model*`."""
    names = {named} if (named := named_weights(folder)) is not None and problem_of(named) is None else set()
    for index in sorted(folder.glob("*.safetensors.index*.json")):
        try:
            names |= set(map(str, read_object(index)["weight_map"].values()))
        except (CheckpointError, KeyError, AttributeError):  # reported with all other problems when the index is read
            continue
    return sorted(name for name in names if name.endswith(".safetensors") and not (folder / name).is_file())


def _usable(folder: Path, gguf_file: str | None, needs_config: bool) -> Path:
    """Return a directory, or the GGUF file in it, if it has a checkpoint."""
    may_be_gguf = gguf_file is not None or (any(map(is_gguf, folder.glob("*"))) and not _has_safetensors(folder))
    if may_be_gguf and (file := find_gguf(folder, gguf_file)) is not None:
        return file
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        _refuse_adapter(folder)
    if needs_config and not (folder / CONFIG_NAME).is_file():
        if resume := resume_checkpoint_in(folder):
            raise CheckpointError(
                f"cannot load {folder}", [Problem(ProblemKind.FORMAT, str(folder), resume[0])], [resume[1]]
            )
        detail = f"is missing{checkpoints_below(folder)}"
        advice = "pass the directory with config.json and the weights (see `subfolder`)"
        if (folder / CONFIG_NAME).is_symlink():
            detail = f"is a link to {os.readlink(folder / CONFIG_NAME)}, which is not a file"
            advice = "copy the files that links lead to (`cp -rL`), or download the checkpoint again"
        problem = Problem(ProblemKind.FILE, CONFIG_NAME, detail)
        raise CheckpointError(f"cannot load {folder}", [problem], [advice])
    return folder


def _has_safetensors(folder: Path) -> bool:
    has_file = (folder / WEIGHTS_NAME).is_file() or (folder / INDEX_NAME).is_file()
    return has_file or named_weights(folder) is not None


def _refuse_adapter(folder: Path) -> NoReturn:
    """Raise for a directory with a PEFT adapter. Unlike in transformers, model and adapter are loaded separately."""
    then = "then the adapter with peft.PeftModel.from_pretrained(model, folder)"
    if (folder / CONFIG_NAME).is_file():
        detail = "belongs to a PEFT adapter in the same directory as the model's files, and would be ignored"
        advice = f"move the adapter's files to a separate directory; load the model, {then}"
    else:
        detail = "belongs to a PEFT adapter; the directory has no model"
        advice = f"load the model it names as base_model_name_or_path, {then}"
    raise CheckpointError(f"cannot load {folder}", [Problem(ProblemKind.FORMAT, ADAPTER_CONFIG_NAME, detail)], [advice])
