"""A sharded model's own account of itself: which blocks of which Hugging Face tensors this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.blocks import Block, through
from nrl_models.common.state_dict_adapter import StateDictAdapter
from nrl_models.common.views import HFTensor

if TYPE_CHECKING:
    from nrl_models.distributed.plan import ParallelPlan


class Sharding:
    """How a model is sharded. Kept on the model as `model.sharding`.

    Args:
        mesh: over which.
        plan: by which.

    Attributes:
        adapter: the model's adapter. Its tables speak of whole tensors: of what `DTensor.full_tensor()` gives.
    """

    adapter: StateDictAdapter

    def __init__(self, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        self.mesh, self.plan = mesh, plan

    def __deepcopy__(self, memo: dict[int, object]) -> Sharding:
        return self

    def finish(self, model: PreTrainedModel) -> None:
        """Take note of the model's tensors. Before `fsdp`, which changes the names of classes."""
        self.adapter = StateDictAdapter(model)
        model.sharding = self

    def own_tensors(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's own tensors, detached: DTensors, and buffers as they are."""
        return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def own_block(tensor: torch.Tensor) -> Block:
    """This rank's block of one of the model's own tensors: all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.ndim, tensor)
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    return Block(tuple(chunk.offsets) if local.numel() else (0,) * tensor.ndim, local)


def blocks_of(tensor: HFTensor, own: Mapping[str, torch.Tensor]) -> list[Block]:
    """This rank's blocks of a Hugging Face tensor, over the memory of the model's own tensors."""
    result = []
    for piece in tensor.pieces:
        whole = own[piece.view.parameter]
        for block in through(piece.view.steps, whole.shape, own_block(whole)):
            offset = list(block.offset)
            for method, args in piece.region:
                assert method == "narrow", f"{tensor.name}: {method} in a region"
                offset[args[0]] += args[1]
            result.append(Block(tuple(offset), block.tensor))
    return result


def divided_over(tensor: HFTensor, own: Mapping[str, torch.Tensor]) -> set[int]:
    """The mesh dimensions, by number, over which the ranks' blocks of a Hugging Face tensor differ."""
    dims: set[int] = set()
    for name in tensor.parameters:
        if isinstance(whole := own[name], DTensor):
            dims |= {dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate()}
    return dims
