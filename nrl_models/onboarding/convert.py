"""Rewriting a checkpoint in another dtype or with other shards."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import CheckpointFiles, resolve_folder
from nrl_models.common.checkpoint.generations import plain
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME, is_gguf
from nrl_models.common.checkpoint.writing import staged
from nrl_models.common.gguf.gguf_tables import load_tokenizer
from nrl_models.common.trust.inside import files_inside
from nrl_models.common.trust.own_folder import MARKER
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArgumentError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
"""Files of these kinds do not come along: they would hold the old weights, or others."""

LEFT_BEHIND = (*WEIGHTS, "*.index.json", ".git", ".cache", MARKER, ".nrl-*", ".*.nrl-saving-*")
"""What else has no place beside new weights: lists of files that are not there, a repository's own records, and what
saves leave that are running or were killed."""


def convert(source: str | Path, target: str | Path, *, dtype: str = "auto", max_shard_size: str = "5GB") -> str:
    """Write the checkpoint in `source` to `target`, in another dtype or other shards.

    Everything else in the directory (tokenizer, templates, licence) is copied, over what `target` has of it. Links are
    followed where they stay inside, and refused, before anything is written, where they lead elsewhere. Of a GGUF file
    (`source` itself, or the one in that directory) the tokenizer that it holds is written beside the weights.

    Returns:
        What was written, as text.

    Raises:
        CheckpointError: `source` does not load, has links that leave it, or is `target`.
        UnknownArgumentError: no such dtype, or no size.
    """
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise UnknownArgumentError(
            f"max_shard_size={max_shard_size!r}: expected a size such as '5GB'. {error}"
        ) from error
    folder, target = resolve_folder(source), Path(target)
    if plain(folder).resolve() == target.resolve():
        detail = "is the checkpoint itself"
        raise CheckpointError(
            "cannot convert in place", [Problem(ProblemKind.FILE, str(target), detail)], ["give another directory"]
        )
    others = {} if is_gguf(folder) else files_inside(folder, shutil.ignore_patterns(*LEFT_BEHIND), [target])
    # Nothing is computed, so nothing has to be side by side in memory: tensors go from file to file.
    model = auto_class_for(folder).from_pretrained(folder, dtype=dtype, combine=False)
    saved = {CONFIG_NAME} | ({GENERATION_NAME} if model.can_generate() else set())
    with staged(target) as stage:
        model.save_pretrained(stage, max_shard_size=max_shard_size)
        if is_gguf(folder):
            _save_tokenizer(folder, stage)
        for path, file in others.items():
            if str(path) not in saved:
                (stage / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, stage / path)
    written = CheckpointFiles(target)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in written.tensors.values()})
    return f"{len(written.tensors):,} tensors, {written.nbytes / 1e9:.3f} GB, {' and '.join(kinds)}"


def _save_tokenizer(file: Path, target: Path) -> None:
    """Write the tokenizer that a GGUF file holds, if it holds one, with its chat template."""
    tokenizer = load_tokenizer(file)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
