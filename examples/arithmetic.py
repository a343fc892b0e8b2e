"""A GRPO task with a rule-based reward: sums of two numbers, as chat prompts.

`grpo.py` and `grpo_trl.py` share the questions (some of them held out), the reward and the evaluation.
The evaluation decodes greedily on the held-out questions.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import Sample
from nrl_models.logprobs import Sampling

LARGEST = 50
HELD_OUT_PAIRS = 60

RIGHT, FORM = 0.8, 0.2
"""Rewards for ending with the right number, and for containing only the equation."""


@dataclass(frozen=True, slots=True)
class Question:
    """Ask for the sum of two numbers."""

    first: int
    second: int

    @property
    def answer(self) -> int:
        """Return the sum."""
        return self.first + self.second

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the question as a chat, after one example of the expected completion."""
        return [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "30 + 40 ="},
            {"role": "assistant", "content": "30 + 40 = 70"},
            {"role": "user", "content": f"{self.first} + {self.second} ="},
        ]


def questions() -> tuple[list[Question], list[Question]]:
    """Return the training questions and the held-out questions. They are the same on every call.

    No sum is in both, not even with its numbers swapped.
    """
    pairs = [(first, second) for first in range(1, LARGEST + 1) for second in range(1, first + 1)]
    random.Random(0).shuffle(pairs)
    held_out, training = pairs[:HELD_OUT_PAIRS], pairs[HELD_OUT_PAIRS:]
    return _both_ways(training), _both_ways(held_out)


def _both_ways(pairs: Sequence[tuple[int, int]]) -> list[Question]:
    return [Question(*pair) for pair in sorted({*pairs, *(pair[::-1] for pair in pairs)})]


def reward(question: Question, completion: str, ended: bool) -> float:
    """Return the reward of a completion, from 0 to 1.

    Args:
        question: The question.
        completion: The completion's text, without special tokens.
        ended: Whether the completion has an end token. A truncated completion gets 0.
    """
    numbers = re.findall(r"\d+", completion)
    if not ended or not numbers:
        return 0.0
    right = int(numbers[-1]) == question.answer
    form = completion.strip() == f"{question.first} + {question.second} = {numbers[-1]}"
    return RIGHT * right + FORM * form


def encoded(tokenizer: Any, question: Question) -> list[int]:
    """Return the prompt's token ids in the checkpoint's chat template, with the generation prompt."""
    return list(tokenizer.apply_chat_template(question.messages, add_generation_prompt=True, return_dict=False))


def rewards_of(tokenizer: Any, asked: Sequence[Question], samples: Sequence[Sample]) -> list[float]:
    """Return the reward of each sample for its question."""
    completions = [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
    return [
        reward(question, completion, sample.finish_reason == "stop")
        for question, completion, sample in zip(asked, completions, samples, strict=True)
    ]


def evaluate(engine: Engine, tokenizer: Any, asked: Sequence[Question], new_tokens: int) -> dict[str, Any]:
    """Return the rewards of greedy completions, their mean, and the standard error of the mean."""
    prompts = [encoded(tokenizer, question) for question in asked]
    samples = engine.generate(prompts, Sampling(temperature=0.0), max_new_tokens=new_tokens, ignore_end=False)
    rewards = rewards_of(tokenizer, asked, samples)
    return {
        "reward": statistics.mean(rewards),
        "standard_error": statistics.stdev(rewards) / len(rewards) ** 0.5,
        "right": statistics.mean(given >= RIGHT for given in rewards),
        "ended": statistics.mean(sample.finish_reason == "stop" for sample in samples),
        "tokens": statistics.mean(len(sample.tokens) for sample in samples),
        "rewards": rewards,
    }
