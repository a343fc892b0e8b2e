"""Detecting the groups of a model class, from its classes alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import Gemma3ForConditionalGeneration, LlamaConfig, LlamaForCausalLM, Qwen3NextForCausalLM
from transformers.models.llama import modeling_llama
from versions import since

from nrl_models import registry
from nrl_models.common.projections import CombinedProjections
from nrl_models.onboarding.detect import detect

LLAMA = "transformers.models.llama.modeling_llama"


def by_class(detection: Any) -> dict[str, list[tuple[str, ...]]]:
    return {name.partition(":")[2]: groups for name, groups in detection.groups.items()}


def test_detect_text_model() -> None:
    detection = detect(LlamaForCausalLM)
    assert detection.ok
    assert (detection.architecture, detection.model_type, detection.modalities) == (
        "LlamaForCausalLM",
        "llama",
        ("text",),
    )
    assert detection.groups == {
        f"{LLAMA}:LlamaAttention": [("q_proj", "k_proj", "v_proj")],
        f"{LLAMA}:LlamaMLP": [("gate_proj", "up_proj")],
    }
    assert not detection.obstacles


def test_detect_includes_vision_tower() -> None:
    detection = detect(Gemma3ForConditionalGeneration)
    assert detection.modalities == ("text", "images")
    assert by_class(detection) == {
        "SiglipAttention": [("q_proj", "k_proj", "v_proj")],
        "Gemma3Attention": [("q_proj", "k_proj", "v_proj")],
        "Gemma3MLP": [("gate_proj", "up_proj")],
    }


def test_detect_hybrid_model() -> None:
    assert by_class(detect(Qwen3NextForCausalLM)) == {
        "Qwen3NextGatedDeltaNet": [("in_proj_qkvz", "in_proj_ba")],
        "Qwen3NextAttention": [("q_proj", "k_proj", "v_proj")],
        "Qwen3NextMLP": [("gate_proj", "up_proj")],
    }


def test_detect_reports_obstacles() -> None:
    detection = detect(transformers.WhisperForCausalLM)
    assert detection.ok
    assert by_class(detection) == {}
    (reasons,) = detection.obstacles.values()
    assert reasons == ["q_proj + k_proj + v_proj: mixed bias: k_proj without"]


def test_self_and_cross_attention_of_one_class() -> None:
    detection = detect(transformers.BlipForConditionalGeneration)
    (layer,) = detection.groups
    assert detection.declarations(layer) == ["query key value @ attention", "key value @ crossattention"]
    assert not detection.obstacles
    assert detection.places == {layer: {("query", "key", "value"): "attention", ("key", "value"): "crossattention"}}


@since("5.9")
def test_group_order_follows_fused_tensor_on_disk() -> None:
    assert by_class(detect(transformers.HrmTextForCausalLM))["HrmTextAttention"] == [
        ("gate_proj", "q_proj", "k_proj", "v_proj")
    ]


@pytest.mark.skipif(not hasattr(transformers, "HYV4ForCausalLM"), reason="needs transformers 5.18")
def test_fp32_linear_is_not_combined() -> None:
    detection = detect(transformers.HYV4ForCausalLM)
    assert "HYV4Indexer" not in by_class(detection)
    (reasons,) = detection.obstacles.values()
    assert reasons == ["wk + weights_proj: mixed dtypes: weights_proj stays in fp32 where the others are bf16"]


def test_differing_layers_give_largest_group() -> None:
    class Attention(modeling_llama.LlamaAttention):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.gate = nn.Linear(config.hidden_size, config.hidden_size)
            self.layer_idx = layer_idx

        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            output, weights = super().forward(hidden_states, **kwargs)
            return (output * self.gate(hidden_states), weights) if self.layer_idx else (output, weights)

    class Model(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            for index, layer in enumerate(self.model.layers):
                layer.self_attn = Attention(config, index)

    detection = detect(Model, overrides={"attention_bias": True})
    assert detection.ok, detection.failure
    (name,) = [name for name in detection.groups if name.endswith("Attention")]
    assert detection.groups[name] == [("q_proj", "k_proj", "v_proj", "gate")]
    assert detection.uncalled == {name: ("gate",)}


@pytest.mark.parametrize(
    ("step", "bug", "words"),
    [
        ("build", lambda m: 1 / 0, "ZeroDivisionError"),
        ("text", lambda m: setattr(m, "forward", lambda input_ids=None, **kwargs: 1 / 0), "ZeroDivisionError"),
        ("backward", lambda m: setattr(m, "loss_function", lambda **kwargs: None), "the loss is None"),
        ("text", lambda m: m.lm_head.register_forward_hook(lambda *a: a[-1] / 0), "not finite"),
    ],
)
def test_failure_names_step(step: str, bug: Any, words: str) -> None:
    class Model(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            bug(self)

    detection = detect(Model)
    assert not detection.ok
    assert detection.step == step
    assert words in detection.failure


def test_ignored_image_is_a_failure() -> None:
    class Blind(Gemma3ForConditionalGeneration):
        def forward(self, pixel_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(pixel_values=None if pixel_values is None else pixel_values * 0, **kwargs)

    # The class itself defines `get_image_features` and the signature of forward.
    Blind.forward.__signature__ = inspect.signature(Gemma3ForConditionalGeneration.forward)
    detection = detect(Blind)
    assert detection.step == "images"
    assert "do not depend on images" in detection.failure


def test_detection_matches_families_and_keeps_rng_state() -> None:
    state = torch.get_rng_state()
    for name in ("Qwen2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3ForCausalLM"):
        family = registry.model_class(name)
        detected = by_class(detect(family.reference_class()))
        declared = {
            original.__name__: list(rewrite.combined.values())
            for original, rewrite in family.rewrites.items()
            if issubclass(rewrite, CombinedProjections)
        }
        assert detected.keys() == declared.keys()
        assert all(set(group) <= set(declared[layer][0]) for layer, groups in detected.items() for group in groups)
    assert torch.equal(torch.get_rng_state(), state)


def test_detect_models_that_keep_mrope_offsets() -> None:
    model_class = "transformers.models.qwen2_vl.modeling_qwen2_vl:Qwen2VLModel"
    assert detect(transformers.Qwen2VLForConditionalGeneration).keeps_offsets == (model_class,)
    assert detect(transformers.Gemma3ForConditionalGeneration).keeps_offsets == ()
