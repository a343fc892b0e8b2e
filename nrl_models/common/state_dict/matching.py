"""Match checkpoint tensors to the model's own tensors, and collect all problems.

The rules are the same for a checkpoint's files, a dict of tensors and `load_state_dict`. Matching is strict in both
directions, all problems are reported together, and nothing is written if there are any.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.views.view import HFTensor, Region, View
from nrl_models.errors import Problem, ProblemKind, listed


@dataclass(slots=True)
class Match:
    """Result of `match`.

    Attributes:
        sources: Keys and Hugging Face tensors that fill each own tensor.
        copies: For own tensors that only exist under a tied name, the own tensor to tie them to.
        missing: Own tensors without any source.
        problems: Mismatches. Nothing may be written unless this is empty.
    """

    sources: dict[str, list[tuple[str, HFTensor]]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def match(
    tensors: Mapping[str, TensorSpec | StoredTensor],
    find: Callable[[str], HFTensor | None],
    model_specs: Mapping[str, TensorSpec],
    absent: Callable[[str, Collection[HFTensor]], list[str]],
    tied: Mapping[str, str],
    *,
    may_miss: Callable[[str], bool] = lambda name: False,
    why_unexpected: Callable[[str], str | None],
) -> Match:
    """Match `tensors` to the model's own, which `model_specs` describes.

    Args:
        tensors: Tensors of the checkpoint or state dict, by key.
        find: Returns the Hugging Face tensor for a key, or None.
        model_specs: The model's own tensors.
        absent: Returns names of the missing parts of an own tensor if only some Hugging Face tensors exist. Used in
            messages.
        tied: For each tied own name, the own name with the same storage.
        may_miss: Returns True for own tensors that may be missing completely.
        why_unexpected: Returns the message for a key without a Hugging Face tensor; None ignores the key.
    """
    result = Match()
    misfits: set[str] = set()  # own tensors with an invalid source, which are not also reported as missing
    for key, tensor in tensors.items():
        target = find(key)
        if target is None:
            if (why := why_unexpected(key)) is not None:
                result.problems.append(Problem(ProblemKind.UNEXPECTED, key, why, getattr(tensor, "file", None)))
        elif tensor.shape != target.shape:
            misfits.update(target.parameters)
            detail = f"has shape {tensor.shape}, the model expects {target.shape}"
            result.problems.append(Problem(ProblemKind.SHAPE, key, detail, getattr(tensor, "file", None)))
        else:
            for parameter in target.parameters:
                result.sources[parameter].append((key, target))
    for name, sources in result.sources.items():
        if name not in misfits:
            result.problems += _coverage(name, model_specs[name], sources, tensors, absent)
    _resolve_ties(result, tied)
    misfits = with_ties(misfits, tied)
    for name in model_specs:
        if name not in result.sources and name not in result.copies and name not in misfits:
            result.missing.append(name)
            if not may_miss(name):
                result.problems.append(Problem(ProblemKind.MISSING, listed(absent(name, ()), limit=8), "not found"))
    return result


def _coverage(
    name: str,
    spec: TensorSpec,
    sources: list[tuple[str, HFTensor]],
    tensors: Mapping[str, TensorSpec | StoredTensor],
    absent: Callable[[str, Collection[HFTensor]], list[str]],
) -> list[Problem]:
    """Return problems with the sources of an own tensor, which must fill it exactly once, in one dtype."""
    keys = [key for key, _ in sources]
    views = [piece.view for _, target in sources for piece in target.pieces if piece.view.parameter == name]
    regions = [view.region_in(spec.shape) for view in views]
    filled, wanted = sum(math.prod(region.shape) for region in regions), math.prod(spec.shape)
    files = sorted({file for key in keys if (file := getattr(tensors[key], "file", None))})
    file = ", ".join(files) or None
    if filled > wanted or (wanted and _overlap(views, regions)):  # an empty tensor cannot be filled twice
        return [Problem(ProblemKind.DUPLICATED, listed(keys, limit=8), f"fill {name} more than once", file)]
    if filled < wanted:
        missing = listed(absent(name, [target for _, target in sources]), limit=8)
        detail = f"fill only a part of {name}; {missing} not found"
        return [Problem(ProblemKind.PARTIAL, listed(keys, limit=8), detail, file)]
    dtypes = {tensors[key].dtype for key in keys}
    if len(dtypes) > 1 and not all(is_wide_float(dtype) for dtype in dtypes):
        dtype_names = listed(sorted(map(str, dtypes)), limit=8)
        return [
            Problem(ProblemKind.DTYPE, listed(keys, limit=8), f"cannot be one tensor: they are {dtype_names}", file)
        ]
    return []


def _overlap(views: Sequence[View], regions: Sequence[Region]) -> bool:
    """Return True if two views fill the same elements: overlapping contiguous regions, or equal regions."""
    if len(views) == 1:
        return False
    if len({view.steps for view in views}) < len(views):
        return True
    runs = sorted((region.offset, region.offset + math.prod(region.shape)) for region in regions if region.is_block)
    return any(end > start for (_, end), (start, _) in pairwise(runs))


def is_wide_float(dtype: torch.dtype) -> bool:
    """Return True for floating-point dtypes that can be cast to the compute dtype. Others need scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def with_ties(names: Collection[str], tied: Mapping[str, str]) -> set[str]:
    """Return `names`, and the names of own tensors that are tied to one of them."""
    saved_names = {tied.get(name, name) for name in names}
    return saved_names.union(names, (name for name, other in tied.items() if other in saved_names))


def _resolve_ties(result: Match, tied: Mapping[str, str]) -> None:
    """Accept a tied tensor under each of its names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, saved_name in tied.items():
        groups[saved_name].append(name)
    for saved_name, names in groups.items():
        present = [name for name in (saved_name, *names) if name in result.sources]
        if present:
            for name in (saved_name, *names):
                if name not in result.sources:
                    result.copies[name] = present[0]
