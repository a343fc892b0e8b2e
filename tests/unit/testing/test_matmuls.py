"""Counting the matmuls of a layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nrl_models.common.projections import CombinedGateUp
from nrl_models.parity.components import Call
from nrl_models.testing.suite.asserts import count_matmuls

SIZE = 8


class Does(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (nn.Linear(SIZE, 3), 1),
        (nn.Linear(SIZE, 3, bias=False), 1),
        (lambda x: x[0] @ x[0].T, 1),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), 1),
        (lambda x: torch.baddbmm(x, x, x), 1),
        (lambda x: torch.einsum("bij,bkj->bik", x, x), 1),
        (nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)), 2),
        (lambda x: F.silu(x) * x + x.sum(), 0),
        (nn.LayerNorm(SIZE), 0),
    ],
)
def test_every_matmul_counts_once(run: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
    assert count_matmuls(Does(run), Call((torch.randn(2, SIZE, SIZE),), {})) == count


def test_group_counts_as_one_matmul() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(SIZE, SIZE) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Combined(CombinedGateUp, MLP):
        pass

    call = Call((torch.randn(2, SIZE),), {})
    assert count_matmuls(MLP(), call) == 3
    assert count_matmuls(Combined(), call) == 2
