"""Changes that `nrl-models plan` suggests for models that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig

from nrl_models.onboarding.estimate import estimate, estimate_within
from nrl_models.onboarding.estimate_report import plan_report
from nrl_models.onboarding.estimate_step import Setting
from nrl_models.onboarding.plan_changes import remedies
from nrl_models.onboarding.plan_table import GIB, MIB, PlanReport, with_unit


def test_remedies_of_large_moe_combine_two_dimensions() -> None:
    """One layer of DeepSeek-V3 with all experts does not fit a device, so no number of fsdp ranks suffices."""
    config = DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=1)
    setting = Setting({"fsdp": 2}, dtype=torch.bfloat16)
    memory = 24 * GIB
    total = estimate(config, setting).total_parameters
    changes = remedies(config, setting, memory, total)
    assert changes
    assert all("fsdp=" in change and ("ep=" in change or "tp=" in change) for change in changes)
    assert all(changed.total <= memory for changed in changes.values())


def test_estimate_within_limit() -> None:
    config = DeepseekV3Config(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, moe_intermediate_size=64, vocab_size=512
    )
    setting = Setting({"fsdp": 2}, seq_len=64)
    full_estimate = estimate(config, setting)
    assert estimate_within(config, setting, full_estimate.total) == full_estimate
    assert estimate_within(config, setting, full_estimate.total - 1) is None
    assert estimate_within(config, setting, 1) is None


def tiny_llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.long
def test_remedies_combine_all_changes_last() -> None:
    config, setting = tiny_llama(), Setting({"fsdp": 1}, seq_len=1024)
    total = estimate(config, setting).total_parameters
    smallest = estimate(config, Setting({"fsdp": 4}, seq_len=256, dtype=torch.bfloat16)).total
    (change,) = remedies(config, setting, smallest, total)
    assert "--dtype bfloat16" in change
    assert "--seq-len" in change
    assert remedies(config, setting, smallest // 100, total) == {}


def test_verdict_of_model_that_never_fits(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    report = plan_report(tmp_path, Setting({"fsdp": 1}, seq_len=64), 1e-6)
    assert not report.fits
    assert "256 times the ranks, --dtype bfloat16 and an eighth of --seq-len together would not fit" in report.verdict


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(204 * MIB, "204 MiB"), (3 * MIB, "3.00 MiB"), (0, "0 MiB"), (12.61 * GIB, "12.6 GiB"), (2000 * GIB, "2,000 GiB")],
)
def test_size_formatting(nbytes: float, shown: str) -> None:
    assert with_unit(int(nbytes)) == shown


def test_table_uses_one_unit() -> None:
    sizes = ("parameters", "gradients", "optimizer", "gathered", "activations")
    figures = dict.fromkeys(sizes, 40 * MIB) | {"buffers": 1024, "total": 200 * MIB, "traffic": {"fsdp": 0}}
    table = PlanReport("model", "fsdp=2", "", 2, 80 * GIB, figures, "", True).table()
    assert table.columns[1].header == "MiB"
    assert list(table.columns[1].cells) == ["40"] * 5 + ["<1", "200", "0"]
