"""Reading a checkpoint's tensors straight into the places a model holds them.

The order is: names and shapes from the files' headers, matched and checked; then, with nothing left
to go wrong but the disk, the tensors. A parameter that is one run of bytes in a file becomes a view
of the file's pages (as transformers does); any other is allocated once, at its final dtype, and the
tensors in it are copied into their views, several at a time. Parameters that are to be neighbours in memory get one
piece of it, mapped or allocated. No tensor is concatenated or cast aside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, dot_natural_key
from transformers.utils import logging

from nrl_models.common.checkpoint.files import CheckpointFiles, StoredTensor
from nrl_models.common.dtypes import kept_dtypes
from nrl_models.common.garbage import no_collections
from nrl_models.common.modules import class_name, install, move_buffers, owner_of, share_copies
from nrl_models.common.projections import Buffer, join, neighbouring_parameters
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.conversions import conversions_of
from nrl_models.common.state_dict.layer_patterns import Names, Pattern, Renamer, ignore_indices
from nrl_models.common.state_dict.matching import Match, is_wide_float, match
from nrl_models.common.state_dict.views import HFTensor
from nrl_models.common.switches import is_off
from nrl_models.errors import CheckpointError, Problem, ProblemKind

logger = logging.get_logger(__name__)

PROGRESS_AFTER_SECONDS = 2.0
"""Nothing is shown of work that is over sooner."""

READERS = max(4, min(8, os.cpu_count() or 1))
"""Threads that read. Reading waits for memory more than it computes, so few cores still feed several."""

BATCHES = 32
"""Into how many batches, at the least, each thread's share is divided, so that none is left with much at the end."""


def load_weights(
    model: PreTrainedModel,
    files: CheckpointFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    strict: bool = True,
) -> list[str]:
    """Fill `model`, built with meta parameters and real buffers, from `files`.

    Args:
        model: whose parameters are on meta; replaced by real ones, in place.
        files: the checkpoint.
        dtype: of the parameters. Those that transformers keeps in fp32 stay fp32.
        device: where to put them; None is the CPU.
        strict: whether every tensor must be there and used. Otherwise missing ones are initialised as
            transformers initialises them, unexpected ones are skipped, and one warning lists both.
            Tensors given in part, duplicates and wrong shapes are errors all the same.

    Returns:
        The keys that are stored with more precision than they are loaded in.

    Raises:
        CheckpointError: what does not fit, all of it; the model is then unchanged.
    """
    device = device or torch.device("cpu")
    fit = fit_checkpoint(model, files, dtype=dtype, strict=strict)
    _read(model, fit, files, device)
    cast(Any, model)._weight_conversions = fit.names.used_conversions()
    keep_unused(model, fit, files)
    _finish(model, fit, device)
    fit.warn(model, files)
    return fit.narrowed(files)


@dataclass(slots=True)
class Fit:
    """How a checkpoint fits a model: what is known before anything is read.

    Attributes:
        adapter: the model's.
        names: what the checkpoint's keys stand for.
        found: which keys fill which tensors.
        dtypes: the dtype to load each own tensor in.
        skipped: keys that nothing in the model is for, where that is allowed.
        unused: keys of tensors that go back into the next checkpoint, though nothing in the model is for them.
    """

    adapter: StateDictAdapter
    names: CheckpointNames
    found: Match
    dtypes: dict[str, torch.dtype]
    skipped: list[str]
    unused: list[str]

    def narrowed(self, files: CheckpointFiles) -> list[str]:
        """The keys that are stored with more precision than they are loaded in."""
        return [
            key
            for name, sources in self.found.sources.items()
            for key, _ in sources
            if files.tensors[key].dtype.itemsize > self.dtypes[name].itemsize and key not in files.dequantised
        ]

    def warn(self, model: PreTrainedModel, files: CheckpointFiles) -> None:
        """Say once what was missing and what was skipped (`strict=False`)."""
        if self.skipped or self.found.missing:
            logger.warning(
                f"{files.folder} does not hold all of {class_name(model)} (strict=False): initialised "
                f"{', '.join(self.found.missing) or 'nothing'}; skipped {', '.join(self.skipped) or 'nothing'}."
            )


