"""Tensors that a forward saves are counted once each, even if the memory of a freed tensor is reused."""

from __future__ import annotations

from transformers import MixtralConfig

from nrl_models.onboarding.estimate import estimate
from nrl_models.onboarding.estimate_step import Setting
from nrl_models.testing.tiny import tiny_config


def test_activation_estimate_is_deterministic() -> None:
    config = tiny_config(MixtralConfig)
    config.architectures = ["MixtralForCausalLM"]
    setting = Setting({"fsdp": 2}, seq_len=512, micro_batch=2, checkpointing=False)
    assert len({estimate(config, setting).activations for _ in range(4)}) == 1
