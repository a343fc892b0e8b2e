"""Refit checks find every tensor that did not arrive, or list it as unverifiable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoints import edit_weights, new_model
from small_cell import SETTINGS
from transformers import Gemma3TextConfig, Glm4MoeConfig, LlamaConfig, Phi3Config, Qwen3MoeConfig
from versions import needs

from nrl_models import AutoModelForCausalLM, AutoModelForSequenceClassification, Sampling, registry, start_engine
from nrl_models.common.documents.rope_lengths import rope_switch
from nrl_models.consistency.consistency_report import CellResult
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.refit import RefitChecker, check_refit
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.http import HTTPEngine
from nrl_models.engines.scores import final_scores
from nrl_models.errors import EngineError
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mtp_weights import mtp_tensors
from nrl_models.testing.tiny import tiny_config


def checker(path: Path, engine: HFEngine, prompts: Prompts, threshold: float = 1.05) -> RefitChecker:
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "trainer")
    return RefitChecker(str(path), Meter(engine, trainer, prompts, replace(SETTINGS, threshold=threshold)))


class Unreadable(HFEngine):
    """An engine whose weights cannot be read."""

    def note_weights(self) -> bool:
        return False

    def unchanged_weights(self) -> list[str]:
        return []


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
SMALL |= {"use_qk_norm": True, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}


CONFIGS = {
    "GLM-4.5": lambda: tiny_config(Glm4MoeConfig, SMALL),
    "Gemma 3": lambda: tiny_config(Gemma3TextConfig, {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}),
}
"""GLM-4.5 has experts, and a correction bias, which is a buffer. Both have query and key norms."""


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_stale_tensor_is_detected_or_unverifiable(name: str, tmp_path: Path) -> None:
    new_model(CONFIGS[name]()).save_pretrained(tmp_path)
    engine = Unreadable(HFEngine.start(tmp_path, dtype=torch.float32, load_format="dummy", seed=3).model)
    check = checker(tmp_path, engine, Prompts(None, 128))
    assert check.refit("first").passed
    trainer = check.meter.trainer
    adapter, settings = trainer.model.state_dict_adapter, check.meter.settings
    old = {name: tensor.clone() for name, tensor in adapter.iter_export(trainer.model)}
    check.train()
    new = dict(adapter.iter_export(trainer.model))
    assert all(not (tensor == old[name]).any() for name, tensor in new.items())
    assert check.threshold <= 1.0001
    assert check.refit("second").passed
    assert len(check.not_observable) <= 4
    assert all(".experts." in each for each in check.not_observable), "only experts that no token chooses"
    measured = check.steps[-1].result.repeats[0]
    readable, count = HFEngine(engine.model), measured.decode.shape[1]
    for stale_name in new:
        readable.refit((new | {stale_name: old[stale_name]}).items(), digests=False)
        sampling = settings.sampling_of(check.cell)
        stale = final_scores(engine, measured.tokens, count, sampling)
        cell_result = CellResult(
            check.cell, (replace(measured, decode=stale, prefill=stale),), sampling, check.threshold
        )
        assert not cell_result.passed or stale_name in check.not_observable, stale_name


def test_mtp_weights_are_trained_and_unverifiable(tmp_path: Path) -> None:
    """One of the weights is a copy of the embeddings, and stays equal to them."""
    reference = new_model(tiny_config(Glm4MoeConfig, SMALL))
    reference.save_pretrained(tmp_path)
    mtp = mtp_tensors(reference)
    copied = f"model.layers.{reference.config.num_hidden_layers}.embed_tokens.weight"
    mtp[copied] = reference.model.embed_tokens.weight.detach().clone()
    edit_weights(tmp_path, lambda tensors: tensors.update(mtp))
    engine = HFEngine.start(tmp_path, dtype=torch.float32, load_format="dummy", seed=3)
    check = checker(tmp_path, engine, Prompts(None, 128))
    assert check.refit("first").passed
    check.train()
    model = check.meter.trainer.model
    new = dict(model.state_dict_adapter.iter_export(model))
    assert all(not (new[name] == old).any() for name, old in mtp.items())
    assert torch.equal(new[copied], model.model.embed_tokens.weight)
    assert check.refit("second").passed
    assert sorted(check.not_observable) == sorted(mtp)


@pytest.mark.long
@needs("Gemma4ForConditionalGeneration")
@pytest.mark.parametrize("readable", [True, False])
def test_infinite_clipping_bounds_become_finite(readable: bool, tmp_path: Path) -> None:
    """Gemma 4's audio tower clips to buffers that are infinite until they are calibrated."""
    audio = {"num_hidden_layers": 1, "use_clipped_linears": True}
    text = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "vocab_size_per_layer_input": 512}
    model_class: Any = registry.model_class("Gemma4ForConditionalGeneration")
    model = FamilyCase(model_class, tiny={"audio_config": audio, "text_config": text}).model()
    model.save_pretrained(tmp_path)
    dummy = HFEngine.start(tmp_path, dtype=torch.float32, load_format="dummy", seed=3).model
    check = checker(tmp_path, (HFEngine if readable else Unreadable)(dummy), Prompts(None, 128))
    bounds = {name for name, tensor in model.state_dict().items() if tensor.isinf().any()}
    assert bounds
    assert check.refit("first").passed
    check.train()
    trained = check.meter.trainer.model.state_dict()
    assert all(tensor.isfinite().all() for tensor in trained.values())
    assert all(trained[name].abs() > 1e4 for name in bounds)  # large enough to disable clipping
    assert check.refit("second").passed


