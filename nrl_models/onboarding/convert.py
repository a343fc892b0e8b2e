"""Rewriting a checkpoint in another dtype or with other shards."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import CheckpointFiles, resolve_folder
from nrl_models.common.checkpoint.gguf_tables import load_tokenizer
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME, is_gguf
from nrl_models.common.checkpoint.writing import staged
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArgumentError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
"""Files of these kinds do not come along: they would hold the old weights, or others."""

LEFT_BEHIND = (*WEIGHTS, "*.index.json", ".git", ".cache", ".nrl-*", ".*.nrl-saving-*")
"""What else has no place beside new weights: lists of files that are not there, a repository's own records, and what
saves leave that are running or were killed."""


def convert(source: str | Path, target: str | Path, *, dtype: str = "auto", max_shard_size: str = "5GB") -> str:
    """Write the checkpoint in `source` to `target`, in another dtype or other shards.

    Everything else in the directory (tokenizer, templates, licence) is copied, over what `target` has of it. Of a GGUF
    file (`source` itself, or the one in that directory) the tokenizer that it holds is written beside the weights.

    Returns:
        What was written, as text.

    Raises:
        CheckpointError: `source` does not load, or `target` is `source`.
        UnknownArgumentError: no such dtype, or no size.
    """
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise UnknownArgumentError(
            f"max_shard_size={max_shard_size!r}: expected a size such as '5GB'. {error}"
        ) from error
    folder, target = resolve_folder(source), Path(target)
    if folder.resolve() == target.resolve():
        detail = "is the checkpoint itself"
        raise CheckpointError(
            "cannot convert in place", [Problem(ProblemKind.FILE, str(target), detail)], ["give another directory"]
        )
    # Nothing is computed, so nothing has to be side by side in memory: tensors go from file to file.
    model = auto_class_for(folder).from_pretrained(folder, dtype=dtype, combine=False)
    with staged(target) as stage:
        model.save_pretrained(stage, max_shard_size=max_shard_size)
        if is_gguf(folder):
            _save_tokenizer(folder, stage)
        else:
            saved = {CONFIG_NAME} | ({GENERATION_NAME} if model.can_generate() else set())
            _copy_others(folder, stage, saved)
    written = CheckpointFiles(target)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in written.tensors.values()})
    return f"{len(written.tensors):,} tensors, {written.nbytes / 1e9:.3f} GB, {' and '.join(kinds)}"


def _save_tokenizer(file: Path, target: Path) -> None:
    """Write the tokenizer that a GGUF file holds, if it holds one, with its chat template."""
    tokenizer = load_tokenizer(file)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)


def _copy_others(folder: Path, target: Path, saved: set[str]) -> None:
    """Copy what belongs to a checkpoint beside its weights, but for the files that were `saved` with them."""
    ignore = shutil.ignore_patterns(*LEFT_BEHIND)
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names - saved - ignore(str(folder), list(names))):
        path = folder / name
        if path.is_file():
            shutil.copy2(path, target / name)
        elif path.is_dir() and not target.resolve().is_relative_to(path.resolve()):
            shutil.copytree(path, target / name, ignore=ignore, dirs_exist_ok=True)