@no_collections()
def fit_checkpoint(
    model: PreTrainedModel,
    files: CheckpointFiles,
    *,
    dtype: torch.dtype,
    strict: bool = True,
    share: tuple[int, int] = (0, 1),
) -> Fit:
    """Match a checkpoint to a model on meta. Nothing is read, except tensors that are tied and stored twice.

    Args:
        model, files, dtype, strict: as in `load_weights`.
        share: `(i, n)`: of tensors stored twice compare the i-th of n shares.

    Raises:
        CheckpointError: what does not fit, all of it.
    """
    adapter = StateDictAdapter(model)
    names = CheckpointNames(model, adapter, files.tensors)
    ignorable = _patterns(model, "_keys_to_ignore_on_load_unexpected", _former_buffers(model))
    optional = _patterns(model, "_keys_to_ignore_on_load_missing", ())
    kept = _patterns(model, "keeps_unused", ())
    skipped: list[str] = []
    unused: list[str] = []

    def why_unexpected(key: str) -> str | None:
        if ignorable.search(key):
            if kept.search(key):
                unused.append(key)
            return None
        if not strict:
            skipped.append(key)
            return None
        return "the model has no such tensor"

    found = match(
        files.tensors,
        names.found.get,
        adapter.own,
        adapter.absent,
        adapter.tied,
        may_miss=lambda name: not strict or bool(optional.search(name)),
        why_unexpected=why_unexpected,
    )
    found.problems += _dtype_problems(adapter, found, files)
    if not found.problems:
        found.problems += _tie_problems(adapter, found, files, share)
    if found.problems:
        summary = f"{files.folder} does not fit {class_name(model)}"
        raise CheckpointError(summary, found.problems, _advice(model, found))
    return Fit(adapter, names, found, _target_dtypes(model, adapter, dtype), skipped, unused)


def keep_unused(model: PreTrainedModel, fit: Fit, files: CheckpointFiles) -> None:
    """Leave with the model, as the files' pages, what it does not use and is to save again."""
    if fit.unused and not is_off("shared-kv-unused-weights"):
        cast(Any, model)._unused_tensors = {key: files.read(files.tensors[key]) for key in fit.unused}


class CheckpointNames:
    """What each key of a checkpoint stands for, by transformers' own renamings and conversions.

    A key may be the hub's name, transformers' in-memory name, an older name that transformers
    renames, or any of these with the base model's prefix added or left out.

    Args:
        model: the model to load.
        adapter: its adapter.
        keys: all keys of the checkpoint.

    Attributes:
        found: for each key the tensor it stands for, or None.
    """

    def __init__(self, model: PreTrainedModel, adapter: StateDictAdapter, keys: Iterable[str]) -> None:
        self._conversions: list[Any] = conversions_of(model)
        self._converters = [conversion for conversion in self._conversions if isinstance(conversion, WeightConverter)]
        self._shares = ignore_indices(self._converters)
        self._prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
        self._names = Names()
        self._marked: set[Pattern] = set()
        # A key and the hub's name for the same tensor become the same name when both are renamed.
        self._table: dict[str, HFTensor] = dict(adapter.transformers)
        self._table |= _renamed(adapter.hub, Renamer(conversions_of(model), self._names))
        renamed = Renamer(self._conversions, self._names).rename(keys)
        self.found = {key: self._resolve(key, name) for key, name in renamed.items()}

    def used_conversions(self) -> list[Any]:
        """The conversions that applied to some key: those that saving has to revert."""
        return [conversion for conversion in self._conversions if conversion.was_used()]

    def _resolve(self, key: str, renamed: str) -> HFTensor | None:
        for candidate in (renamed, key):
            for name in (candidate.removeprefix(self._prefix), self._prefix + candidate, candidate):
                if name in self._table:
                    self._mark_used(candidate)
                    return self._table[name]
        return None

    def _mark_used(self, key: str) -> None:
        """Have the converter that is for `key` note it, as transformers does."""
        pattern, _ = self._names[key]
        if self._shares and pattern in self._marked:
            return
        self._marked.add(pattern)
        for converter in self._converters:
            if converter.rename_source_key(key)[1] is not None:
                return


