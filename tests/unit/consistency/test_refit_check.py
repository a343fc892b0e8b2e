"""Refit checks find every tensor that did not arrive, or list it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from small_cell import SETTINGS
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, Phi3Config

from nrl_models import AutoModelForCausalLM
from nrl_models.common.config.positions import rope_switch
from nrl_models.consistency.consistency_report import CellResult
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.refit import RefitChecker, check_refit
from nrl_models.engines.hf import HFEngine
from nrl_models.testing.tiny import tiny_config


def checker(path: Path, engine: HFEngine, prompts: Prompts, threshold: float = 1.05) -> RefitChecker:
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "trainer")
    return RefitChecker(str(path), Meter(engine, trainer, prompts, replace(SETTINGS, threshold=threshold)))


class Unreadable(HFEngine):
    """An engine whose weights cannot be read."""

    def note_weights(self) -> bool:
        return False


STALE = [
    (LlamaConfig, {}),
    (Gemma3TextConfig, {}),
    (DeepseekV3Config, {"num_key_value_heads": 8, "head_dim": 16}),
]


@pytest.mark.parametrize(("config_class", "overrides"), STALE, ids=lambda value: getattr(value, "__name__", ""))
def test_every_stale_tensor_is_found_or_listed(
    config_class: Any, overrides: dict[str, Any], tmp_path: Path, prompts: Prompts
) -> None:
    new_model(tiny_config(config_class, overrides)).save_pretrained(tmp_path)
    engine = Unreadable(HFEngine.start(tmp_path, dtype=torch.float32, load_format="dummy", seed=3).model)
    check = checker(tmp_path, engine, prompts, threshold=1.05)
    assert check.refit("first").passed
    model = check.meter.trainer.model
    old = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}
    check.train()
    new = dict(model.state_dict_adapter.iter_export(model))
    for name, tensor in new.items():
        assert not (tensor == old[name]).any() or not tensor.is_floating_point()
    assert check.threshold <= 1.0001
    assert len(check.not_observable) <= len(new) // 4
    held = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    readable = HFEngine(engine.model)

    def result() -> CellResult:
        return CellResult(check.cell, (check.meter.measure(check.cell),), check.threshold)

    engine.refit(new.items())
    assert result().passed
    for name in new:
        engine.model.load_state_dict(held)
        assert readable.note_weights()
        engine.refit((new | {name: old[name]}).items())
        assert readable.unchanged_weights(), name
        assert not result().passed or name in check.not_observable, name


def test_stale_tensor_is_a_problem_of_the_refit(checkpoint: Path, prompts: Prompts) -> None:
    """Also where it has no effect on log-probabilities."""
    engine = HFEngine.start(checkpoint, dtype=torch.float32, load_format="dummy", seed=3)
    check = checker(checkpoint, engine, prompts)
    check.refit("first")
    check.train()
    weight = engine.model.model.layers[1].self_attn.k_proj.weight
    row, refit = weight[3].detach().clone(), engine.refit

    def stale(*args: Any, **options: Any) -> Any:
        report = refit(*args, **options)
        with torch.no_grad():
            weight[3] = row
        return report

    engine.refit = stale
    step = check.refit("second")
    assert not step.passed
    rows = f"1 of {len(weight)} rows"
    assert f"weights of the engine did not change: model.layers.1.self_attn.k_proj.weight ({rows})" in step.problems
    assert check.to_json()["not_observable"] == []


def test_long_rope_is_checked_at_the_length_of_rollouts(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128} | factors
    config = tiny_config(Phi3Config, {"rope_parameters": rope, "max_position_embeddings": 512})
    assert rope_switch(config) == 128
    assert rope_switch(tiny_config(LlamaConfig)) is None
    new_model(config).save_pretrained(tmp_path)
    check = check_refit(tmp_path, engine="hf-generate", dtype=torch.float32)
    assert check.passed
    assert check.to_json()["max_length"] == 129
    assert "started for 129 tokens" in str(check.table().title)
    check = check_refit(tmp_path, engine="hf-generate", dtype=torch.float32, engine_options={"max_length": 100})
    assert check.to_json()["max_length"] == 100