def test_checksums_of_server_are_incomplete_evidence() -> None:
    """The checksum of a fused tensor changes if only one of its parts does."""
    checksums = {"tp_rank_0:norm.weight": "1", "tp_rank_0:qkv_proj.bias": tensor_digest(torch.tensor([1.0, 2.0, 3.0]))}
    engine = HTTPEngine.__new__(HTTPEngine)
    engine._client = cast(Any, SimpleNamespace(checksums=lambda: dict(checksums)))
    assert not engine.note_weights()  # so the check measures which stale tensors it would detect
    checksums["tp_rank_0:qkv_proj.bias"] = tensor_digest(torch.tensor([9.0, 2.0, 9.0]))  # k_proj.bias is stale
    assert engine.unchanged_weights() == ["norm.weight"]


def test_unchanged_weights_of_readable_engine(checkpoint: Path) -> None:
    engine = HFEngine.start(checkpoint, dtype=torch.float32)
    weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    assert engine.note_weights()
    assert len(engine.unchanged_weights()) == len(weights)
    for name, tensor in weights.items():
        engine.refit([(key, value if key == name else value * 1.01) for key, value in weights.items()], digests=False)
        assert engine.unchanged_weights() == [name]
        assert tensor.is_floating_point()


def test_stale_rows_are_a_refit_problem(checkpoint: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reports it even if log-probabilities do not change."""
    monkeypatch.setattr(RefitChecker, "_judge", lambda *_: None)
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
    report = check.to_json()
    assert report["not_observable"] == []
    for refit in report["refits"]:
        assert refit["unit"] == "token_mult_prob_error"
        assert refit["value"] >= refit["token_mult_prob_error"] >= 1.0
        assert refit["bound"] >= 1.00001


@pytest.mark.long
def test_longrope_is_checked_beyond_original_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128} | factors
    config = tiny_config(
        Phi3Config, {"rope_parameters": rope, "max_position_embeddings": 512, "original_max_position_embeddings": 128}
    )
    assert rope_switch(config) == 128
    assert rope_switch(tiny_config(LlamaConfig)) is None
    new_model(config).save_pretrained(tmp_path)
    check = check_refit(tmp_path, engine="hf-generate", dtype=torch.float32)
    assert check.passed
    assert check.to_json()["max_length"] == 129
    assert "maximum length 129" in str(check.table().title)
    check = check_refit(tmp_path, engine="hf-generate", dtype=torch.float32, engine_options={"max_length": 100})
    assert check.to_json()["max_length"] == 100


@pytest.mark.long
@pytest.mark.parametrize("options", [{"trainer_dtype": torch.float64}, {"dtype": torch.float64}])
def test_moe_refit_in_float64(options: dict[str, Any], tmp_path: Path) -> None:
    new_model(tiny_config(Qwen3MoeConfig)).save_pretrained(tmp_path)
    assert check_refit(tmp_path, engine="hf-generate", **options).passed


def test_classifier_raises_engine_error(tmp_path: Path) -> None:
    config = tiny_config(LlamaConfig)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    message = "hf-generate cannot generate tokens: LlamaForSequenceClassification"
    with pytest.raises(EngineError, match=message):
        check_refit(tmp_path, engine="hf-generate")
    with pytest.raises(EngineError, match=message):
        start_engine("hf-generate", tmp_path).generate([[5, 6]], Sampling(), max_new_tokens=2)
