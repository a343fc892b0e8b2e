"""Train with transformers' `Trainer`, and resume from its checkpoints.

    python examples/trainer.py CHECKPOINT OUT --steps 4
    python examples/trainer.py CHECKPOINT OUT --steps 8 --resume

`--resume` continues from the last checkpoint in OUT. This script or `Trainer` with transformers' model may have written
it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from nrl_models import AutoModelForCausalLM


def trainer_for(model: PreTrainedModel, out: str, **options: Any) -> Trainer:
    """Create a trainer on random tokens. `options` are passed to `TrainingArguments`."""
    options = {"per_device_train_batch_size": 2, "learning_rate": 1e-4} | options
    arguments = TrainingArguments(out, logging_steps=1, report_to=[], disable_tqdm=True, **options)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (32, 64), generator=generator).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model, arguments, train_dataset=rows)


def train(model: PreTrainedModel, out: str, *, steps: int, resume: bool = False, **options: Any) -> list[float]:
    """Train up to step `steps`. Returns the losses of this run."""
    trainer = trainer_for(model, out, max_steps=steps, save_steps=max(steps // 2, 1), **options)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> None:
    """Load and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    print(train(model, options.out, steps=options.steps, resume=options.resume))


if __name__ == "__main__":
    main()