def _renamed(table: Mapping[str, HFTensor], renamer: Renamer) -> dict[str, HFTensor]:
    """A table by the names its tensors are renamed to; of several that become one the last in transformers' order."""
    renamed = renamer.rename(table)
    result = {name: table[key] for key, name in renamed.items()}
    if len(result) < len(renamed):
        result = {renamed[key]: table[key] for key in sorted(renamed, key=dot_natural_key)}
    return result


def _former_buffers(model: nn.Module) -> list[str]:
    """Buffers that old checkpoints saved and models now compute."""
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    names = [name for name, _ in model.named_buffers()]
    return [pattern for end, pattern in patterns.items() if any(name.endswith(end) for name in names)]


def _patterns(model: nn.Module, attribute: str, more: Iterable[str]) -> re.Pattern[str]:
    patterns = [*(getattr(model, attribute, None) or ()), *more]
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")


def _target_dtypes(model: PreTrainedModel, adapter: StateDictAdapter, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each own tensor: what the model was built with, but fp32 where transformers keeps fp32."""
    kept = kept_dtypes(model, dtype)
    return {name: kept(name) or spec.dtype for name, spec in adapter.own.items()}


def _dtype_problems(adapter: StateDictAdapter, found: Match, files: CheckpointFiles) -> list[Problem]:
    """Stored integers or 8-bit floats where the model computes with floats: the checkpoint is quantised."""
    problems = []
    for name, sources in found.sources.items():
        for key, _ in sources:
            stored = files.tensors[key]
            if adapter.own[name].dtype.is_floating_point and not is_wide_float(stored.dtype):
                detail = f"is stored quantised, as {stored.dtype}; the model's is {adapter.own[name].dtype}"
                problems.append(Problem(ProblemKind.DTYPE, key, detail, stored.file))
    return problems


def _tie_problems(
    adapter: StateDictAdapter, found: Match, files: CheckpointFiles, share: tuple[int, int]
) -> list[Problem]:
    """Tensors the configuration ties, stored twice with different values in the share that is compared."""
    index, count = share
    problems = []
    for name, kept in adapter.tied.items():
        if name in found.sources and kept in found.sources:
            first, second = (found.sources[tied_name][0][0] for tied_name in (name, kept))
            shares = [torch.tensor_split(files.read(files.tensors[key]), count)[index] for key in (first, second)]
            if not torch.equal(*shares):
                detail = f"differs from {second}, but the configuration ties them (tie_word_embeddings)"
                problems.append(Problem(ProblemKind.TIED, first, detail, files.tensors[first].file))
    return problems


_ADVICE = {
    ProblemKind.PARTIAL: "the checkpoint lost tensors: download or save it again",
    ProblemKind.DUPLICATED: "keep one of the tensors that are there more than once",
    ProblemKind.TIED: "pass tie_word_embeddings=False to keep both",
    ProblemKind.SHAPE: "config.json and the weights disagree: one of them is of another model",
    ProblemKind.DTYPE: (
        "quantised weights need a quantization_config that says how: FP8 by blocks and MXFP4 are read as plain "
        "weights, other methods by transformers' quantisers"
    ),
}
"""What to do about each kind of problem."""


def _advice(model: PreTrainedModel, found: Match) -> list[str]:
    kinds = {problem.kind for problem in found.problems}
    advice = []
    if ProblemKind.MISSING in kinds or ProblemKind.UNEXPECTED in kinds:
        advice.append(
            f"check that the checkpoint is one of {class_name(model)} and whole; to start from a part of it "
            "(a new head on a base model) pass strict=False"
        )
    if ProblemKind.MISSING in kinds and any("lm_head" in problem.subject for problem in found.problems):
        advice.append("if the checkpoint ties its head to the embeddings, pass tie_word_embeddings=True")
    return advice + [text for kind, text in _ADVICE.items() if kind in kinds]


def _read(model: PreTrainedModel, fit: Fit, files: CheckpointFiles, device: torch.device) -> None:
    """Put every own tensor in the model, reading several sources at a time."""
    adapter, found, dtypes = fit.adapter, fit.found, fit.dtypes
    tensors: dict[str, torch.Tensor] = {}
    copies: list[tuple[str, StoredTensor, HFTensor]] = []
    groups = [names for names in neighbouring_parameters(model) if _fit_together(names, fit)]
    grouped = {name for names in groups for name in names}
    for names in [*groups, *((name,) for name in found.sources if name not in grouped)]:
        shapes, dtype = [adapter.own[name].shape for name in names], dtypes[names[0]]
        whole = shapes[0] if len(names) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        sources = {name: [(files.tensors[key], target) for key, target in found.sources[name]] for name in names}
        memory = _over_pages(whole, list(sources.values()), shapes, files, dtype) if device.type == "cpu" else None
        if memory is None:
            memory = torch.empty(whole, dtype=dtype, device=device)
            copies += [(name, stored, target) for name in names for stored, target in sources[name]]
        pieces = Buffer(memory, [shape[0] for shape in shapes]).neighbours() if len(names) > 1 else [memory]
        tensors.update(zip(names, pieces, strict=True))

    def copy(job: tuple[str, StoredTensor, HFTensor]) -> None:
        name, stored, target = job
        target.write_into(name, tensors[name], files.read(stored))

    copies.sort(key=lambda job: -job[1].nbytes)  # so that no thread is left with a large one at the end
    run_readers(copy, copies)
    for name, tensor in tensors.items():
        install(model, name, tensor)


def run_readers(read: Callable[[Any], None], jobs: Sequence[Any]) -> None:
    """Do `read` for every job, several at a time, with a progress bar if it takes long.

    Very many jobs are handed to the threads in batches, each of which costs as much to hand over as a small tensor does
    to read.
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


def _fit_together(names: Sequence[str], fit: Fit) -> bool:
    """Whether parameters that are to be neighbours are all in the checkpoint, and alike but for their rows."""
    if any(name not in fit.found.sources for name in names):
        return False
    return len({(fit.adapter.own[name].shape[1:], fit.dtypes[name]) for name in names}) == 1


def _over_pages(
    whole: tuple[int, ...],
    sources: Sequence[list[tuple[StoredTensor, HFTensor]]],
    shapes: Sequence[tuple[int, ...]],
    files: CheckpointFiles,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Memory for parameters one after the other that is the files' pages, if that can be; else None.

    Args:
        whole: its shape.
        sources: of each parameter.
        shapes: of each parameter.
        files: the checkpoint.
        dtype: of all of them.
    """
    if any(stored.dtype != dtype for found in sources for stored, _ in found):
        return None
    stored, target = sources[0][0]
    if len(sources) == len(sources[0]) == 1 and target.view is not None and not target.view.steps:
        return files.read(stored) if stored.start % dtype.itemsize == 0 else None
    runs: list[StoredTensor] = []
    for found, shape in zip(sources, shapes, strict=True):
        blocks = []
        for stored, target in found:
            place = None if target.view is None else target.view.place_in(shape)
            if place is None or not place.is_block:
                return None
            blocks.append((place.offset, stored))
        runs += [stored for _, stored in sorted(blocks, key=lambda block: block[0])]
    return files.read_joined(runs, whole)


def _finish(model: PreTrainedModel, fit: Fit, device: torch.device) -> None:
    """Initialise what was allowed to be missing, share what is tied, and put buffers on the device."""
    found = fit.found
    share_copies(model, found.copies)
    move_buffers(model, device)
    if found.missing:
        for name in found.missing:
            placeholder = getattr(*owner_of(model, name))
            if placeholder.device.type == "meta":
                install(model, name, torch.empty_like(placeholder, device=device))
            getattr(*owner_of(model, name))._is_hf_initialized = False
        module: Any
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
    model.tie_weights()
    join(model)
    unwritten = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.device.type == "meta"]
    if unwritten:  # cannot happen: `match` has accounted for every tensor
        raise AssertionError(f"not written: {', '.join(unwritten)}")
