"""verl's trainer process: a watch over the log-probabilities of rollouts and actor.

    import nrl_models.adapters.verl_trainer

    nrl_models.adapters.verl_trainer.watch()  # before trainer.fit(), in the trainer's process (a Ray worker)

verl compares both sides in `calculate_debug_metrics`, which only reports. This hook adds the watch's metrics, and
raises `DriftError` before the actor is updated. Set `actor_rollout_ref.rollout.calculate_log_probs=True`, so that
rollouts have log-probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from nrl_models.adapters.hub_stream import check_trainer
from nrl_models.watch import Watch
from nrl_models.watch.record import PREFIX

REQUIREMENT = "verl>=0.9,<0.10"

METRICS = "calculate_debug_metrics"
"""verl's function that compares rollout and actor."""

USERS = ("verl.utils.debug.metrics", "verl.trainer.ppo.v1.trainer_base")
"""Modules that import `METRICS` by name."""


def watch(**options: Any) -> Watch:
    """Watch the log-probabilities of verl's rollouts and actor.

    Args:
        options: options of `Watch`, without model and engine.

    Raises:
        TrainerError: verl is not installed, or has another version.
    """
    check_trainer(REQUIREMENT)
    watcher = Watch(**options)
    import_module(USERS[0])
    for name in USERS:
        module = sys.modules.get(name)
        if module is not None and (original := getattr(module, METRICS, None)) is not None:
            setattr(module, METRICS, _watched(original, watcher))
    return watcher


def _watched(original: Callable[[Any], dict[str, Any]], watcher: Watch) -> Callable[[Any], dict[str, Any]]:
    def calculate_debug_metrics(data: Any) -> dict[str, Any]:
        batch = data.batch
        length = batch["responses"].size(1)
        mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"][:, -length:]
        watcher.after_sync()  # verl updates the rollout's weights before each step
        report = watcher.before_update(
            trainer=batch["old_log_probs"],
            engine=batch["rollout_log_probs"],
            mask=mask.bool(),
            attention_mask=batch.get("attention_mask"),
        )
        return original(data) | {PREFIX + name: value for name, value in report.metrics.values().items()}

    return calculate_debug_metrics
