"""Changes that `nrl-models plan` suggests for models that do not fit."""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config

from nrl_models.onboarding.estimate import estimate, estimate_within
from nrl_models.onboarding.estimate_step import Setting
from nrl_models.onboarding.plan_changes import remedies
from nrl_models.onboarding.plan_table import GIB


def test_large_mixtures_need_two_dimensions() -> None:
    """One layer of DeepSeek-V3 with all experts does not fit a device, so no number of fsdp ranks suffices."""
    config = DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=1)
    setting = Setting({"fsdp": 2}, dtype=torch.bfloat16)
    memory = 24 * GIB
    total = estimate(config, setting).total_parameters
    changes = remedies(config, setting, memory, total)
    assert changes
    assert all("fsdp=" in change and ("ep=" in change or "tp=" in change) for change in changes)
    assert all(found.total <= memory for found in changes.values())


def test_estimate_within_equals_estimate_or_is_none() -> None:
    config = DeepseekV3Config(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, moe_intermediate_size=64, vocab_size=512
    )
    setting = Setting({"fsdp": 2}, seq_len=64)
    found = estimate(config, setting)
    assert estimate_within(config, setting, found.total) == found
    assert estimate_within(config, setting, found.total - 1) is None
    assert estimate_within(config, setting, 1) is None
