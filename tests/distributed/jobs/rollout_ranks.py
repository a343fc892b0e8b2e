"""Compare a batch of rollouts, with different numbers per rank, with one process that has all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from jobs.equality import whole_gradients
from jobs.setting import case_of, full, mesh_of
from nrl_models.distributed import parallelize
from nrl_models.logprobs import TokenLogprobs, rollout_logprobs, token_logprobs
from nrl_models.losses import Normalize, token_weights

LONGEST = 20
"""Length for `Normalize.LONGEST`."""


def sequences_of(lengths: Sequence[int], rank: int) -> list[torch.Tensor]:
    """Return a rank's sequences."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(16, 480, (length,), generator=generator) for length in lengths]


def equals_one_process(
    architecture: str, lengths: Sequence[Sequence[int]], normalize: Normalize, together: bool, row_tokens: int
) -> dict[str, Any]:
    """Return the differences of loss and gradients to one process, and this rank's number of forward passes.

    Args:
        architecture: Architecture of the model, sharded by FSDP2 over as many ranks as there are `lengths`.
        lengths: Lengths of each rank's sequences.
        normalize: Normalization of the loss.
        together: Whether the loss also has a term that depends on all log-probabilities of a rank.
        row_tokens: Tokens per row.
    """
    rank, case = dist.get_rank(), case_of(architecture)
    longest = LONGEST if normalize is Normalize.LONGEST else None
    alone = copy.deepcopy(case.model())
    expected = _expected(alone, [sequences_of(own, number) for number, own in enumerate(lengths)], normalize, together)
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    model = parallelize(copy.deepcopy(case.model()), mesh_of(fsdp=len(lengths)))

    own = sequences_of(lengths[rank], rank)
    there = torch.zeros(len(own), max(map(len, own), default=0), dtype=torch.bool)
    for row, sequence in zip(there, own, strict=True):
        row[1 : len(sequence)] = True
    weights = token_weights(there, normalize, longest)

    def loss(found: TokenLogprobs) -> torch.Tensor:
        assert found.logprobs.shape == there.shape
        extra = (found.logprobs.sum() / 100).exp() if together else 0.0
        return (found.logprobs.square() * weights).sum() + extra

    passes: list[None] = []
    rollout_logprobs(model, own[:1])  # the first call also compares the head
    with_hook = model.register_forward_pre_hook(lambda *_: passes.append(None))
    found = rollout_logprobs(model, own, loss=loss, row_tokens=row_tokens)
    with_hook.remove()
    assert found.loss is not None
    total = found.loss.clone()
    dist.all_reduce(total)
    actual, wanted = whole_gradients(model), alone.state_dict_adapter.to_hf(gradients)
    assert sorted(actual) == sorted(wanted)
    return {
        "loss": abs(float(total) / len(lengths) - expected),
        "gradients": max(float((actual[name] - wanted[name]).abs().max()) for name in wanted)
        / max(float(gradient.abs().max()) for gradient in wanted.values()),
        "passes": len(passes),
    }


def _expected(model: Any, batches: list[list[torch.Tensor]], normalize: Normalize, together: bool) -> float:
    """Compute the loss of all sequences by its definition, and its gradients."""
    squares, extra = [], torch.zeros(())
    for own in batches:
        logprobs = [token_logprobs(model, row[None], chunk_size=None).logprobs[0, 1:] for row in own]
        squares += [row.square() for row in logprobs]
        if together and logprobs:
            extra = extra + (torch.cat(logprobs).sum() / 100).exp()
    loss = {
        Normalize.TOKEN: lambda: torch.cat(squares).mean(),
        Normalize.SEQUENCE: lambda: torch.stack([row.sum() / max(1, len(row)) for row in squares]).mean(),
        Normalize.LONGEST: lambda: torch.cat(squares).sum() / (len(squares) * LONGEST),
    }[normalize]() + extra / len(batches)
    loss.backward()
    return loss.item()


def values_alone(architecture: str, lengths: Sequence[Sequence[int]]) -> int:
    """Compare log-probabilities with one process, without a loss. Returns this rank's number of forward passes."""
    rank, case = dist.get_rank(), case_of(architecture)
    own = sequences_of(lengths[rank], rank)
    model = parallelize(copy.deepcopy(case.model()), mesh_of(fsdp=len(lengths)))
    rollout_logprobs(model, own[:1])
    passes: list[None] = []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    found = rollout_logprobs(model, own, row_tokens=32)
    for row, sequence in zip(found.logprobs, own, strict=True):
        alone = token_logprobs(case.model(), sequence[None]).logprobs[0]
        torch.testing.assert_close(row[: len(sequence)], alone.detach(), rtol=0, atol=1e-5)
    return len(passes)


def root_alone(frees: bool) -> float:
    """Return the gradient difference to one process if torch's `fully_shard` has a single unit with all weights.

    Args:
        frees: Whether the unit reshards after the forward. torch does not by default for the root.
    """
    case, rows = case_of("LlamaForCausalLM"), [sequences_of((12,), rank)[0][None] for rank in range(2)]
    alone = copy.deepcopy(case.model())
    torch.stack([token_logprobs(alone, row, chunk_size=None).logprobs.square().sum() for row in rows]).mean().backward()
    model = copy.deepcopy(case.model())
    fully_shard(model, mesh=mesh_of(fsdp=2), reshard_after_forward=frees)
    token_logprobs(model, rows[dist.get_rank()]).logprobs.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    sharded = dict(model.named_parameters())
    apart = {name: (full(sharded[name].grad) - gradient).abs().max() for name, gradient in wanted.items()}
    return float(max(apart.values()) / max(gradient.abs().max() for gradient in wanted.values()))


def refused(lengths: Sequence[Sequence[int]]) -> None:
    """Run with invalid sequences on one rank."""
    rollout_logprobs(case_of("LlamaForCausalLM").model(), sequences_of(lengths[dist.get_rank()], 0), row_tokens=32)
