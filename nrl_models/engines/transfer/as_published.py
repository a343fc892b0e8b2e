"""Weights as published checkpoints have them, which is what vLLM reads, where transformers saves them otherwise.

transformers reads what is published, but of some models writes other names or orientations, which it reads too. An
export of a model that was loaded from published files has their names; that of a new one has what transformers writes,
and vLLM's loaders have no use for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.errors import EngineError

DOUBLED = ".model.model."
"""Written by transformers where it undoes the renaming of a base model inside another twice."""

TOWER, WRAPPED = "vision_tower.", "vision_model."
"""A vision tower that is wrapped in another module, as published: transformers leaves out the wrapper's name."""

STACKS = {".experts.gate_up_proj": 1, ".experts.down_proj": 2}
"""Stacks of all experts: the dimension of the hidden size in `(experts, in, out)`, as published."""


def as_published(model: torch.nn.Module, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The tensors, each under the name and in the orientation that a model of vLLM reads.

    Args:
        model: vLLM's.
        tensors: by hub name, as exported. Those that are as published already are passed on as they are.

    Raises:
        EngineError: a stack of experts is as wide as it is long, so that nothing tells its orientation.
    """
    modules = dict(model.named_modules())
    hidden = next(filter(None, map(_hidden_size, modules.values())), None)
    wrapped = any(f".{name}.".endswith(f".{TOWER}{WRAPPED}") for name in modules)
    for name, tensor in tensors:
        before, doubled, after = name.partition(DOUBLED)
        published = name
        if doubled and f"{before}.model" in modules and f"{before}.model.model" not in modules:
            published = f"{before}.model.{after}"
        before, tower, after = published.partition(TOWER)
        if tower and wrapped and not after.startswith(WRAPPED):
            published = f"{before}{TOWER}{WRAPPED}{after}"
        yield published, tensor if hidden is None else _oriented(name, tensor, hidden)


def _hidden_size(module: Any) -> int | None:
    """Of experts whose loader takes stacks as `(experts, in, out)`; None of any other module."""
    if not getattr(module, "is_fused_checkpoint_transposed", False):
        return None
    return int(module.moe_config.hidden_dim_unpadded)


def _oriented(name: str, tensor: torch.Tensor, hidden: int) -> torch.Tensor:
    """A stack of experts as `(experts, in, out)`; any other tensor as it is."""
    dimension = next((place for ending, place in STACKS.items() if name.endswith(ending)), None)
    if dimension is None:
        return tensor
    if tensor.shape[1] == tensor.shape[2]:
        raise EngineError(f"{name} of shape {tuple(tensor.shape)} may be (experts, in, out) or (experts, out, in)")
    return tensor if tensor.shape[dimension] == hidden else tensor.transpose(1, 2)
