"""transformers' Trainer: an engine that gets the weights after optimizer steps, and a watch over both.

watch = nrl_models.adapters.hf_trainer.watch(trainer, engine)
trainer.train()
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nrl_models.common.value_checks import is_integer
from nrl_models.engines.base import Engine
from nrl_models.errors import UnknownArgumentError
from nrl_models.watch import Watch


class RefitCallback(TrainerCallback):
    """Refits a watch's engine after optimizer steps. The watch compares both sides and raises `DriftError`.

    Args:
        watch: a watch with model and engine.
        every: number of optimizer steps between two refits.
    """

    def __init__(self, watch: Watch, every: int = 1) -> None:
        if not is_integer(every, 1):
            raise UnknownArgumentError(f"every={every}: expected at least 1")
        self.watch, self.every = watch, every

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Follow the learning rate of the trainer's optimizer."""
        if optimizer is not None:
            self.watch.follow_optimizer(optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refit the engine if it is due."""
        if state.global_step % self.every == 0:
            self.watch.refit()


def watch(trainer: Any, engine: Engine, *, every: int = 1, **options: Any) -> Watch:
    """Refit an engine while a Trainer trains, and watch both.

    Args:
        trainer: `transformers.Trainer` or a subclass.
        engine: an engine of `nrl_models.start_engine`.
        every: number of optimizer steps between two refits.
        options: options of `Watch`. Default of `log`: the trainer's `log`. `optimizer` is the trainer's anyway.

    Raises:
        UnknownArgumentError: `every` is below 1, or an option is wrong.
    """
    options.setdefault("log", lambda values, step: trainer.log(values))
    watcher = Watch(trainer.model, engine, **options)
    trainer.add_callback(RefitCallback(watcher, every))
    return watcher
