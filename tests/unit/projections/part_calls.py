"""Programs of calls and edits of a group's linears, run on plain linears and on a group: outcomes have to be equal.

A forward calls q, k and v, and with three steps q again, with a step before each of the first calls. A step edits what
the calls compute from, or changes how the next call runs. A program is one forward or several, each in a mode, with
edits between them.
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
"""Forwards on one input: of each the steps, how it runs, and what is edited before it, or nothing."""


def within(context: Callable[[], Any]) -> Call:
    def call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with context():
            return module(x)

    return call


_THREADS = ThreadPoolExecutor(2)  # a call of a forward that is in a thread itself


def in_a_thread(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In another thread, in which gradients are on."""
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
"""How a linear is called."""


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
"""What is edited between two calls. `weight.data.mul_()` there is documented to come too late (docs/training.md)."""


def edit_through_data(module: Attention, x: torch.Tensor) -> None:
    module.k_proj.weight.data.mul_(1.5)


BETWEEN: dict[str, Callable[[Attention, torch.Tensor], None]] = EDITS | {"through data": edit_through_data}
"""What is edited between two forwards."""

AROUND: dict[str, Call] = {"grad": within(nullcontext)} | CALLS
"""How a whole forward runs."""

PARTS: Sequence[str] = ("q_proj", "k_proj", "v_proj", "q_proj")


class Interpreted(Attention):
    """Its forward is a program."""

    steps: Sequence[str] = ()

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        outputs = []
        # What is called once more leaves the others' outputs behind, and a group that does so is not used again.
        parts = PARTS if len(self.steps) > 2 else PARTS[:3]
        for name, step in zip_longest(parts, self.steps, fillvalue=""):
            if step in EDITS:
                EDITS[step](self, x)
            outputs.append(CALLS.get(step, within(nullcontext))(getattr(self, name), x).float())
        return torch.cat(outputs, dim=-1)


class CombinedInterpreted(CombinedAttention, Interpreted):
    """The same with a group."""


def modules() -> tuple[Interpreted, CombinedInterpreted]:
    """The two, with the same weights."""
    torch.manual_seed(0)
    plain = Interpreted()
    return plain, combined_from(plain, CombinedInterpreted)


INPUT = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def outcome(module: Interpreted, program: Program) -> list[Any]:
    """What a program leads to: of each forward output and gradients, or the type of the error; it changes `module`."""
    found: list[Any] = []
    leaf = INPUT.clone().requires_grad_()
    for steps, around, edited in program:
        module.steps = steps
        try:
            # Not the leaf, which must not be edited. In inference mode the input is made there, as a model's is.
            with torch.inference_mode(around == "inference"):
                x = leaf * 1.0
            if edited:
                BETWEEN[edited](module, x)
            output = AROUND[around](module, x)
            found.append(output.detach().clone())
            module.zero_grad()
            leaf.grad = None
            if output.requires_grad:
                output.square().sum().backward()
            found.append({name: parameter.grad for name, parameter in module.named_parameters()} | {"x": leaf.grad})
        except RuntimeError as error:  # torch's, of what cannot be computed so
            found.append(type(error))
    return found


def same(mine: Any, other: Any, tolerance: float = 2e-5) -> bool:
    """Whether two outcomes are equal, but for rounding."""
    if isinstance(other, torch.Tensor):
        if not isinstance(mine, torch.Tensor) or mine.dtype != other.dtype or mine.shape != other.shape:
            return False
        bound = tolerance * max(1.0, other.abs().max().item())
        return bool((mine - other).abs().max() <= bound)  # false for NaN
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
    """Whether a program leads to something else on a group than on plain linears."""
    plain, combined = modules()
    expected, actual = outcome(plain, program), outcome(combined, program)
    # bfloat16 rounds the gradients of three products each, and that of one product once.
    return not same(actual, expected, 2e-2 if "autocast" in str(program) else 2e-5)
