"""GRPO in a custom loop: an inference engine samples, the model trains, and the engine receives the new weights.

    python examples/grpo.py CHECKPOINT --engine vllm --history run.json --out trained

CHECKPOINT has a chat template. The task is `arithmetic.py`. Each step samples groups of completions for some questions,
takes one step of GRPO (https://arxiv.org/abs/2402.03300) and refits the engine. Advantages and the loss are those of
Dr. GRPO (https://arxiv.org/abs/2503.20783): they are not divided by a group's standard deviation or a completion's
length. Each sample is used once, so the ratio of the policies is one and nothing is clipped.

The step is `nrl_models.recipes.rollouts`, which `nrl-models train` also uses. The task, the schedule and the evaluation
are in this folder. Every step compares the engine's log-probabilities of the sampled tokens with the trainer's
(`token_mult_prob_error`). In fp32 the error stays at the noise floor only if every weight arrives in every refit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import arithmetic
import runs
import torch
from transformers import AutoTokenizer

from nrl_models import AutoModelForCausalLM
from nrl_models.engines import start_engine
from nrl_models.logprobs import rollout_logprobs, token_mult_prob_error
from nrl_models.losses import loss_named
from nrl_models.recipes.policy_batch import Question, SampleBatch
from nrl_models.recipes.rollouts import PolicyLoop

BOUND = 1.0001
"""Limit of `token_mult_prob_error`. The noise floor of fp32 is about 1.00001."""


def asked(tokenizer: Any, questions: Iterable[arithmetic.Question]) -> list[Question]:
    """Convert questions to the prompts of the loop."""
    return [Question(question, tuple(arithmetic.encoded(tokenizer, question))) for question in questions]


def reward(question: arithmetic.Question, completion: str, ended: bool) -> float:
    """Compute the task's reward for the loop."""
    return arithmetic.reward(question, completion, ended)


def evaluate(loop: PolicyLoop, held_out: list[arithmetic.Question]) -> dict[str, Any]:
    """Return the rewards of greedy completions, and the `token_mult_prob_error` of some sampled ones."""
    batch = SampleBatch.of(loop.sample(asked(loop.tokenizer, held_out[: 4 * loop.group]), seed=0), loop.model.device)
    found = rollout_logprobs(loop.model, batch.sequences, score=batch.score)
    error = token_mult_prob_error(found.logprobs, batch.logprobs, batch.sampled & found.mask)
    rewards = arithmetic.evaluate(loop.engine, loop.tokenizer, held_out, loop.new_tokens)
    return {"token_mult_prob_error": error} | rewards


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, and evaluate before, during and after training. Returns the history that `--history` writes."""
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
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
    order = random.Random(options.seed)
    limits = {"dtype": torch.float32, "max_length": longest + options.new_tokens}
    with start_engine(options.engine, options.checkpoint, **limits) as engine:
        loop = PolicyLoop(
            model=model, optimizer=optimizer, engine=engine, tokenizer=tokenizer, reward=reward,
            settings=loss_named("dr_grpo"), group=options.group, new_tokens=options.new_tokens,
        )  # fmt: skip
        history.evaluated(evaluate(loop, held_out))
        for step in range(options.steps):
            questions = asked(tokenizer, order.sample(training, options.questions))
            seed = 1_000_000 * options.seed + 1_000 * step
            history.stepped(loop.step(iter(questions), options.questions, seed))
            schedule.step()
            if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
                history.evaluated(evaluate(loop, held_out))
    if options.out is not None:
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
    return history.content


if __name__ == "__main__":
    worst = max(step["token_mult_prob_error"] for step in main()["steps"])
    if worst > BOUND:
        raise SystemExit(f"token_mult_prob_error reached {worst:.7f}: the engine does not compute what the model does")
