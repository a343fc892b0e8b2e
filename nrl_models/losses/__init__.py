"""Losses of post-training: functions of log-probabilities `(sequences, length)` and of scores; see docs/losses.md."""

from nrl_models.deprecation import old_names
from nrl_models.losses.corrections import Correction, CorrectionType, RatioLevel, importance_weights
from nrl_models.losses.named import LOSSES, loss_named
from nrl_models.losses.policy import Normalize, clipped_share, policy_loss, token_weights
from nrl_models.losses.preferences import dpo_loss, misordered, ranking_loss, sequence_logprobs
from nrl_models.losses.rewards import group_advantages, overlong_penalty, teaching_groups

__all__ = [
    "LOSSES",
    "Correction",
    "CorrectionType",
    "Normalize",
    "RatioLevel",
    "clipped_share",
    "dpo_loss",
    "group_advantages",
    "importance_weights",
    "loss_named",
    "misordered",
    "overlong_penalty",
    "policy_loss",
    "ranking_loss",
    "sequence_logprobs",
    "teaching_groups",
    "token_weights",
]

__getattr__ = old_names(__name__, {"Normalise": "Normalize", "Level": "RatioLevel"})  # codespell:ignore
