"""Compare a batch of rollouts, with different numbers per rank, with one process that has all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from jobs.equality import full_gradients
from jobs.setting import case_of, full, mesh_of
from nrl_models.distributed import parallelize
from nrl_models.logprobs import TokenLogprobs, rollout_logprobs, token_logprobs
from nrl_models.losses import Normalize, token_weights

MAX_LENGTH = 20
"""Maximum length for `Normalize.LONGEST`."""


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
    longest = MAX_LENGTH if normalize is Normalize.LONGEST else None
    unsharded = copy.deepcopy(case.model())
    expected = _expected(
        unsharded,
        [sequences_of(rank_lengths, number) for number, rank_lengths in enumerate(lengths)],
        normalize,
        together,
    )
    gradients = {name: parameter.grad for name, parameter in unsharded.named_parameters()}
    model = parallelize(copy.deepcopy(case.model()), mesh_of(fsdp=len(lengths)))

    sequences = sequences_of(lengths[rank], rank)
    mask = torch.zeros(len(sequences), max(map(len, sequences), default=0), dtype=torch.bool)
    for row, sequence in zip(mask, sequences, strict=True):
        row[1 : len(sequence)] = True
    weights = token_weights(mask, normalize, longest)

    def loss(logprobs: TokenLogprobs) -> torch.Tensor:
        assert logprobs.logprobs.shape == mask.shape
        extra = (logprobs.logprobs.sum() / 100).exp() if together else 0.0
        return (logprobs.logprobs.square() * weights).sum() + extra

    passes: list[None] = []
    rollout_logprobs(model, sequences[:1])  # the first call also compares the head
    with_hook = model.register_forward_pre_hook(lambda *_: passes.append(None))
    result = rollout_logprobs(model, sequences, loss=loss, row_tokens=row_tokens)
    with_hook.remove()
    assert result.loss is not None
    total = result.loss.clone()
    dist.all_reduce(total)
    actual, wanted = full_gradients(model), unsharded.state_dict_adapter.to_hf(gradients)
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
    for sequences in batches:
        logprobs = [token_logprobs(model, row[None], chunk_size=None).logprobs[0, 1:] for row in sequences]
        squares += [row.square() for row in logprobs]
        if together and logprobs:
            extra = extra + (torch.cat(logprobs).sum() / 100).exp()
    loss = {
        Normalize.TOKEN: lambda: torch.cat(squares).mean(),
        Normalize.SEQUENCE: lambda: torch.stack([row.sum() / max(1, len(row)) for row in squares]).mean(),
        Normalize.LONGEST: lambda: torch.cat(squares).sum() / (len(squares) * MAX_LENGTH),
    }[normalize]() + extra / len(batches)
    loss.backward()
    return loss.item()


def compares_logprobs(architecture: str, lengths: Sequence[Sequence[int]]) -> int:
    """Compare log-probabilities with one process, without a loss. Returns this rank's number of forward passes."""
    rank, case = dist.get_rank(), case_of(architecture)
    sequences = sequences_of(lengths[rank], rank)
    model = parallelize(copy.deepcopy(case.model()), mesh_of(fsdp=len(lengths)))
    rollout_logprobs(model, sequences[:1])
    passes: list[None] = []
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    result = rollout_logprobs(model, sequences, row_tokens=32)
    for row, sequence in zip(result.logprobs, sequences, strict=True):
        unsharded = token_logprobs(case.model(), sequence[None]).logprobs[0]
        torch.testing.assert_close(row[: len(sequence)], unsharded.detach(), rtol=0, atol=1e-5)
    return len(passes)


def single_fsdp_unit(reshards: bool) -> float:
    """Return the gradient difference to one process if torch's `fully_shard` has a single unit with all weights.

    Args:
        reshards: Whether the unit reshards after the forward. torch does not by default for the root.
    """
    case, rows = case_of("LlamaForCausalLM"), [sequences_of((12,), rank)[0][None] for rank in range(2)]
    unsharded = copy.deepcopy(case.model())
    torch.stack(
        [token_logprobs(unsharded, row, chunk_size=None).logprobs.square().sum() for row in rows]
    ).mean().backward()
    model = copy.deepcopy(case.model())
    fully_shard(model, mesh=mesh_of(fsdp=2), reshard_after_forward=reshards)
    token_logprobs(model, rows[dist.get_rank()]).logprobs.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in unsharded.named_parameters()}
    sharded = dict(model.named_parameters())
    differences = {name: (full(sharded[name].grad) - gradient).abs().max() for name, gradient in wanted.items()}
    return float(max(differences.values()) / max(gradient.abs().max() for gradient in wanted.values()))


def runs_invalid_sequences(lengths: Sequence[Sequence[int]]) -> None:
    """Run with invalid sequences on one rank."""
    rollout_logprobs(case_of("LlamaForCausalLM").model(), sequences_of(lengths[dist.get_rank()], 0), row_tokens=32)
