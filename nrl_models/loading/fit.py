"""Matches a checkpoint to a model: which stored tensors fill which parameters, from names and shapes alone.

All problems are collected before any tensor is read, and raised as one error.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.dtypes import kept_dtypes
from nrl_models.common.garbage import no_collections
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import class_name, is_base_model, predicts_words
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.kept_tensors import keeps_unused
from nrl_models.common.state_dict.layouts import base_prefix, renamed_keys
from nrl_models.common.state_dict.matching import Match, is_wide_float, match
from nrl_models.common.state_dict.mtp import MTP, MTPNames
from nrl_models.common.state_dict.ties import as_keywords, have_same_values, tying_keys
from nrl_models.common.upstream import (
    BUILDING,
    Renaming,
    WeightConverter,
    dot_natural_key,
    get_model_conversion_mapping,
)
from nrl_models.common.views.view import HFTensor
from nrl_models.errors import CheckpointError, Problem, ProblemKind
from nrl_models.loading.shared_classes import shared_class_note, shared_classes, takes_config

logger = get_logger(__name__)


@dataclass(slots=True)
class Fit:
    """How a checkpoint fits a model, known before any tensor is read.

    Attributes:
        adapter: the model's state-dict adapter.
        names: the tensors that the checkpoint's keys stand for.
        found: which keys fill which tensors.
        dtypes: the dtype to load each parameter in.
        skipped: keys that the model has no use for, where `strict=False` allows that, or of the head that a base
            model does not have; MTP weights that are dropped.
        unused: keys that the model has no use for but writes into the next checkpoint.
        mtp: of them those of multi-token prediction, which engines get, too.
    """

    adapter: StateDictAdapter
    names: CheckpointNames
    found: Match
    dtypes: dict[str, torch.dtype]
    skipped: list[str]
    unused: list[str]
    mtp: frozenset[str]

    def narrowed(self, files: CheckpointFiles) -> list[str]:
        """The keys that are stored with more precision than they are loaded in."""
        return [
            key
            for name, sources in self.found.sources.items()
            for key, _ in sources
            if files.tensors[key].dtype.itemsize > self.dtypes[name].itemsize and key not in files.dequantised
        ]

    def info(self) -> dict[str, Any]:
        """What `output_loading_info` returns, with transformers' keys."""
        return {
            "missing_keys": set(self.found.missing) - self.found.copies.keys(),
            "unexpected_keys": set(self.skipped),
            "mismatched_keys": set(),
            "error_msgs": [],
        }

    def warn(self, model: PreTrainedModel, files: CheckpointFiles) -> None:
        """Log one warning that lists what was missing and what was skipped (`strict=False`)."""
        others = [key for key in self.skipped if key not in self.names.of_head and key not in self.mtp]
        if others or self.found.missing:
            logger.warning(
                f"{files.folder} does not hold all of {class_name(model)} (strict=False): initialised "
                f"{', '.join(self.found.missing) or 'nothing'}; skipped {', '.join(others) or 'nothing'}."
            )


@no_collections()
def fit_checkpoint(
    model: PreTrainedModel,
    files: CheckpointFiles,
    *,
    dtype: torch.dtype,
    strict: bool = True,
    key_mapping: Mapping[str, str] | None = None,
    share: tuple[int, int] = (0, 1),
    mtp: MTP = "keep",
) -> Fit:
    """Match a checkpoint to a model on meta. Only tied tensors that are stored twice are read, to compare them.

    Args:
        model, files, dtype, strict, key_mapping, mtp: as in `load_weights`.
        share: `(i, n)`: compare the i-th of n slices of tensors that are stored twice.

    Raises:
        CheckpointError: everything that does not fit.
    """
    adapter = StateDictAdapter(model)
    names = CheckpointNames(model, adapter, files.tensors, key_mapping)
    mtp_names = MTPNames(model)
    ignored = [key for key in model._keys_to_ignore_on_load_unexpected or () if not mtp_names.is_pattern(key)]
    ignorable = _joined([*ignored, *_former_buffers(model)])
    of_mtp = frozenset(mtp_names.among([key for key, tensor in names.found.items() if tensor is None]))
    keeps_mtp = keeps(model, mtp)
    optional = _joined(model._keys_to_ignore_on_load_missing or ())
    kept = keeps_unused(model)
    skipped: list[str] = []
    unused: list[str] = []

    def why_unexpected(key: str) -> str | None:
        if key in of_mtp:
            (unused if keeps_mtp else skipped).append(key)
            return None
        if ignorable.search(key):
            if kept.search(key):
                unused.append(key)
            return None
        if key in names.of_head or not strict:
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
    if strict and keeps_mtp:
        found.problems += mtp_names.incomplete(of_mtp)
    if not found.problems:
        found.problems += _tie_problems(adapter, found, files, share)
    if found.problems:
        summary = f"{files.folder} does not fit {class_name(model)}"
        raise CheckpointError(summary, found.problems, _advice(model, adapter, found))
    note_mtp(model, files, of_mtp, mtp)
    return Fit(adapter, names, found, _target_dtypes(model, adapter, dtype), skipped, unused, of_mtp)


