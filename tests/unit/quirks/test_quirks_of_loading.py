"""Quirks of loading and exporting. Without the workaround the bug shows, and with it it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quirk_probes as probes
import torch
from checkpoints import assert_same, edit_weights, stored
from transformers import AutoConfig, PreTrainedModel, conversion_mapping
from versions import case_of, since

from nrl_models import AutoModelForCausalLM, AutoModelForImageTextToText, registry
from nrl_models.common.switches import quirks_off
from nrl_models.errors import CheckpointError, UnknownArchitectureError, UnknownArgumentError
from nrl_models.loading.read_config import read_config
from nrl_models.quirks import Subject, predicates
from nrl_models.testing.case import FamilyCase


@pytest.fixture
def in_bf16(llama_checkpoint: Path, tmp_path: Path) -> Path:
    """Save a checkpoint in bf16, as published."""
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


def moved(model: PreTrainedModel) -> float:
    """Return how far a weight moves in one step of post-training."""
    weight = model.model.norm.weight
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return (weight.detach() - before).abs().max().item()


def test_symptom_of_fp32_masters(in_bf16: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(in_bf16, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert probes.small_updates_vanish(model.dtype)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    assert moved(model) == 0


def test_cure_of_fp32_masters(in_bf16: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(in_bf16, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    assert moved(model) == pytest.approx(1e-6, rel=0.1)


MOE = "Qwen3MoeForCausalLM"


@pytest.fixture
def moe_config() -> dict:
    """A configuration with a key that recipes write as 0."""
    return json.loads(FamilyCase(registry.model_class(MOE)).config.to_json_string())


def test_symptom_of_strict_config_types(moe_config: dict) -> None:
    with quirks_off("strict-config-types"):
        assert probes.integer_for_float_raises(read_config, moe_config, "router_aux_loss_coef")
    assert probes.integer_for_float_raises(AutoConfig.from_pretrained, moe_config, "router_aux_loss_coef")


def test_cure_of_strict_config_types(moe_config: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not probes.integer_for_float_raises(read_config, moe_config, "router_aux_loss_coef")
    (tmp_path / "config.json").write_text(json.dumps(moe_config | {"router_aux_loss_coef": 0}))
    assert type(read_config(tmp_path).router_aux_loss_coef) is float
    moe_config["num_hidden_layers"] = "2"
    (tmp_path / "config.json").write_text(json.dumps(moe_config))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers.* expected int, got str"):
        read_config(tmp_path)


def test_config_overrides_are_converted_like_files(mixtral_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral_checkpoint, router_aux_loss_coef=0)
    assert repr(model.config.router_aux_loss_coef) == "0.0"
    with pytest.raises(UnknownArgumentError, match=r"router_aux_loss_coef='none'.*expected float, got str"):
        AutoModelForCausalLM.from_pretrained(mixtral_checkpoint, router_aux_loss_coef="none")


TOWER = "Qwen2_5_VLForConditionalGeneration"


@pytest.fixture
def with_tower(tmp_path: Path) -> Path:
    """A checkpoint whose tower has the published names."""
    folder = tmp_path / "tower"
    FamilyCase(registry.model_class(TOWER)).reference().save_pretrained(folder)
    assert any(name.startswith("visual.") for name in stored(folder))
    return folder


@pytest.fixture
def without_renaming(monkeypatch: pytest.MonkeyPatch, with_tower: Path) -> None:
    """Simulate a transformers version without the renaming."""
    original = conversion_mapping.get_model_conversion_mapping

    def lost(*args: Any, **options: Any) -> list[Any]:
        return [step for step in original(*args, **options) if "^visual" not in step.source_patterns]

    for module in (conversion_mapping, probes):
        monkeypatch.setattr(module, "get_model_conversion_mapping", lost)


WEIGHT = "visual.blocks.0.attn.proj.weight"


@since("5.6")
@pytest.mark.usefixtures("without_renaming")
def test_symptom_of_tower_names(with_tower: Path) -> None:
    """Trainers load the remaining names without checking that all are there."""
    assert probes.tower_names_are_lost(FamilyCase(registry.model_class(TOWER)))
    reference = registry.model_class(TOWER).reference_class()(AutoConfig.from_pretrained(with_tower))
    reference.load_state_dict(stored(with_tower), strict=False)
    assert not torch.equal(reference.get_parameter(f"model.{WEIGHT}"), stored(with_tower)[WEIGHT])


@since("5.6")
@pytest.mark.usefixtures("without_renaming")
def test_cure_of_tower_names(with_tower: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(with_tower, dtype=torch.float32)
    assert torch.equal(model.get_parameter(f"model.{WEIGHT}"), stored(with_tower)[WEIGHT])
    edit_weights(with_tower, lambda tensors: tensors.pop(WEIGHT))
    with pytest.raises(CheckpointError, match=r"missing: model\.visual\.blocks\.0\.attn\.proj\.weight"):
        AutoModelForImageTextToText.from_pretrained(with_tower, dtype=torch.float32)


OWN = "KimiVLForConditionalGeneration"


def test_symptom_of_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = json.loads(FamilyCase(registry.model_class(OWN)).config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    with pytest.raises(UnknownArchitectureError, match="neither transformers nor a registered family"):
        read_config(tmp_path)


def test_cure_of_own_configuration(tmp_path: Path) -> None:
    registry.register_custom_configs()
    values = json.loads(FamilyCase(registry.model_class(OWN)).config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert type(read_config(tmp_path)).__module__.startswith("nrl_models.")


DRAFTING = FamilyCase(registry.model_class("Glm4MoeForCausalLM"))
SHARING = case_of("Gemma3nForCausalLM")


def test_symptom_of_shared_kv_unused_weights() -> None:
    with quirks_off("shared-kv-unused-weights"):
        assert probes.unused_weights_are_dropped(SHARING.model_class.from_pretrained, SHARING.reference())


def test_cure_of_shared_kv_unused_weights() -> None:
    assert not probes.unused_weights_are_dropped(SHARING.model_class.from_pretrained, SHARING.reference())


def test_symptom_of_mtp_weights() -> None:
    with quirks_off("mtp-weights"):
        assert probes.mtp_weights_are_dropped(DRAFTING.model_class.from_pretrained, DRAFTING.reference())


def test_cure_of_mtp_weights() -> None:
    assert not probes.mtp_weights_are_dropped(DRAFTING.model_class.from_pretrained, DRAFTING.reference())


def test_symptom_of_names_on_the_hub(mixtral_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral_checkpoint)
    sent = dict(model.state_dict_adapter.iter_export(model, layout="transformers"))
    assert sent.keys() != stored(mixtral_checkpoint).keys()


def test_cure_of_names_on_the_hub(mixtral_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral_checkpoint)
    assert_same(dict(model.state_dict_adapter.iter_export(model)), stored(mixtral_checkpoint))
    assert predicates.has_several_names(Subject(FamilyCase(registry.model_class("MixtralForCausalLM")).reference()))


FREEZING = FamilyCase(registry.model_class("RoFormerForCausalLM"))


def test_symptom_of_frozen_parts() -> None:
    assert probes.frozen_parts_train(FREEZING.reference_class.from_pretrained, FREEZING.reference())


def test_cure_of_frozen_parts() -> None:
    assert not probes.frozen_parts_train(FREEZING.model_class.from_pretrained, FREEZING.reference())


@since("5.15")
def test_symptom_of_unequal_parts() -> None:
    assert probes.fused_parts_revert_to_equal_sizes(case_of("OlmoHybridForCausalLM"))


@since("5.15")
def test_cure_of_unequal_parts() -> None:
    model = case_of("OlmoHybridForCausalLM").model()
    hub, config = model.state_dict_adapter.hub, model.config
    widths = {
        part: heads * size
        for part, heads, size in (
            ("q", config.linear_num_key_heads, config.linear_key_head_dim),
            ("k", config.linear_num_key_heads, config.linear_key_head_dim),
            ("v", config.linear_num_value_heads, config.linear_value_head_dim),
        )
    }
    assert len(set(widths.values())) > 1
    for part, width in widths.items():
        assert hub[f"model.layers.0.linear_attn.{part}_conv1d.weight"].shape[0] == width
