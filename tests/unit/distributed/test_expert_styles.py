"""Experts of one rank take the arguments of every architecture's stack of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from nrl_models.distributed.tensor.styles import ExpertsOfThisRank

HIDDEN = torch.arange(12.0).reshape(3, 4)
CHOSEN = torch.tensor([[0, 2], [1, 0], [3, 1]])
WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])


class Stack(nn.Module):
    """Experts that multiply by their number plus one."""

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        return hidden_states * ((top_k_index + 1) * top_k_weights).sum(-1, keepdim=True)


class Reordered(Stack):
    def forward(self, hidden_states: Any, routing_weights: Any, selected_experts: Any) -> torch.Tensor:
        return super().forward(hidden_states, selected_experts, routing_weights)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.device_mesh.DeviceMesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stack", "args", "kwargs"),
    [
        (Stack, (CHOSEN, WEIGHTS), {}),
        (Stack, (CHOSEN,), {"top_k_weights": WEIGHTS}),
        (Stack, (), {"top_k_weights": WEIGHTS, "top_k_index": CHOSEN}),
        (Reordered, (WEIGHTS, CHOSEN), {}),
        (Reordered, (), {"selected_experts": CHOSEN, "routing_weights": WEIGHTS}),
    ],
)
def test_arguments_of_experts_keep_position_and_name(
    mesh: dist.device_mesh.DeviceMesh, stack: type[nn.Module], args: Any, kwargs: Any
) -> None:
    experts: Any = type("Divided", (ExpertsOfThisRank, stack), {})()
    experts.ep_mesh, experts.first_expert, experts.num_experts = mesh, 0, 4
    torch.testing.assert_close(experts(HIDDEN, *args, **kwargs), stack()(HIDDEN, *args, **kwargs))