def keeps(model: PreTrainedModel, mtp: MTP) -> bool:
    """Whether a model keeps weights of multi-token prediction: they predict words by its output embeddings."""
    return mtp == "keep" and predicts_words(model)


def note_mtp(model: PreTrainedModel, files: CheckpointFiles, found: Collection[str], mtp: MTP) -> None:
    """Say once that MTP weights are dropped, or that the configuration announces some and there are none.

    Args:
        model, files, mtp: as in `fit_checkpoint`.
        found: the MTP weights in the checkpoint.
    """
    names = MTPNames(model)
    if found and not keeps(model, mtp):
        size = sum(files.tensors[key].nbytes for key in found) / 1e9
        why = "as mtp='drop' asks" if mtp == "drop" else f"as {class_name(model)} has no output embeddings"
        logger.warning_once(
            f"{files.folder}: {len(found)} tensors of multi-token prediction ({size:.2f} GB) are dropped, {why}: they "
            "will not be in what is saved or exported."
        )
    elif not found and keeps(model, mtp) and names.known and names.announced:
        logger.warning_once(
            f"{files.folder} announces {names.announced} layers of multi-token prediction ({names.key}) and holds "
            "none. None are made up: what is saved or exported has none, and engines cannot draft with them."
        )


class CheckpointNames:
    """What each key of a checkpoint stands for, by transformers' own renamings and conversions.

    A key may be the hub's name, transformers' in-memory name, an older name that transformers
    renames, or any of these with the base model's prefix added or left out.

    Args:
        model: the model to load.
        adapter: its adapter.
        keys: all keys of the checkpoint.
        key_mapping: renamings of these keys that come before transformers'.

    Attributes:
        found: for each key the tensor it stands for, or None.
        of_head: keys of the head, where a base model is loaded from a checkpoint of a model with one.
        published: keys in place of which transformers saves others, though not because they are its own names in
            memory, older ones, or without the base model's prefix: see `note_published_names`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: StateDictAdapter,
        keys: Iterable[str],
        key_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self._conversions: list[Any] = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
        self._converters = [conversion for conversion in self._conversions if isinstance(conversion, WeightConverter)]
        self._prefix = base_prefix(model)
        self._rename = Renaming()
        renamed = renamed_keys(keys, self._conversions, self._rename)
        # A key and the hub's name for the same tensor become the same name when both are renamed.
        others = adapter.hub.keys() - renamed.keys()
        names = renamed | renamed_keys(others, get_model_conversion_mapping(model), Renaming())
        hub = {names[name]: tensor for name, tensor in adapter.hub.items()}
        if len(hub) < len(adapter.hub):  # of several that become one name the last in transformers' order wins
            hub = {names[name]: adapter.hub[name] for name in sorted(adapter.hub, key=dot_natural_key)}
        self._table: dict[str, HFTensor] = adapter.transformers | hub
        self.found = {key: self._resolve(key, name) for key, name in renamed.items()}
        unknown = [key for key, tensor in self.found.items() if tensor is None]
        self.of_head = _names_of_head(model, renamed, key_mapping).intersection(unknown) if unknown else set()
        self.published = [] if key_mapping else self._published(model, adapter, renamed)

    def used_conversions(self) -> list[Any]:
        """The conversions that applied to some key: those that saving has to revert."""
        return [conversion for conversion in self._conversions if self._rename.has_used(conversion)]

    def _published(self, model: PreTrainedModel, adapter: StateDictAdapter, renamed: Mapping[str, str]) -> list[str]:
        saved = {
            key: tensor.name
            for key, tensor in self.found.items()
            if tensor is not None and key != tensor.name and key not in adapter.transformers
        }
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        if not saved or not conversions:  # of which saving undoes none
            return []
        names = renamed_keys({*saved, *saved.values()}, conversions, Renaming())
        # Where some names have the prefix, others lack it as published; where none has, it is the base model's file.
        has_prefix = any(name.startswith(self._prefix) for name in renamed.values())
        alike = ("", self._prefix) if has_prefix else ("",)
        return [key for key, name in saved.items() if names[name] in [prefix + names[key] for prefix in alike]]

    def _resolve(self, key: str, renamed: str) -> HFTensor | None:
        for candidate in (renamed, key):
            for name in (candidate.removeprefix(self._prefix), self._prefix + candidate, candidate):
                if name in self._table:
                    self._mark_used(candidate)
                    return self._table[name]
        return None

    def _mark_used(self, key: str) -> None:
        """Mark the converter that applies to `key` as used, as transformers does."""
        for converter in self._converters:
            if self._rename(converter, key)[1] is not None:
                return


def _names_of_head(model: PreTrainedModel, keys: Iterable[str], key_mapping: Mapping[str, str] | None) -> set[str]:
    """Of a base model: the keys of what the model with a head that the configuration names has beside it.

    That model is built without weights, because only it knows its names: in some checkpoints `lm_head.weight` is
    `language_model.lm_head.weight`.
    """
    architecture = next(iter(model.config.architectures or ()), "")
    # The code of models that are not in transformers has both classes in one module.
    modules = (transformers, sys.modules[type(model).__module__])
    named: list[Any] = [getattr(module, architecture) for module in modules if hasattr(module, architecture)]
    head_class: Any = next(iter(named or shared_classes(model.config)), None)
    if not is_base_model(model) or head_class is None or head_class.__name__ == type(model).__name__:
        return set()
    if getattr(head_class, "config_class", None) is None or not takes_config(head_class, model.config):
        return set()
    with BUILDING, torch.device("meta"):
        head: PreTrainedModel = head_class._from_config(copy.deepcopy(model.config))
    own, inside = set(head.state_dict()), f"{head.base_model_prefix}."
    conversions = get_model_conversion_mapping(head, dict(key_mapping) if key_mapping else None)
    renamed = renamed_keys(keys, conversions, Renaming())
    return {key for key, name in renamed.items() if name in own and not name.startswith(inside)}


def _former_buffers(model: nn.Module) -> list[str]:
    """Patterns of buffers that old checkpoints contain and models now compute."""
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    names = [name for name, _ in model.named_buffers()]
    return [pattern for end, pattern in patterns.items() if any(name.endswith(end) for name in names)]


def _joined(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")


def _target_dtypes(model: PreTrainedModel, adapter: StateDictAdapter, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each parameter and buffer: as built, but fp32 where transformers keeps fp32."""
    kept = kept_dtypes(model, dtype)
    return {name: kept(name) or spec.dtype for name, spec in adapter.own.items()}


