"""Convert exported weights to the names and orientations of published checkpoints, which vLLM's loaders expect.

For some models, transformers reads several names or orientations of a tensor and saves a form that differs from the
published one. The export of a model that was loaded from published files has the published names. The export of a new
model has the form that transformers saves, which vLLM cannot load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.errors import EngineError

DOUBLED = ".model.model."
"""Part of names that transformers writes if it reverts the renaming of a nested base model twice."""

TOWER, WRAPPED = "vision_tower.", "vision_model."
"""A vision tower that is wrapped in another module, as published: transformers leaves out the wrapper's name."""

STACKS = {".experts.gate_up_proj": 1, ".experts.down_proj": 2}
"""Stacks of all experts: the dimension of the hidden size in `(experts, in, out)`, as published."""


def as_published(model: torch.nn.Module, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield each tensor under the name and in the orientation that vLLM's model reads.

    Args:
        model: vLLM's model.
        tensors: Exported pairs of hub name and tensor. Tensors that already have the published form do not change.

    Raises:
        EngineError: If a stack of experts is square, so that its orientation is unknown.
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
    """Return the hidden size if experts are loaded from stacks `(experts, in, out)`; None for other modules."""
    if not getattr(module, "is_fused_checkpoint_transposed", False):
        return None
    return int(module.moe_config.hidden_dim_unpadded)


def _oriented(name: str, tensor: torch.Tensor, hidden: int) -> torch.Tensor:
    """Return a stack of experts as `(experts, in, out)`; other tensors are unchanged."""
    dimension = next((dim for ending, dim in STACKS.items() if name.endswith(ending)), None)
    if dimension is None:
        return tensor
    if tensor.shape[1] == tensor.shape[2]:
        raise EngineError(f"{name} of shape {tuple(tensor.shape)} may be (experts, in, out) or (experts, out, in)")
    return tensor if tensor.shape[dimension] == hidden else tensor.transpose(1, 2)
