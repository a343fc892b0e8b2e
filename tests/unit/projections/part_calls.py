"""Programs that call and edit a group's linears. They run on separate linears and on a group, with equal outcomes.

A forward calls q, k and v, and with three steps q again, with a step before each of the first calls. A step edits the
inputs or weights of the calls, or changes how the next call runs. A program is one forward or several, each in a mode,
with edits between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from toy_attention import HIDDEN, Attention, CombinedAttention, combined_from

Call = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
Program = Sequence[tuple[Sequence[str], str, str]]
"""One forward per entry, on one input: its steps, its mode, and the edit before it, or an empty string."""


def within(context: Callable[[], Any]) -> Call:
    def call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with context():
            return module(x)

    return call


_THREADS = ThreadPoolExecutor(2)  # a forward in a thread calls a linear in another thread


def in_a_thread(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run in another thread, in which gradients are enabled."""
    return _THREADS.submit(module, x).result()


CALLS: dict[str, Call] = {
    "no_grad": within(torch.no_grad),
    "enable_grad": within(torch.enable_grad),
    "inference": within(torch.inference_mode),
    "autocast": within(partial(torch.autocast, "cpu", torch.bfloat16)),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "re-entrant checkpoint": partial(checkpoint, use_reentrant=True),
    "thread": in_a_thread,
}
"""Ways to call a linear."""


@torch.no_grad()
def edit_input(module: Attention, x: torch.Tensor) -> None:
    x.mul_(1.5)


@torch.no_grad()
def edit_weight(module: Attention, x: torch.Tensor) -> None:
    module.k_proj.weight.mul_(1.5)


@torch.no_grad()
def edit_bias(module: Attention, x: torch.Tensor) -> None:
    module.v_proj.bias.add_(1.0)


def replace_data(module: Attention, x: torch.Tensor) -> None:
    module.v_proj.weight.data = module.v_proj.weight.data * 1.5


def replace_parameter(module: Attention, x: torch.Tensor) -> None:
    module.k_proj.weight = torch.nn.Parameter(module.k_proj.weight.detach() * 1.5)


def freeze(module: Attention, x: torch.Tensor) -> None:
    module.q_proj.weight.requires_grad_(not module.q_proj.weight.requires_grad)


EDITS: dict[str, Callable[[Attention, torch.Tensor], None]] = {
    "input": edit_input,
    "weight": edit_weight,
    "bias": edit_bias,
    "data": replace_data,
    "parameter": replace_parameter,
    "frozen": freeze,
}
"""Edits between two calls. `weight.data.mul_()` is documented to have no effect there (docs/training.md)."""


def edit_through_data(module: Attention, x: torch.Tensor) -> None:
    module.k_proj.weight.data.mul_(1.5)


BETWEEN: dict[str, Callable[[Attention, torch.Tensor], None]] = EDITS | {"through data": edit_through_data}
"""Edits between two forwards."""

AROUND: dict[str, Call] = {"grad": within(nullcontext)} | CALLS
"""Ways to run a complete forward."""

PARTS: Sequence[str] = ("q_proj", "k_proj", "v_proj", "q_proj")


class Interpreted(Attention):
    """An attention whose forward runs a program."""

    steps: Sequence[str] = ()

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        outputs = []
        # Calling a linear again leaves outputs of the others unused, which disables the group afterwards.
        parts = PARTS if len(self.steps) > 2 else PARTS[:3]
        for name, step in zip_longest(parts, self.steps, fillvalue=""):
            if step in EDITS:
                EDITS[step](self, x)
            outputs.append(CALLS.get(step, within(nullcontext))(getattr(self, name), x).float())
        return torch.cat(outputs, dim=-1)


class CombinedInterpreted(CombinedAttention, Interpreted):
    """`Interpreted` with a group."""


def modules() -> tuple[Interpreted, CombinedInterpreted]:
    """Create both attentions with the same weights."""
    torch.manual_seed(0)
    plain = Interpreted()
    return plain, combined_from(plain, CombinedInterpreted)


INPUT = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def outcome(module: Interpreted, program: Program) -> list[Any]:
    """Run a program. Returns output and gradients of each forward, or the type of its error. Changes `module`."""
    results: list[Any] = []
    leaf = INPUT.clone().requires_grad_()
    for steps, around, edited in program:
        module.steps = steps
        try:
            # Edit a copy, because the leaf must not change. In inference mode the input is created inside, as in a
            # model.
            with torch.inference_mode(around == "inference"):
                x = leaf * 1.0
            if edited:
                BETWEEN[edited](module, x)
            output = AROUND[around](module, x)
            results.append(output.detach().clone())
            module.zero_grad()
            leaf.grad = None
            if output.requires_grad:
                output.square().sum().backward()
            results.append({name: parameter.grad for name, parameter in module.named_parameters()} | {"x": leaf.grad})
        except RuntimeError as error:  # raised by torch for unsupported combinations
            results.append(type(error))
    return results


def same(mine: Any, other: Any, tolerance: float = 2e-5) -> bool:
    """Return True if two outcomes are equal up to rounding."""
    if isinstance(other, torch.Tensor):
        if not isinstance(mine, torch.Tensor) or mine.dtype != other.dtype or mine.shape != other.shape:
            return False
        bound = tolerance * max(1.0, other.abs().max().item())
        return bool((mine - other).abs().max() <= bound)  # False for NaN
    if isinstance(other, dict):
        return (
            isinstance(mine, dict)
            and mine.keys() == other.keys()
            and all(same(mine[name], value, tolerance) for name, value in other.items())
        )
    if isinstance(other, list):
        return len(mine) == len(other) and all(map(partial(same, tolerance=tolerance), mine, other))
    return mine is other


def differs(program: Program) -> bool:
    """Return True if the outcome of a program differs between a group and separate linears."""
    plain, combined = modules()
    expected, actual = outcome(plain, program), outcome(combined, program)
    # bfloat16 rounds the gradients of three separate matmuls once each, and that of a fused matmul once.
    return not same(actual, expected, 2e-2 if "autocast" in str(program) else 2e-5)
