"""Writing a checkpoint again, in another dtype."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint_files import INDEX_NAME, CheckpointFiles, resolve_folder
from nrl_models.errors import CheckpointError, Problem, UnknownArgumentError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of these kinds do not come along as they are."""


def convert(source: str | Path, target: str | Path, *, dtype: str = "auto", max_shard_size: str = "5GB") -> str:
    """Write the checkpoint in `source` to `target`, in another dtype or other shards.

    Everything else in the folder (tokenizer, templates, licence) is copied.

    Returns:
        What was written, in words.

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
    if target.exists() and target.resolve() == folder.resolve():
        detail = "is the checkpoint itself"
        raise CheckpointError(
            "cannot convert in place", [Problem("file", str(target), detail)], ["give another folder"]
        )
    # Nothing is computed, so there is nothing to combine: tensors go from file to file.
    model = auto_class_for(folder).from_pretrained(folder, dtype=dtype, combine=False)
    model.save_pretrained(target, max_shard_size=max_shard_size)
    for path in folder.iterdir():
        taken = (target / path.name).exists() or path.name == INDEX_NAME or path.suffix in WEIGHT_SUFFIXES
        if path.is_file() and not taken:
            shutil.copy2(path, target / path.name)
    written = CheckpointFiles(target)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in written.tensors.values()})
    return f"{len(written.tensors):,} tensors, {written.nbytes / 1e9:.3f} GB, {' and '.join(kinds)}"
