"""Section `determinism`: the same steps twice from the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import SEPARATE, config_of, contender, random_tokens
from benchmarks.gpu.outcomes import CheckError
from benchmarks.gpu.policy_step import draw, packed
from benchmarks.reporting import Row

STEPS = 3

Result = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and tensors by name."""


def cases(context: Context) -> dict[str, Case]:
    """Return a case per workload."""
    workloads: dict[str, Callable[[], Result]] = {
        f"{STEPS} AdamW steps, Llama 1B": partial(_training, "Llama 1B", context),
        f"{STEPS} AdamW steps, Qwen3-MoE 30B-A3B": partial(_training, "Qwen3-MoE 30B-A3B", context),
        "rollout_logprobs, Llama 1B": partial(_policy, "Llama 1B", context),
    }
    return {name: partial(_compare, name, run) for name, run in workloads.items()}


def _compare(name: str, run: Callable[[], Result]) -> list[Row]:
    rows: list[Row] = []
    differs = ""
    for mode in ("default", "deterministic"):
        with _deterministic(mode == "deterministic"):
            (losses, tensors), (again, tensors_again) = run(), run()
        changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, tensors_again[name])]
        rows.append(
            {
                "workload": name,
                "mode": mode,
                "same losses": "yes" if losses == again else "no",
                "tensors": len(tensors),
                "tensors that differ": len(changed),
            }
        )
        if mode == "deterministic" and (losses != again or changed):
            differs = f"losses {losses} and {again}, {len(changed)} of {len(tensors)} tensors differ: expected equal"
    if differs:
        raise CheckError(differs, rows)
    return rows


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _model(shape: str, context: Context) -> Any:
    config = config_of(shape, context, bytes_per_parameter=3 * 6)  # one model, and the tensors of two runs
    config.num_hidden_layers = min(config.num_hidden_layers, 4)
    return contender(SEPARATE, config, context).train()


def _training(shape: str, context: Context) -> Result:
    """Return losses of some training steps, and the weights after them."""
    model = _model(shape, context)
    tokens = random_tokens(model.config, context, 2, 32 if context.tiny else 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _policy(shape: str, context: Context) -> Result:
    """Return the loss of a packed RL step, and its gradients."""
    model = _model(shape, context)
    loss = packed(model, draw(model, model.config.vocab_size, context))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return [loss.item()], gradients
