"""Train with TRL's `GRPOTrainer`, on a reward that is a function of the text.

python examples/grpo.py CHECKPOINT OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from nrl_models import AutoModelForCausalLM

PROMPTS = ["def main(", "import os", "The function returns", "class Error("]


def short_words(completions: list[str], **_: Any) -> list[float]:
    """More for shorter words."""
    return [1.0 / (1 + max(map(len, completion.split()), default=0)) for completion in completions]


def trainer_for(
    model: PreTrainedModel, tokenizer: Any, prompts: list[str], reward: Callable[..., list[float]], out: str,
    **options: Any,
) -> GRPOTrainer:  # fmt: skip
    """A trainer on `prompts`, four completions of each; `options` are of `GRPOConfig`."""
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "save_strategy": "no"} | options
    arguments = GRPOConfig(out, logging_steps=1, report_to=[], disable_tqdm=True, **options)
    rows = Dataset.from_dict({"prompt": prompts})
    return GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=rows, processing_class=tokenizer)


def main(arguments: list[str] | None = None) -> None:
    """Load, train, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    trainer = trainer_for(
        model, AutoTokenizer.from_pretrained(options.checkpoint), PROMPTS, short_words, options.out,
        max_steps=options.steps, max_completion_length=16, bf16=torch.cuda.is_available(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(options.out)
    print([entry["reward"] for entry in trainer.state.log_history if "reward" in entry])


if __name__ == "__main__":
    main()
