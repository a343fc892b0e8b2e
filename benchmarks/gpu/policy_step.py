"""Section `rl`: the loss step of RL against TRL's math.

The loss is the clipped policy loss of DAPO and TRL's `loss_type="dapo"`: a sum over completion tokens, divided by
their number in the batch. Old log-probabilities differ from the current ones, so that some ratios are clipped.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import (
    SEPARATE,
    UPSTREAM,
    alternate,
    config_of,
    contenders,
    labeled,
    ratio,
)
from benchmarks.gpu.outcomes import CheckError
from benchmarks.reporting import Row
from benchmarks.rl_step import selective_log_softmax
from benchmarks.train_step import Peak
from nrl_models.logprobs import TokenLogprobs, rollout_logprobs, token_logprobs
from nrl_models.losses import policy_loss, token_weights

EPSILON = 0.2
"""Distance of the clip bounds from 1."""

TRL, TRL_AGAIN = "TRL's math", "TRL's math, again"

GROUP = 8
"""Number of rollouts per prompt in the cases with shared prompts, as in GRPO."""

LARGE_MEMORY = 60e9
"""Bytes of a GPU that holds the activations of 8 rollouts at once. Smaller GPUs run 2."""


@dataclass(eq=False)
class Rollouts:
    """A padded batch of rollouts.

    Args:
        ids: `(rollouts, longest)` token IDs, padded on the right.
        mask: `(rollouts, longest)` bool, True for tokens.
        prompt: Length of every prompt.
        old: `(rollouts, longest)` old log-probabilities.
        advantages: `(rollouts,)`.
        batch: Number of rollouts in one forward of a padded way.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    prompt: int
    old: torch.Tensor
    advantages: torch.Tensor
    batch: int

    @property
    def completion(self) -> torch.Tensor:
        """`(rollouts, longest)` bool, True for tokens of completions."""
        return self.mask & (torch.arange(self.ids.shape[1], device=self.ids.device) >= self.prompt)

    def batches(self) -> list[slice]:
        """Return the rows of each forward of a padded way."""
        return [slice(row, row + self.batch) for row in range(0, len(self.ids), self.batch)]


def cases(context: Context) -> dict[str, Case]:
    """Return a case per shape."""
    shapes = ("Llama 1B",) if context.tiny else ("Llama 1B", "Qwen3-MoE 30B-A3B")
    return {
        f"{shape}{_prompts(group)}": partial(_compare, shape, context, group)
        for shape in shapes
        for group in (None, GROUP)
    }


def _prompts(group: int | None) -> str:
    return ", shared prompts" if group else ""


def _compare(shape: str, context: Context, group: int | None = None) -> list[Row]:
    config = config_of(shape, context, bytes_per_parameter=2 * (2 + 2))
    models = contenders((UPSTREAM, SEPARATE), config, context)
    rollouts = draw(models[UPSTREAM], config.vocab_size, context, group)
    steps: dict[str, tuple[Step, Any]] = {
        TRL: (padded, models[UPSTREAM]),
        TRL_AGAIN: (padded, models[UPSTREAM]),
        "token_logprobs, padded": (token_wise, models[SEPARATE]),
        "rollout_logprobs, packed": (packed, models[SEPARATE]),
    }
    if find_spec("liger_kernel"):
        steps["Liger's loss, padded"] = (partial(liger, compiled=not context.tiny), models[UPSTREAM])
    for model in models.values():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    memory: dict[str, int] = {}
    results: dict[str, tuple[float, float]] = {}

    def run(name: str) -> None:
        step, model = steps[name]
        model.zero_grad(set_to_none=False)
        with Peak() as peak:
            results[name] = step(model, rollouts).item(), 0.0
        memory[name] = max(memory.get(name, 0), peak.rise)

    gc.collect()
    turns = 2 if context.tiny else 5
    seconds = alternate({name: partial(run, name) for name in steps}, context.device, turns, warm_up=1)
    for name, (_, model) in steps.items():  # once more, because two ways share a model's gradients
        run(name)
        results[name] = results[name][0], gradient_norm(model)
    tokens = int(rollouts.mask.sum())
    rows: list[Row] = [
        {
            "shape": labeled(shape, config) + _prompts(group),
            "way": way,
            "rollouts": len(rollouts.ids),
            "tokens": tokens,
            "seconds": median(seconds[way]),
            "tokens/s": tokens / median(seconds[way]),
            "time / TRL": ratio(seconds, way, TRL),
            "memory, GB": memory[way] / 1e9,
            "memory / TRL": memory[way] / memory[TRL] if memory[TRL] else "",
            "loss": results[way][0],
            "gradient norm": results[way][1],
        }
        for way in steps
    ]
    _check(results, rows, context)
    return rows


def _check(results: dict[str, tuple[float, float]], rows: list[Row], context: Context) -> None:
    """Compare losses and gradient norms with those of TRL's math."""
    absolute, relative = (1e-5, 1e-3) if context.dtype == torch.float32 else (1e-2, 5e-2)
    loss, norm = results[TRL]
    for name, (own_loss, own_norm) in results.items():
        if not (abs(own_loss - loss) <= absolute and abs(own_norm - norm) <= relative * norm):
            raise CheckError(
                f"{name}: loss {own_loss:.6g} and gradient norm {own_norm:.6g}, expected {loss:.6g} and {norm:.6g} "
                f"within {absolute:g} and {relative:.1%}",
                rows,
            )


def gradient_norm(model: Any) -> float:
    """Return the norm of all gradients, accumulated in fp32."""
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) for parameter in model.parameters()]
    return torch.stack(norms).norm().item()


