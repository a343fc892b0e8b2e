"""Saved configurations: keys that change the meaning of weights are found, and others may differ."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Mamba2Config, MistralConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.common.config.comparison import differences
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def llama(**values: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(tiny_config(LlamaConfig, values), device="meta")


def saved_by(model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    return json.loads(model.config.to_json_string()) | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16", "transformers_version": "4.40.0", "_name_or_path": "/a/b", "architectures": ["X"]},
        {"attn_implementation": "eager", "quantization_config": {"quant_method": "fp8"}},
        {"use_cache": False, "output_hidden_states": True, "output_router_logits": True, "return_dict": False},
        {"pad_token_id": 1, "eos_token_id": [1, 2], "bos_token_id": 3, "temperature": 0.7},
        {"attention_dropout": 0.5, "initializer_range": 0.5, "router_aux_loss_coef": 0.1, "problem_type": "regression"},
        {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}},
        {"my_note": "run 5", "max_position_embeddings": 4096},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_irrelevant_keys_may_differ(changes: Mapping[str, Any]) -> None:
    model = llama()
    assert list(differences(saved_by(model, **changes), model)) == []


def test_infinite_values_of_another_version_are_read() -> None:
    config = tiny_config(Mamba2Config, {"time_step_limit": (0.0, float("inf"))})
    model = AutoModelForCausalLM.from_config(config, device="meta")
    saved = saved_by(model, transformers_version="4.40.0")
    assert saved["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert list(differences(saved, model)) == []
    (problem,) = differences(saved | {"time_step_limit": [0.0, 1.0]}, model)
    assert problem.subject == "time_step_limit"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
        ("rms_norm_eps", 0.1),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
    ],
)
def test_keys_that_change_outputs_are_reported(key: str, value: Any) -> None:
    model = llama()
    before = saved_by(model)[key]
    (problem,) = differences(saved_by(model, **{key: value}), model)
    assert problem.subject == key
    assert problem.detail == f"is {value!r} in the checkpoint, {before!r} in the model"
    assert problem.advice.endswith(f"pass ignore_config_keys=('{key}',)")
    assert list(differences(saved_by(model, **{key: value}), model, key)) == []


def test_changed_head_counts_with_same_shapes_are_reported() -> None:
    model = llama(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    changes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    assert {problem.subject for problem in differences(saved_by(model, **changes), model)} == changes.keys()


def test_max_position_embeddings_matter_for_dynamic_rope() -> None:
    model = llama(rope_parameters=DYNAMIC)
    (problem,) = differences(saved_by(model, max_position_embeddings=4096), model)
    assert problem.subject == "max_position_embeddings"


def test_model_type_of_nested_config_is_compared() -> None:
    case = FamilyCase(registry.model_class("LlavaForConditionalGeneration"), torch.device("meta"))
    model = case.model_class.from_config(case.config, device="meta")
    saved = saved_by(model)
    saved["text_config"]["model_type"] = "mistral"
    assert "text_config.model_type" in {problem.subject for problem in differences(saved, model)}


def test_model_type_is_compared() -> None:
    mistral = AutoModelForCausalLM.from_config(tiny_config(MistralConfig, {}), device="meta")
    (problem,) = differences(saved_by(llama()), mistral)
    assert (problem.subject, problem.detail) == (
        "model_type",
        "is 'llama' in the checkpoint, 'mistral' in the model",
    )


@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "GPT2LMHeadModel", "GptOssForCausalLM"])
def test_nested_and_renamed_keys_are_compared(architecture: str) -> None:
    case = FamilyCase(registry.model_class(architecture), torch.device("meta"))
    model = case.model_class.from_config(case.config, device="meta")
    saved = saved_by(model, transformers_version="4.40.0", use_cache=False)
    assert list(differences(saved, model)) == []
    changed = copy.deepcopy(saved)
    path = {"GPT2LMHeadModel": "n_head", "GptOssForCausalLM": "num_experts_per_tok"}.get(architecture)
    if path is None:
        changed["text_config"]["rms_norm_eps"] = 0.1
        path = "text_config.rms_norm_eps"
    else:
        changed[path] = 1
    assert [problem.subject for problem in differences(changed, model)] == [path]
