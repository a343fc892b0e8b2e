"""Read a checkpoint's tensors directly into a model's parameters.

Names and shapes in the files' headers are checked first. Afterwards only the disk can fail.

- A parameter that is one contiguous range of bytes in a file becomes a memory-mapped view, as in transformers.
- Any other parameter is allocated once, in its final dtype. Several threads fill its parts.
- Parameters of a fused group share one buffer, mapped or allocated.
- Tensors are never concatenated or cast in a separate step, so intermediate copies are not needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.pinned import pinned_copies
from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.modules import (
    install,
    owner_of,
)
from nrl_models.common.process_state import BUILDING
from nrl_models.common.projections import Buffer, join, neighboring_parameters
from nrl_models.common.state_dict.kept_tensors import keep, kept_from
from nrl_models.common.state_dict.layouts import note_loaded_names
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import mark_initialized
from nrl_models.common.upstream_conversions import set_loaded_conversions
from nrl_models.common.views.view import HFTensor
from nrl_models.loading.fit import EXACT, Fit, Tolerance, fit_checkpoint
from nrl_models.loading.skeleton import move_buffers, share_copies

logger = logging.get_logger(__name__)

PROGRESS_AFTER_SECONDS = 2.0
"""The progress bar appears after this time."""

READERS = max(4, min(8, os.cpu_count() or 1))
"""Reader threads. Reading is bound by memory rather than by computation, so more threads than cores pay off."""

BATCHES = 32
"""Batches per reader thread, at least, so that no thread is left with a long tail."""


def load_weights(
    model: PreTrainedModel,
    files: CheckpointFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    tolerance: Tolerance = EXACT,
) -> Fit:
    """Load the tensors of `files` into a `model` that was built with parameters on meta and buffers with values.

    Args:
        model: The model. Its parameters are replaced in place.
        files: The checkpoint.
        dtype: Dtype of the parameters. Parameters that transformers keeps in fp32 stay in fp32.
        device: Device of the parameters; None is the CPU.
        tolerance: Differences that are accepted.

    Returns:
        The match of checkpoint and model.

    Raises:
        CheckpointError: If the checkpoint does not fit. Lists all problems; the model is unchanged.
    """
    device = device or torch.device("cpu")
    fit = fit_checkpoint(model, files, dtype=dtype, tolerance=tolerance)
    _read(model, fit, files, device)
    set_loaded_conversions(model, fit.names.used_conversions())
    note_loaded_names(model, fit.names.loaded)
    keep_unused(model, fit, files, dtype)
    _finish(model, fit, device)
    fit.warn(model, files)
    return fit


def keep_unused(model: PreTrainedModel, fit: Fit, files: CheckpointFiles, dtype: torch.dtype) -> None:
    """Keep tensors that the model does not use but saves, as memory-mapped views of the files.

    Args:
        model, files, dtype: See `load_weights`.
        fit: Match of checkpoint and model.
    """
    mtp = [key for key in fit.unused if key in fit.mtp]
    others = [key for key in fit.unused if key not in fit.mtp]
    if not is_off("mtp-weights"):
        keep(model, kept_from(files, mtp, dtype, is_mtp=True))
    if not is_off("shared-kv-unused-weights"):
        keep(model, kept_from(files, others, dtype))


def _read(model: PreTrainedModel, fit: Fit, files: CheckpointFiles, device: torch.device) -> None:
    """Read every tensor of the model, several sources at a time."""
    adapter, matches, dtypes = fit.adapter, fit.matches, fit.dtypes
    tensors: dict[str, torch.Tensor] = {}
    copies: list[tuple[str, StoredTensor, HFTensor]] = []
    groups = [names for names in neighboring_parameters(model) if _fit_together(names, fit)]
    grouped = {name for names in groups for name in names}
    for names in [*groups, *((name,) for name in matches.sources if name not in grouped)]:
        shapes, dtype = [adapter.specs[name].shape for name in names], dtypes[names[0]]
        buffer_shape = Buffer.shape_of(shapes)
        sources = {name: [(files.tensors[key], target) for key, target in matches.sources[name]] for name in names}
        memory = None
        if device.type == "cpu":
            blocks = [
                [_block_of_stored(stored, target, shape) for stored, target in sources[name]]
                for name, shape in zip(names, shapes, strict=True)
            ]
            memory = map_consecutive(blocks, shapes, files, dtype)
        if memory is None:
            memory = torch.empty(buffer_shape, dtype=dtype, device=device)
            copies += [(name, stored, target) for name in names for stored, target in sources[name]]
        pieces = Buffer(memory, [shape[0] for shape in shapes]).neighbors() if len(names) > 1 else [memory]
        tensors.update(zip(names, pieces, strict=True))

    pinned = pinned_copies(device)

    def copy(job: tuple[str, StoredTensor, HFTensor]) -> None:
        name, stored, target = job
        block = None if pinned is None else _block_of(target, tensors[name])
        if pinned is not None and block is not None:
            pinned.copy(block, files.read(stored))
        else:
            target.write_into(name, tensors[name], files.read(stored))

    copies.sort(key=lambda job: -job[1].nbytes)  # largest first: no thread is left with a long tail
    run_readers(copy, copies)
    if pinned is not None:
        pinned.finish()
    for name, tensor in tensors.items():
        install(model, name, tensor)


def run_readers(read: Callable[[Any], None], jobs: Sequence[Any]) -> None:
    """Call `read` for every job in several threads, with a progress bar if it takes long.

    Jobs go to the threads in batches, because submitting a job costs as much as reading a small tensor.
    """
    size = max(1, len(jobs) // (READERS * BATCHES))
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]

    def read_all(batch: Sequence[Any]) -> int:
        for job in batch:
            read(job)
        return len(batch)

    with (
        ThreadPoolExecutor(max_workers=READERS) as pool,
        logging.tqdm(total=len(jobs), desc="Loading weights", delay=PROGRESS_AFTER_SECONDS) as progress,
    ):
        for count in pool.map(read_all, batches):
            progress.update(count)


def _block_of(target: HFTensor, memory: torch.Tensor) -> torch.Tensor | None:
    """Return the block of a parameter that is a Hugging Face tensor; None if that is not one block, or transposed."""
    region = None if target.view is None else target.view.region_in(tuple(memory.shape))
    if region is None or not region.is_block:
        return None
    return memory.view(-1)[region.offset : region.offset + torch.Size(target.shape).numel()]


def _fit_together(names: Sequence[str], fit: Fit) -> bool:
    """Return True if all parameters of a group are in the checkpoint with equal dtype and trailing dimensions."""
    if any(name not in fit.matches.sources for name in names):
        return False
    return len({(fit.adapter.specs[name].shape[1:], fit.dtypes[name]) for name in names}) == 1


def _block_of_stored(stored: StoredTensor, target: HFTensor, shape: tuple[int, ...]) -> tuple[int, StoredTensor] | None:
    """Return a stored tensor, and its offset in a parameter of `shape`; None if it is not one block of it."""
    region = None if target.view is None else target.view.region_in(shape)
    return None if region is None or not region.is_block else (region.offset, stored)


def map_consecutive(
    parts: Sequence[Sequence[tuple[int, StoredTensor] | None]],
    shapes: Sequence[tuple[int, ...]],
    files: CheckpointFiles,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return a memory-mapped view of consecutive parameters; None if they are not contiguous in the files.

    Args:
        parts: Per parameter, or shard of one, each stored tensor with its offset; None if it is not contiguous.
        shapes: Shape of each parameter. They differ only in the first dimension.
        files: The checkpoint.
        dtype: Dtype of all parameters.
    """
    if not files.is_private:
        return None
    stored_tensors: list[StoredTensor] = []
    for blocks, shape in zip(parts, shapes, strict=True):
        contiguous = [block for block in blocks if block is not None and block[1].dtype == dtype]
        filled = 0
        for offset, stored in sorted(contiguous, key=lambda block: (block[0], block[1].numel)):
            if offset != filled:
                return None
            filled += stored.numel
            stored_tensors.append(stored)
        if len(contiguous) < len(blocks) or filled != torch.Size(shape).numel():
            return None
    if len(stored_tensors) == 1:
        stored, shape = stored_tensors[0], shapes[0]
        if stored.shape == shape and stored == files.tensors.get(stored.key):  # complete, so it may be dequantized
            return files.read(stored) if stored.start % dtype.itemsize == 0 else None
    return files.read_joined(stored_tensors, Buffer.shape_of(shapes))


def _finish(model: PreTrainedModel, fit: Fit, device: torch.device) -> None:
    """Initialize missing parameters, tie weights, and move buffers to the device."""
    matches = fit.matches
    share_copies(model, matches.copies)
    move_buffers(model, device)
    if matches.missing:
        for name in matches.missing:
            placeholder = getattr(*owner_of(model, name))
            if placeholder.device.type == "meta":
                install(model, name, torch.empty_like(placeholder, device=device))
            mark_initialized(getattr(*owner_of(model, name)), False)
        for module in model.modules():
            mark_initialized(module, False)
        with BUILDING:  # other builds replace functions of torch.nn.init
            model.initialize_weights()
    model.tie_weights()
    join(model)
    require_written(model)


def require_written(model: PreTrainedModel) -> None:
    """Assert that no parameter is left on meta."""
    unwritten = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.device.type == "meta"]
    if unwritten:  # cannot happen: `match` has accounted for every tensor
        raise AssertionError(f"not written: {', '.join(unwritten)}")