@torch.no_grad()
def draw(model: Any, vocabulary: int, context: Context, group: int | None = None) -> Rollouts:
    """Draw rollouts with log-normal completion lengths, and old log-probabilities near the model's own.

    Args:
        model: Model of transformers that computes the old log-probabilities.
        vocabulary: Number of token IDs.
        context: Device, and whether to draw few short rollouts.
        group: Number of rollouts that begin with the same prompt. If None, all prompts differ.
    """
    count, prompt, middle, longest = (6, 8, 10, 40) if context.tiny else (32, 256, 400, 1024)
    if group:
        count, prompt, middle, longest = (2 * group, 16, 10, 40) if context.tiny else (4 * group, 512, 128, 256)
    draws = random.Random(0)
    lengths = [prompt + min(longest, max(2, round(draws.lognormvariate(math.log(middle), 0.7)))) for _ in range(count)]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    for row, sequence in enumerate(sequences):
        if group:
            sequence[:prompt] = sequences[row - row % group][:prompt]
    ids = pad_sequence(sequences, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    noise = 0.2 * torch.randn(ids.shape, generator=generator)
    advantages = torch.randn(count, generator=generator)
    batch = 8 if context.device.type == "cuda" and torch.cuda.mem_get_info()[1] > LARGE_MEMORY else 2
    ids, mask, noise, advantages = (tensor.to(context.device) for tensor in (ids, mask, noise, advantages))
    rollouts = Rollouts(ids, mask, prompt, noise, advantages, batch)
    for rows in rollouts.batches():
        rollouts.old[rows, prompt:] += _upstream_logprobs(model, rollouts, rows)
    return rollouts


Step = Callable[[Any, Rollouts], torch.Tensor]


def _upstream_logprobs(model: Any, rollouts: Rollouts, rows: slice) -> torch.Tensor:
    """Return log-probabilities of completion tokens as TRL computes them, `(batch, longest completion)`."""
    kept = rollouts.ids.shape[1] - rollouts.prompt
    logits = model(
        input_ids=rollouts.ids[rows],
        attention_mask=rollouts.mask[rows].long(),
        logits_to_keep=kept + 1,
        use_cache=False,
    ).logits
    return selective_log_softmax(logits[:, :-1], rollouts.ids[rows, -kept:]).float()


def padded(model: Any, rollouts: Rollouts) -> torch.Tensor:
    """Compute the loss with transformers' class and the formulas of TRL's `GRPOTrainer`, a batch at a time."""
    total, scored = torch.zeros((), device=rollouts.ids.device), rollouts.completion.sum()
    for rows in rollouts.batches():
        logprobs = _upstream_logprobs(model, rollouts, rows)
        mask, advantages = rollouts.completion[rows, rollouts.prompt :], rollouts.advantages[rows, None]
        ratios = torch.exp(logprobs - rollouts.old[rows, rollouts.prompt :])
        clipped = torch.clamp(ratios, 1 - EPSILON, 1 + EPSILON)
        terms = -torch.min(ratios * advantages, clipped * advantages)
        loss = (terms * mask).sum() / scored
        loss.backward()
        total += loss.detach()
    return total


def liger(model: Any, rollouts: Rollouts, compiled: bool) -> torch.Tensor:
    """Compute the loss with `LigerFusedLinearGRPOLoss`, as TRL does with `use_liger_kernel=True`."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=compiled, use_ref_model=False, epsilon_low=EPSILON, epsilon_high=EPSILON, loss_type="bnpo"
    )
    total, scored = torch.zeros((), device=rollouts.ids.device), rollouts.completion.sum()
    for rows in rollouts.batches():
        mask = rollouts.completion[rows, rollouts.prompt :]
        hidden = model.model(
            input_ids=rollouts.ids[rows], attention_mask=rollouts.mask[rows].long(), use_cache=False
        ).last_hidden_state[:, rollouts.prompt - 1 : -1]
        loss, *_ = loss_of(
            _input=hidden,
            lin_weight=model.lm_head.weight,
            selected_token_ids=rollouts.ids[rows, rollouts.prompt :],
            attention_mask=mask,
            advantages=rollouts.advantages[rows],
            old_per_token_logps=rollouts.old[rows, rollouts.prompt :],
        )
        loss = loss * mask.sum() / scored  # Liger divides by the tokens of this batch
        loss.backward()
        total += loss.detach()
    return total


def token_wise(model: Any, rollouts: Rollouts) -> torch.Tensor:
    """Compute the loss with `token_logprobs`, a padded batch at a time."""
    weights = token_weights(rollouts.completion, "token")
    total = torch.zeros((), device=rollouts.ids.device)
    for rows in rollouts.batches():
        result = token_logprobs(
            model,
            rollouts.ids[rows],
            attention_mask=rollouts.mask[rows],
            score=rollouts.completion[rows],
            loss=partial(_loss, old=rollouts.old[rows], advantages=rollouts.advantages[rows], weights=weights[rows]),
        ).loss
        assert result is not None
        result.backward()
        total += result.detach()
    return total


def packed(model: Any, rollouts: Rollouts) -> torch.Tensor:
    """Compute the loss with `rollout_logprobs`, which packs the rollouts into rows without padding."""
    weights = token_weights(rollouts.completion, "token")
    lengths = rollouts.mask.sum(1).tolist()
    result = rollout_logprobs(
        model,
        [ids[:length] for ids, length in zip(rollouts.ids, lengths, strict=True)],
        score=[row[:length] for row, length in zip(rollouts.completion, lengths, strict=True)],
        loss=partial(_loss, old=rollouts.old, advantages=rollouts.advantages, weights=weights),
    ).loss
    assert result is not None
    return result


def _loss(found: TokenLogprobs, *, old: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return policy_loss(found.logprobs, old, advantages, weights, eps_low=EPSILON, eps_high=EPSILON)
