"""An attention whose output shows an error in any linear, without and with a group, and its forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from nrl_models.common.projections import CombinedQKV
from nrl_models.parity.components import Call
from nrl_models.testing.suite.asserts import count_matmuls

HIDDEN, Q, KV = 16, 12, 4
PARTS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """An attention that reads one input three times and mixes the results."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, Q, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.o_proj = nn.Linear(Q + 2 * KV, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        parts = self.q_proj(x), self.k_proj(memory).cos(), self.v_proj(memory).sin()
        return self.o_proj(torch.cat(parts, dim=-1))


class CombinedAttention(CombinedQKV, Attention):
    """The same attention with a group, `qkv_proj`."""


def combined_from(plain: nn.Module, cls: type[Any] = CombinedAttention) -> Any:
    """Copy `plain`, and convert it to `cls` as a model converts its layers."""
    module = copy.deepcopy(plain)
    module.__class__ = cls
    module.combine_projections()
    return module


def inputs(*shape: int) -> torch.Tensor:
    """Return random numbers, the same on every call."""
    return torch.randn(*(shape or (2, 3)), HIDDEN, generator=torch.Generator().manual_seed(1))


def outcome(module: nn.Module, x: torch.Tensor, *args: Any) -> dict[str, Any]:
    """Return output and gradients of a forward and backward pass."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    output = module(x, *args)
    output.float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **gradients}


def assert_same(plain: nn.Module, combined: nn.Module, x: torch.Tensor, *args: Any) -> None:
    """Check that both modules give the same output and gradients."""
    tolerances = {} if x.dtype in (torch.float32, torch.float64) else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(outcome(combined, x, *args), outcome(plain, x, *args), **tolerances)


def matmuls(module: nn.Module) -> int:
    """Return the number of matmuls in a forward of `module`: 4 with separate linears, 2 with a group."""
    dtype = next(module.parameters()).dtype
    return count_matmuls(module, Call((inputs().to(dtype),), {}))
