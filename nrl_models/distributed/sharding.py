"""What a sharded model knows about its sharding: mesh, plan, and which Hugging Face tensors this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.state_dict.adapter import Layout, StateDictAdapter
from nrl_models.common.state_dict.views import HFTensor
from nrl_models.distributed.parallel_plan import ParallelPlan
from nrl_models.distributed.shards import DEFAULT_BUCKET, blocks_of, gathered


class Sharding:
    """How a model is sharded. Kept on the model as `model.sharding`.

    Args:
        mesh: over which.
        plan: by which.

    Attributes:
        adapter: the model's adapter. Its tables describe whole tensors: what `DTensor.full_tensor()` gives.
        loaded_bytes: how much of the checkpoint's tensors this rank read, if the model was loaded sharded.
    """

    adapter: StateDictAdapter
    loaded_bytes: int = 0

    def __init__(self, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        self.mesh, self.plan = mesh, plan

    def __deepcopy__(self, memo: dict[int, object]) -> Sharding:
        return self

    def finish(self, model: PreTrainedModel) -> None:
        """Record the model's tensors. Call it before `fsdp` is applied, which renames classes."""
        self.adapter = StateDictAdapter(model)
        cast(Any, model).sharding = self
        model.register_load_state_dict_pre_hook(_fill_shards)

    def hf_views(self, model: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
        """Live Hugging Face tensors as DTensors, see `StateDictAdapter.hf_views`."""
        own = model.state_dict()
        # No placement describes a region of a parameter, or a parameter that is packed over ranks.
        return {
            name: own[tensor.view.parameter]
            for name, tensor in self.adapter.layout(layout).items()
            if tensor.view is not None and not tensor.view.steps and tensor.view.parameter not in self.adapter.tied
        }

    def iter_export(
        self, model: nn.Module, exported: Mapping[str, HFTensor], max_bytes: int | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, bucket by bucket, see `StateDictAdapter.iter_export`."""
        yield from gathered(model.state_dict(), exported, self.mesh, max_bytes or DEFAULT_BUCKET)


def sharding_of(model: nn.Module) -> Sharding:
    """How a sharded model is sharded."""
    return cast(Sharding, model.sharding)


def _fill_shards(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors in a state dict that is about to be loaded by DTensors with this rank's shards of them.

    Nothing is communicated. What does not fit stays as it is, and torch reports it.
    """
    sharding = sharding_of(model)
    own = model.state_dict()
    for name, target in sharding.adapter.transformers.items():
        value, whole = state_dict.get(prefix + name), own[name]
        if not isinstance(whole, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == whole.shape:
            shard = torch.empty_like(whole, dtype=value.dtype)
            for block in blocks_of(target, {name: shard}):
                block.take_from(value)
            state_dict[prefix + name] = shard
