"""GRPO in a loop of your own: an inference engine samples, the model learns, the engine gets the new weights.

    python examples/grpo.py CHECKPOINT --engine vllm --history run.json --out trained

CHECKPOINT has a chat template; the task is `arithmetic.py`'s. Each step samples groups of replies to some questions,
takes one step of GRPO (https://arxiv.org/abs/2402.03300) and refits the engine. Advantages and the loss are those of
Dr. GRPO (https://arxiv.org/abs/2503.20783): neither is divided by a group's spread or a reply's length. Each sample is
used once, so that the ratio of the policies is one and nothing is clipped.

The engine's and the trainer's log-probabilities of what was sampled are compared at every step
(`token_mult_prob_error`). In fp32 they stay at the noise floor only if every weight arrives in every refit.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arithmetic
import runs
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from nrl_models import AutoModelForCausalLM
from nrl_models.engines import start_engine
from nrl_models.engines.base import Engine, Sample
from nrl_models.logprobs import Sampling, token_logprobs, token_mult_prob_error

BOUND = 1.0001
"""On `token_mult_prob_error`: fp32's noise floor is about 1.00001."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of several lengths, padded on the right to `(samples, length)`.

    Args:
        tokens: prompts and replies.
        there: False for padding.
        sampled: True for replies, their end-of-text token included: what is learnt from.
        logprobs: the engine's, zero but where `sampled`.
    """

    tokens: torch.Tensor
    there: torch.Tensor
    sampled: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def of(cls, samples: list[Sample]) -> Batch:
        """Pad them."""
        rows = [
            (
                torch.tensor(sample.sequence),
                torch.ones(len(sample.sequence), dtype=torch.bool),
                torch.tensor([False] * len(sample.prompt) + [True] * len(sample.tokens)),
                torch.tensor([0.0] * len(sample.prompt) + list(sample.logprobs), dtype=torch.float64),
            )
            for sample in samples
        ]
        return cls(*(pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True)))


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each reply of a group `(groups, group)` is than the group's average."""
    return rewards - rewards.mean(1, keepdim=True)


def policy_loss(logprobs: torch.Tensor, advantages: torch.Tensor, sampled: torch.Tensor, divisor: int) -> torch.Tensor:
    """Dr. GRPO's loss at a ratio of one: what each sampled token's log-probability is worth, divided by a constant.

    Args:
        logprobs: the trainer's, `(samples, length)`.
        advantages: of each sample.
        sampled: `(samples, length)`, True for what the engine sampled.
        divisor: the tokens that the whole step's samples could have had.
    """
    return -(logprobs * advantages[:, None] * sampled).sum() / divisor


@dataclass(frozen=True, slots=True)
class Loop:
    """What a step needs.

    Args:
        model: is trained.
        optimizer: of its parameters.
        engine: samples.
        tokenizer: the checkpoint's.
        group: replies to each question.
        new_tokens: of a reply at most.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    engine: Engine
    tokenizer: Any
    group: int
    new_tokens: int

    def step(self, asked: list[arithmetic.Question], seed: int) -> dict[str, float]:
        """Sample, learn, refit. Returns what there is to log.

        `token_mult_prob_error` is that of the weights which the refit before this step brought.
        """
        started = time.perf_counter()
        repeated = [question for question in asked for _ in range(self.group)]
        samples = self._sample(repeated, seed)
        rewards = torch.tensor(arithmetic.rewards_of(self.tokenizer, repeated, samples))
        advantages = advantages_of(rewards.view(-1, self.group))
        sampled_at = time.perf_counter()

        error, norm = self._learn(samples, advantages)
        learnt_at = time.perf_counter()

        report = self.engine.refit(self.model.state_dict_adapter.iter_export(self.model))
        if report.unwritten:
            raise RuntimeError(f"the engine kept old weights: {', '.join(report.unwritten)}")
        return {
            "reward": rewards.mean().item(),
            "ended": sum(sample.finish_reason == "stop" for sample in samples) / len(samples),
            "tokens": sum(len(sample.tokens) for sample in samples) / len(samples),
            "gradient_norm": norm,
            "token_mult_prob_error": error,
            "sample_seconds": sampled_at - started,
            "learn_seconds": learnt_at - sampled_at,
            "refit_seconds": report.seconds,
        }

    def evaluate(self, held_out: list[arithmetic.Question]) -> dict[str, Any]:
        """Rewards of greedy replies, and the `token_mult_prob_error` of some sampled ones."""
        batch = Batch.of(self._sample(held_out[: 4 * self.group], seed=0))
        with torch.no_grad():
            found = token_logprobs(self.model, batch.tokens, attention_mask=batch.there, score=batch.sampled)
        error = token_mult_prob_error(found.logprobs, batch.logprobs, batch.sampled)
        rewards = arithmetic.evaluate(self.engine, self.tokenizer, held_out, self.new_tokens)
        return {"token_mult_prob_error": error} | rewards

    def _sample(self, asked: list[arithmetic.Question], seed: int) -> list[Sample]:
        """A reply to each question, ended where the model ends it."""
        prompts = [arithmetic.encoded(self.tokenizer, question) for question in asked]
        return self.engine.generate(prompts, Sampling(), max_new_tokens=self.new_tokens, seed=seed, ignore_end=False)

    def _learn(self, samples: list[Sample], advantages: torch.Tensor) -> tuple[float, float]:
        """One step of the optimizer. Returns the samples' `token_mult_prob_error`, and the gradient's norm."""
        self.optimizer.zero_grad()
        ours, theirs = [], []
        for group, advantage in enumerate(advantages):
            batch = Batch.of(samples[group * self.group : (group + 1) * self.group])
            teaches = bool(advantage.any())  # rewards that are all the same have no gradient
            with torch.set_grad_enabled(teaches):
                found = token_logprobs(self.model, batch.tokens, attention_mask=batch.there, score=batch.sampled)
            if teaches:
                policy_loss(found.logprobs, advantage, batch.sampled, len(samples) * self.new_tokens).backward()
            ours.append(found.logprobs.detach()[batch.sampled])
            theirs.append(batch.logprobs[batch.sampled])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return token_mult_prob_error(torch.cat(ours), torch.cat(theirs)), float(norm)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, and evaluate before, meanwhile and after. Returns what `--history` writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", default="vllm", help="vllm or hf-generate")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps")
    parser.add_argument("--out", type=Path, help="save the trained model here")
    runs.add_settings(parser)
    options = parser.parse_args(arguments)
    history = runs.History(f"grpo.py, {options.engine}", options)

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    training, held_out = arithmetic.questions()
    longest = max(len(arithmetic.encoded(tokenizer, question)) for question in training + held_out)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
    order = random.Random(options.seed)
    limits = {"dtype": torch.float32, "max_length": longest + options.new_tokens}
    with start_engine(options.engine, options.checkpoint, **limits) as engine:
        loop = Loop(model, optimizer, engine, tokenizer, options.group, options.new_tokens)
        history.evaluated(loop.evaluate(held_out))
        for step in range(options.steps):
            asked = order.sample(training, options.questions)
            history.stepped(loop.step(asked, seed=1_000_000 * options.seed + 1_000 * step))
            schedule.step()
            if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
                history.evaluated(loop.evaluate(held_out))
    if options.out is not None:
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
    return history.content


if __name__ == "__main__":
    worst = max(step["token_mult_prob_error"] for step in main()["steps"])
    if worst > BOUND:
        raise SystemExit(f"token_mult_prob_error reached {worst:.7f}: the engine does not compute what the model does")
