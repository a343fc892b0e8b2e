"""Match a checkpoint to a model by names and shapes: find the stored tensors that fill each parameter.

All problems are collected before any tensor is read, and raised as one error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.dtypes import kept_dtypes
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import class_name, named_tensors, predicts_words
from nrl_models.common.process_state import no_collections
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.kept_tensors import keeps_unused
from nrl_models.common.state_dict.layouts import base_prefix, convert_layout, hub_conversions
from nrl_models.common.state_dict.matching import Match, is_wide_float, match, with_ties
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.state_dict.own_tensors import widest
from nrl_models.common.state_dict.ties import have_same_values
from nrl_models.common.views.hub_parts import equal_parts
from nrl_models.errors import CheckpointError, Problem, ProblemKind, listed
from nrl_models.loading.mtp_layers.mtp_notes import keeps, note_mtp
from nrl_models.loading.names.checkpoint_names import CheckpointNames
from nrl_models.loading.names.fit_advice import advice_for, note_not_loaded, require_head
from nrl_models.loading.names.other_parts import accepted_parts, head_keys, new_head_names
from nrl_models.loading.options import LoadOptions

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How a checkpoint is matched to the model, and where it may differ.

    Incomplete tensors, duplicates and wrong shapes also raise without `strict`.

    Attributes:
        options: `strict`, `key_mapping`, `mtp`, `new_head` and `ignore_mismatched_sizes` of the load.
        composite: The configuration of a composite checkpoint of which the model is a part. The other parts are not
            loaded.
        passed: Keywords that replaced values of the configuration, for error messages.
    """

    options: LoadOptions
    composite: PreTrainedConfig | None = None
    passed: tuple[str, ...] = ()


EXACT = Tolerance(LoadOptions())

_stored_dtypes: ContextVar[bool] = ContextVar("stored_dtypes", default=False)


@contextmanager
def stored_dtypes() -> Iterator[None]:
    """Load every tensor in the dtype in which it is stored. Dequantized tensors have the requested dtype."""
    token = _stored_dtypes.set(True)
    try:
        yield
    finally:
        _stored_dtypes.reset(token)


@dataclass(slots=True)
class Fit:
    """Result of matching a checkpoint to a model, before any tensor is read.

    Attributes:
        adapter: The model's state-dict adapter.
        names: Mapping from the checkpoint's keys to tensors.
        matches: Keys that fill each tensor.
        dtypes: Dtype in which to load each parameter.
        skipped: Keys that are not loaded: unused keys if `strict=False` allows them, keys of other heads and of towers,
            and dropped MTP weights.
        unused: Keys that the model does not use, but saves unchanged with the next checkpoint.
        mtp: The keys of `unused` for multi-token prediction, which engines also receive.
        of_head: Skipped keys of a head that the model does not have.
        of_towers: Keys of other parts of a composite checkpoint that are skipped, or ignored by the model's class.
        mismatched: Stored shape and model's shape of each key that was accepted despite its shape.
    """

    adapter: StateDictAdapter
    names: CheckpointNames
    matches: Match
    dtypes: dict[str, torch.dtype]
    skipped: list[str]
    unused: list[str]
    mtp: frozenset[str]
    of_head: frozenset[str]
    of_towers: frozenset[str]
    mismatched: dict[str, tuple[torch.Size, torch.Size]]

    def narrowed(self, files: CheckpointFiles) -> list[str]:
        """Return the keys whose stored dtype is wider than the dtype in which they are loaded."""
        return [
            key
            for name, sources in self.matches.sources.items()
            for key, _ in sources
            if files.tensors[key].dtype.itemsize > self.dtypes[name].itemsize and key not in files.dequantized
        ]

    def info(self) -> dict[str, Any]:
        """Return the info of `output_loading_info`, with transformers' keys."""
        misfits = _misfits(self.adapter, self.names, self.mismatched)
        return {
            "missing_keys": set(self.matches.missing) - self.matches.copies.keys() - misfits,
            "unexpected_keys": set(self.skipped),
            "mismatched_keys": {
                (name, *shapes) for key, shapes in self.mismatched.items() for name in self.names.parameters(key)
            },
            "error_msgs": [],
        }

    def warn(self, model: PreTrainedModel, files: CheckpointFiles) -> None:
        """Log a warning each for initialized or skipped tensors, and for heads and towers that are not loaded."""
        known = self.of_head | self.of_towers | self.mtp
        others = [key for key in self.skipped if key not in known]
        if others or self.matches.missing:
            shapes = [f"{key} has shape {tuple(was)}, not {tuple(new)}" for key, (was, new) in self.mismatched.items()]
            initialized = ", ".join(self.matches.missing) or "nothing"
            initialized += f" ({listed(shapes, limit=8)})" if shapes else ""
            skipped = "" if self.of_head | self.of_towers else "; skipped nothing"  # the next message lists these
            skipped = f"; skipped {', '.join(others)}" if others else skipped
            logger.warning(
                f"{files.folder} does not hold all of {class_name(model)}: initialized {initialized}{skipped}."
            )
        note_not_loaded(model, files, self.of_head, self.of_towers)


