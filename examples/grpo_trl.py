"""Train the same task with TRL's `GRPOTrainer`, which samples with transformers' `generate`.

python examples/grpo_trl.py CHECKPOINT OUT --history run.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arithmetic
import runs
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nrl_models import AutoModelForCausalLM
from nrl_models.engines.hf import HFEngine


def trainer_for(
    model: PreTrainedModel, tokenizer: Any, rows: dict[str, list[Any]], reward: Callable[..., list[float]], out: str,
    **options: Any,
) -> GRPOTrainer:  # fmt: skip
    """Create a trainer on `rows`. The reward receives all their columns. `options` are passed to `GRPOConfig`.

    By default it samples four completions per prompt and uses the loss of `grpo.py`.
    """
    options = {
        "per_device_train_batch_size": 4, "num_generations": 4, "save_strategy": "no",
        "loss_type": "dr_grpo", "scale_rewards": "none",
    } | options  # fmt: skip
    arguments = GRPOConfig(out, logging_steps=1, report_to=[], disable_tqdm=True, **options)
    return GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer
    )


def reward_for(tokenizer: Any) -> Callable[..., list[float]]:
    """Return the task's reward with TRL's signature: lists of messages, of token ids and of the dataset's columns."""

    def reward(
        completions: list[list[dict[str, str]]],
        completion_ids: list[list[int]],
        first: list[int],
        second: list[int],
        **_: Any,
    ) -> list[float]:
        asked = map(arithmetic.Question, first, second)
        return [
            arithmetic.reward(question, messages[0]["content"], ids[-1:] == [tokenizer.eos_token_id])
            for question, messages, ids in zip(asked, completions, completion_ids, strict=True)
        ]

    return reward


class Record(TrainerCallback):
    """Add the log of each step to a history."""

    def __init__(self, history: runs.History) -> None:
        self.history = history

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Record a log that has a reward. The log at the end of training has none."""
        if "reward" in logs:
            ended = 1 - logs["completions/clipped_ratio"]
            self.history.stepped({"reward": logs["reward"], "ended": ended, "tokens": logs["completions/mean_length"]})


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, evaluate before and after, and save. Returns the history that `--history` writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out")
    runs.add_settings(parser)
    options = parser.parse_args(arguments)
    history = runs.History("grpo_trl.py", options)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    training, held_out = arithmetic.questions()
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    rows = {
        "prompt": [question.messages for question in training],
        "first": [question.first for question in training],
        "second": [question.second for question in training],
    }
    trainer = trainer_for(
        model, tokenizer, rows, reward_for(tokenizer), options.out,
        max_steps=options.steps, per_device_train_batch_size=options.questions * options.group,
        num_generations=options.group, max_completion_length=options.new_tokens, seed=options.seed,
        learning_rate=options.learning_rate, lr_scheduler_type="linear", gradient_checkpointing=False,
        bf16=torch.cuda.is_available(),
    )  # fmt: skip
    trainer.add_callback(Record(history))
    engine = HFEngine(trainer.model)
    history.evaluated(arithmetic.evaluate(engine, tokenizer, held_out, options.new_tokens))
    trainer.train()
    history.evaluated(arithmetic.evaluate(engine, tokenizer, held_out, options.new_tokens))
    trainer.save_model(options.out)
    return history.content


if __name__ == "__main__":
    main()
