"""A task for GRPO whose reward a rule decides: sums of two numbers, asked in a chat.

`grpo.py` and `grpo_trl.py` share it: the questions, some of them held out; the reward; and the
evaluation, which asks the held-out questions again and again with greedy decoding.
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
"""What a reply gets for ending with the right number, and for being nothing but the equation."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the sum of two numbers is."""

    first: int
    second: int

    @property
    def answer(self) -> int:
        """The sum."""
        return self.first + self.second

    @property
    def messages(self) -> list[dict[str, str]]:
        """The question as a chat, after an example of what to reply."""
        return [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "30 + 40 ="},
            {"role": "assistant", "content": "30 + 40 = 70"},
            {"role": "user", "content": f"{self.first} + {self.second} ="},
        ]


def questions() -> tuple[list[Question], list[Question]]:
    """Those to train on, and those held out, the same ones on every call.

    No sum is in both, not even with its numbers swapped.
    """
    pairs = [(first, second) for first in range(1, LARGEST + 1) for second in range(1, first + 1)]
    random.Random(0).shuffle(pairs)
    held_out, training = pairs[:HELD_OUT_PAIRS], pairs[HELD_OUT_PAIRS:]
    return _both_ways(training), _both_ways(held_out)


def _both_ways(pairs: Sequence[tuple[int, int]]) -> list[Question]:
    return [Question(*pair) for pair in sorted({*pairs, *(pair[::-1] for pair in pairs)})]


def reward(question: Question, reply: str, ended: bool) -> float:
    """What a reply is worth, from 0 to 1.

    Args:
        question: what was asked.
        reply: the text, without special tokens.
        ended: whether the model ended it; a reply that was cut off is worth nothing.
    """
    numbers = re.findall(r"\d+", reply)
    if not ended or not numbers:
        return 0.0
    right = int(numbers[-1]) == question.answer
    form = reply.strip() == f"{question.first} + {question.second} = {numbers[-1]}"
    return RIGHT * right + FORM * form


def encoded(tokenizer: Any, question: Question) -> list[int]:
    """The question's token ids, in the checkpoint's chat template, up to where the reply begins."""
    return list(tokenizer.apply_chat_template(question.messages, add_generation_prompt=True, return_dict=False))


def rewards_of(tokenizer: Any, asked: Sequence[Question], samples: Sequence[Sample]) -> list[float]:
    """The reward of each sample of the question beside it."""
    replies = [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
    return [
        reward(question, reply, sample.finish_reason == "stop")
        for question, reply, sample in zip(asked, replies, samples, strict=True)
    ]


def evaluate(engine: Engine, tokenizer: Any, asked: Sequence[Question], new_tokens: int) -> dict[str, Any]:
    """The rewards of greedy replies, each and on average, with the average's standard error."""
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