@no_collections()
def fit_checkpoint(
    model: PreTrainedModel,
    files: CheckpointFiles,
    *,
    dtype: torch.dtype,
    tolerance: Tolerance = EXACT,
    share: tuple[int, int] = (0, 1),
) -> Fit:
    """Match a checkpoint to a model on meta. Reads only tied tensors that are stored twice, to compare them.

    Args:
        model, files, dtype, tolerance: See `load_weights`.
        share: `(i, n)`: compare the i-th of n slices of tensors that are stored twice.

    Raises:
        CheckpointError: If the checkpoint does not fit. Lists all problems.
    """
    options, strict, adapter = tolerance.options, tolerance.options.strict, StateDictAdapter(model)
    names = CheckpointNames(model, adapter, files.tensors, options.key_mapping)
    _accept_equal_parts(model, adapter, names, files)
    mtp_names = MTPNames(model)
    ignored = [key for key in model._keys_to_ignore_on_load_unexpected or () if not mtp_names.is_pattern(key)]
    computed = former_buffers(model)
    former, ignorable = joined(computed), joined([*ignored, *computed])
    of_mtp = frozenset(mtp_names.among([key for key, tensor in names.targets.items() if tensor is None]))
    keeps_mtp = keeps(model, options.mtp)
    optional = joined(model._keys_to_ignore_on_load_missing or ())
    unused_pattern = keeps_unused(model)
    skipped: list[str] = []
    unused: list[str] = []
    unknown = [
        key
        for key, tensor in names.targets.items()
        if tensor is None and key not in of_mtp and not ignorable.search(key)
    ]
    of_head, of_towers = accepted_parts(model, names.renamed, unknown, files.tensors, options, tolerance.composite)
    new_head = set(new_head_names(model, adapter.specs)) if options.new_head else set()
    if options.new_head:
        require_head(model, new_head)
    mismatched = _accepted_mismatches(names, files, options.ignore_mismatched_sizes, new_head)
    misfits = _misfits(adapter, names, mismatched)

    def why_unexpected(key: str) -> str | None:
        if key in mismatched:
            return None
        if key in of_mtp:
            (unused if keeps_mtp else skipped).append(key)
            return None
        if ignorable.search(key):
            if unused_pattern.search(key):
                unused.append(key)
            elif tolerance.composite is not None and not former.search(key):
                of_towers.add(key)
            return None
        if key in of_head or key in of_towers or not strict:
            skipped.append(key)
            return None
        return "the model has no such tensor"

    matches = match(
        files.tensors,
        lambda key: None if key in mismatched else names.targets[key],
        adapter.specs,
        adapter.absent,
        adapter.tied,
        may_miss=lambda name: not strict or name in new_head or name in misfits or bool(optional.search(name)),
        why_unexpected=why_unexpected,
    )
    matches.problems += _dtype_problems(adapter, matches, files)
    if strict and keeps_mtp:
        matches.problems += mtp_names.incomplete(of_mtp)
    if not matches.problems:
        matches.problems += _tie_problems(adapter, matches, files, share)
    if matches.problems:
        summary = f"{files.folder} does not fit {class_name(model)}"
        has_new_head = options.new_head
        if predicts_words(model) and unknown:  # a new head does not help if other keys are unknown
            all_heads = head_keys(model, names.renamed, unknown, files.tensors, options.key_mapping)
            has_new_head |= not set(unknown) <= all_heads
        advice = advice_for(model, adapter, names, matches, new_head=has_new_head, passed=tolerance.passed)
        raise CheckpointError(summary, matches.problems, advice)
    note_mtp(model, files, of_mtp, options.mtp)
    dtypes = _target_dtypes(model, adapter, dtype)
    if _stored_dtypes.get():
        dtypes |= {
            name: widest(files.tensors[key].dtype for key, _ in sources)
            for name, sources in matches.sources.items()
            if not any(key in files.dequantized for key, _ in sources)
        }
    heads, towers = frozenset(of_head), frozenset(of_towers)
    return Fit(adapter, names, matches, dtypes, skipped, unused, of_mtp, heads, towers, mismatched)