def _dtype_problems(adapter: StateDictAdapter, found: Match, files: CheckpointFiles) -> list[Problem]:
    """Problems for integers or 8-bit floats stored where the model computes in floats: a quantised checkpoint."""
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
    """Problems for tied tensors that are stored twice with different values in the compared slice."""
    index, count = share
    problems = []
    for name, kept in adapter.tied.items():
        if name in found.sources and kept in found.sources:
            first, second = (found.sources[tied_name][0][0] for tied_name in (name, kept))
            shares = [torch.tensor_split(files.read(files.tensors[key]), count)[index] for key in (first, second)]
            if not have_same_values(*shares):
                detail = f"differs from {second}, but the configuration ties them (tie_word_embeddings)"
                problems.append(Problem(ProblemKind.TIED, first, detail, files.tensors[first].file))
    return problems


_ADVICE = {
    ProblemKind.PARTIAL: "the checkpoint is incomplete: download or save it again",
    ProblemKind.DUPLICATED: "keep only one of the duplicated tensors",
    ProblemKind.SHAPE: "config.json and the weights belong to different models",
    ProblemKind.DTYPE: (
        "quantised weights need a quantization_config in config.json: block-wise FP8 and MXFP4 are dequantised "
        "while loading, other methods are left to transformers' quantisers"
    ),
}
"""What to do about each kind of problem."""


def _advice(model: PreTrainedModel, adapter: StateDictAdapter, found: Match) -> list[str]:
    kinds = {problem.kind for problem in found.problems}
    advice = []
    if ProblemKind.MISSING in kinds or ProblemKind.UNEXPECTED in kinds:
        advice.append(
            f"check that this is a complete checkpoint of {class_name(model)}; to load only part of it "
            "(a new head on a base model) pass strict=False"
        )
    if ProblemKind.MISSING in kinds and (keys := tying_keys(model, found.missing, tie=False)):
        advice.append(f"if the checkpoint ties its head to the embeddings, pass {as_keywords(keys, True)}")
    if ProblemKind.TIED in kinds:
        advice.append(f"pass {as_keywords(tying_keys(model, adapter.tied), False)} to keep both")
    if {ProblemKind.MISSING, ProblemKind.UNEXPECTED} & kinds and (note := shared_class_note(model.config)):
        advice.append(note)
    return advice + [text for kind, text in _ADVICE.items() if kind in kinds]
