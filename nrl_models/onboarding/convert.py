"""Rewrite a checkpoint in another dtype or with other shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from nrl_models import registry
from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.generations import FileWatch
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME, is_gguf
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.checkpoint.writing import (
    WEIGHT_FILES,
    checked_file_size,
    folder_to_write,
    require_replaceable,
    staged,
)
from nrl_models.common.gguf.gguf_tables import load_tokenizer
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.common.trust.inside import files_inside
from nrl_models.common.trust.own_folder import MARKER, results_in
from nrl_models.common.upstream import architectures_of, class_of_transformers
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArchitectureError
from nrl_models.loading.fit import stored_dtypes
from nrl_models.loading.read_config import part_for, read_config
from nrl_models.loading.source import again_if_replaced

LEFT_BEHIND = (*WEIGHT_FILES, "*.index.json", ".git", ".cache", MARKER, ".nrl-*", ".*.nrl-saving-*")
"""Files that are not copied: weights, which would be the old ones or others, indices of missing files, records of a
repository, and temporary files of saves that are running or were killed."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> str:
    """Write the checkpoint in `source` to `target`, in another dtype or other shards.

    All other files of the directory or hub repository (tokenizer, templates, license) are copied and overwrite those in
    `target`, but not results of commands that ran in the directory. Links are followed if they stay inside the
    directory; others raise before anything is written. For a GGUF file (`source`, or the one in that directory), its
    tokenizer is also written.

    Args:
        source: Checkpoint directory, hub repository or GGUF file.
        target: Directory to write.
        dtype: Dtype to write; `auto` keeps each tensor's. Dequantized tensors get the configuration's.
        max_shard_size: Maximum size of a file.
        overwrite: Whether to replace a checkpoint in `target`. Its other files stay.

    Returns:
        A summary of the written files, as text.

    Raises:
        CheckpointError: If `source` does not load, has links that leave it, or is `target`. Also if `target` has a
            checkpoint and `overwrite` is False, or values are too large for `dtype`.
        UnknownArchitectureError: If no auto class loads the architecture that `source` names.
        UnknownArgumentError: If the dtype or size is invalid.
    """
    checked_file_size(max_shard_size)
    target = folder_to_write(target)
    again_if_replaced(source, lambda: _convert(source, target, dtype, max_shard_size, overwrite))
    written = CheckpointFiles(target)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in written.tensors.values()})
    return f"{len(written.tensors):,} tensors, {written.nbytes / 1e9:.3f} GB, {' and '.join(kinds)}"


def _convert(source: str | Path, target: Path, dtype: str, max_shard_size: str, overwrite: bool) -> None:
    """Write the checkpoint once, from one generation of its files."""
    folder = resolve_folder(source, all_but=LEFT_BEHIND)
    with FileWatch(folder.parent if is_gguf(folder) else folder) as watch:
        _write(folder, target, dtype, max_shard_size, overwrite, watch)


def _write(folder: Path, target: Path, dtype: str, max_shard_size: str, overwrite: bool, watch: FileWatch) -> None:
    """Write the checkpoint in `folder` to `target`, if `watch` finds its files unchanged at the end."""
    require_replaceable(folder, target, overwrite=overwrite)
    left_out = [target, *results_in(folder)]
    others = {} if is_gguf(folder) else files_inside(folder, shutil.ignore_patterns(*LEFT_BEHIND), left_out)
    auto_class = auto_class_for(folder)
    _require_same_architecture(read_config(folder), folder)
    # Linears run separately, because nothing is computed: tensors are copied from file to file.
    with stored_dtypes() if dtype == "auto" and not is_gguf(folder) else nullcontext():
        model = auto_class.from_pretrained(folder, dtype=dtype, combine=False)
    _require_finite(model, lambda: auto_class.from_pretrained(folder, dtype="float32", combine=False))
    saved = {CONFIG_NAME} | ({GENERATION_NAME} if model.can_generate() else set())
    with staged(target) as stage:
        model.save_pretrained(stage, max_shard_size=max_shard_size)
        if is_gguf(folder):
            _save_tokenizer(folder, stage)
        for path, file in others.items():
            if str(path) not in saved:
                (stage / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, stage / path)
        watch.check()


def _require_finite(model: nn.Module, load_wide: Callable[[], nn.Module]) -> None:
    """Check that casting a checkpoint to a model's dtype kept its values finite: 70,000 is infinite in float16.

    Args:
        model: The loaded model.
        load_wide: Loads the same checkpoint in fp32, which has the range of all other dtypes. Called if a float16
            tensor has infinite values, because those may also be in the checkpoint.

    Raises:
        CheckpointError: If values became infinite. Lists all tensors.
    """
    infinite = [name for name, tensor in _tensors(model) if tensor.dtype == torch.float16 and tensor.isinf().any()]
    limit, problems = torch.finfo(torch.float16).max, []
    for name, tensor in _tensors(load_wide()) if infinite else ():
        if name in infinite and (finite := tensor[tensor.isfinite()]).numel() and finite.abs().max() > limit:
            low, high = (float(bound) for bound in torch.aminmax(finite))
            detail = f"has values from {low:.6g} to {high:.6g}, and float16 ends at {limit:.6g}"
            problems.append(Problem(ProblemKind.DTYPE, name, detail))
    if problems:
        advice = ["convert to bfloat16 or float32"]
        raise CheckpointError("values would be infinite in float16", problems, advice)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the unquantized tensors of a model, and those that it keeps without computing with them."""
    for name, tensor in model.state_dict().items():
        if type(tensor) is torch.Tensor:
            yield name, tensor
    for name, kept_tensor in kept_by(model).items():
        yield name, kept_tensor.read()


def _require_same_architecture(config: PreTrainedConfig, folder: Path) -> None:
    """Raise if a checkpoint names a class of transformers that no auto class of this package loads.

    Another class for its configuration would be loaded, which lacks some of its tensors. Names that are not those of
    transformers' classes for this configuration are aliases, or models that share a class.
    """
    known = (*registry.architectures(), *architectures_of(config.model_type))
    named = config.architectures or []
    others = [
        name for name in named if (upstream_class := class_of_transformers(name)) and part_for(upstream_class, config)
    ]
    if others and not any(name in known for name in named):
        convertible = [name for name in architectures_of(config.model_type) if hasattr(transformers, name)]
        raise UnknownArchitectureError(
            f"{folder} is a {others[0]}, which cannot be converted, because no auto class of nrl_models loads it. Of "
            f"model_type {config.model_type!r}, {', '.join(convertible) or 'nothing'} can be converted. Use "
            f"transformers: {others[0]}.from_pretrained(path, dtype=...).save_pretrained(directory)."
        )


def _save_tokenizer(file: Path, target: Path) -> None:
    """Write the tokenizer that a GGUF file holds, if it holds one, with its chat template."""
    tokenizer = load_tokenizer(file)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