def _accept_equal_parts(
    model: PreTrainedModel, adapter: StateDictAdapter, names: CheckpointNames, files: CheckpointFiles
) -> None:
    """Find tensors of files that transformers has saved in equal parts, see `nrl_models.common.views.hub_parts`."""
    others = {
        key: target.name
        for key, target in names.targets.items()
        if target is not None and target.shape != files.tensors[key].shape
    }
    if not others or (conversions := equal_parts(hub_conversions(model) or ())) is None:
        return
    saved = convert_layout(model, adapter.transformers, adapter.specs, conversions)
    for key, name in others.items():
        if name in saved and files.tensors[key].shape == saved[name].shape:
            names.targets[key] = saved[name]


def _accepted_mismatches(
    names: CheckpointNames, files: CheckpointFiles, accepts_all: bool, new_head: Collection[str]
) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Return stored shape and model's shape of each key that is accepted although they differ."""
    if not accepts_all and not new_head:
        return {}
    return {
        key: (torch.Size(files.tensors[key].shape), torch.Size(target.shape))
        for key, target in names.targets.items()
        if target is not None
        and files.tensors[key].shape != target.shape
        and (accepts_all or all(name in new_head for name in target.parameters))
    }


def _misfits(adapter: StateDictAdapter, names: CheckpointNames, mismatched: Iterable[str]) -> set[str]:
    """Return the model's tensors that keys with another shape would fill, and the tensors tied to them."""
    return with_ties({name for key in mismatched for name in names.parameters(key)}, adapter.tied)


def former_buffers(model: PreTrainedModel) -> list[str]:
    """Return patterns of buffers that checkpoints may contain and models compute, under present and older names.

    GPT models had a causal mask `attn.bias` in each layer, and the number `attn.masked_bias`.
    """
    names = {name for name, _ in model.named_buffers()}
    computed = names.difference(name for name, *_ in named_tensors(model))
    prefix = base_prefix(model)
    today = {re.sub(r"\d+", r"\\d+", re.escape(name.removeprefix(prefix))) for name in computed}
    older = (
        ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq", names),
        ("position_ids", r"(^|\.)position_ids$", names),
        (".bias", r"(^|\.)attn\.bias$", computed),
    )
    return [
        *(rf"^({re.escape(prefix)})?{name}$" for name in sorted(today)),
        *(pattern for end, pattern, buffers in older if any(name.endswith(end) for name in buffers)),
        r"(^|\.)attn(\.attention)?\.masked_bias$",
    ]


def joined(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return one pattern that matches every string that any of `patterns` matches."""
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")


def _target_dtypes(model: PreTrainedModel, adapter: StateDictAdapter, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and buffer: as built, or fp32 if transformers keeps it in fp32."""
    planned_dtype = kept_dtypes(model, dtype)
    return {name: planned_dtype(name) or spec.dtype for name, spec in adapter.specs.items()}


def _dtype_problems(adapter: StateDictAdapter, matches: Match, files: CheckpointFiles) -> list[Problem]:
    """Find integers or 8-bit floats that are stored for floating-point parameters: a quantized checkpoint."""
    problems = []
    for name, sources in matches.sources.items():
        for key, _ in sources:
            stored = files.tensors[key]
            if adapter.specs[name].dtype.is_floating_point and not is_wide_float(stored.dtype):
                detail = f"is stored quantized, as {stored.dtype}; the model's is {adapter.specs[name].dtype}"
                problems.append(Problem(ProblemKind.DTYPE, key, detail, stored.file))
    return problems


def _tie_problems(
    adapter: StateDictAdapter, matches: Match, files: CheckpointFiles, share: tuple[int, int]
) -> list[Problem]:
    """Return a problem for each tied tensor that is stored twice, with different values in the compared slice."""
    index, count = share
    problems = []
    for name, source_name in adapter.tied.items():
        if name in matches.sources and source_name in matches.sources:
            first, second = (matches.sources[tied_name][0][0] for tied_name in (name, source_name))
            shares = [torch.tensor_split(files.read(files.tensors[key]), count)[index] for key in (first, second)]
            if not have_same_values(*shares):
                detail = f"differs from {second}, but the configuration ties them (tie_word_embeddings)"
                problems.append(Problem(ProblemKind.TIED, first, detail, files.tensors[first].file))
    return problems
