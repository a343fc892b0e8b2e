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


def by_class(found: Any) -> dict[str, list[tuple[str, ...]]]:
    return {name.partition(":")[2]: groups for name, groups in found.groups.items()}


def test_a_text_model() -> None:
    found = detect(LlamaForCausalLM)
    assert found.ok
    assert (found.architecture, found.model_type, found.modalities) == ("LlamaForCausalLM", "llama", ("text",))
    assert found.groups == {
        f"{LLAMA}:LlamaAttention": [("q_proj", "k_proj", "v_proj")],
        f"{LLAMA}:LlamaMLP": [("gate_proj", "up_proj")],
    }
    assert not found.obstacles


def test_a_tower_is_looked_at_too() -> None:
    found = detect(Gemma3ForConditionalGeneration)
    assert found.modalities == ("text", "images")
    assert by_class(found) == {
        "SiglipAttention": [("q_proj", "k_proj", "v_proj")],
        "Gemma3Attention": [("q_proj", "k_proj", "v_proj")],
        "Gemma3MLP": [("gate_proj", "up_proj")],
    }


def test_a_hybrid() -> None:
    assert by_class(detect(Qwen3NextForCausalLM)) == {
        "Qwen3NextGatedDeltaNet": [("in_proj_qkvz", "in_proj_ba")],
        "Qwen3NextAttention": [("q_proj", "k_proj", "v_proj")],
        "Qwen3NextMLP": [("gate_proj", "up_proj")],
    }


def test_what_cannot_be_combined_is_told() -> None:
    found = detect(transformers.WhisperForCausalLM)
    assert found.ok
    assert by_class(found) == {}
    (reasons,) = found.obstacles.values()
    assert reasons == ["q_proj + k_proj + v_proj: mixed bias: k_proj without"]


def test_a_class_that_is_self_attention_and_cross_attention_has_a_group_in_each_place() -> None:
    found = detect(transformers.BlipForConditionalGeneration)
    (layer,) = found.groups
    assert found.declarations(layer) == ["query key value @ attention", "key value @ crossattention"]
    assert not found.obstacles
    assert found.places == {layer: {("query", "key", "value"): "attention", ("key", "value"): "crossattention"}}


@since("5.9")
def test_linears_that_are_one_tensor_on_disk_keep_its_order() -> None:
    assert by_class(detect(transformers.HrmTextForCausalLM))["HrmTextAttention"] == [
        ("gate_proj", "q_proj", "k_proj", "v_proj")
    ]


@pytest.mark.skipif(not hasattr(transformers, "HYV4ForCausalLM"), reason="needs transformers 5.18")
def test_a_linear_that_stays_in_fp32_is_not_combined_with_others() -> None:
    found = detect(transformers.HYV4ForCausalLM)
    assert "HYV4Indexer" not in by_class(found)
    (reasons,) = found.obstacles.values()
    assert reasons == ["wk + weights_proj: mixed dtypes: weights_proj stays in fp32 where the others are bf16"]


def test_layers_of_one_class_that_differ_give_the_largest_group_and_what_is_not_called() -> None:
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

    found = detect(Model, overrides={"attention_bias": True})
    assert found.ok, found.failure
    (name,) = [name for name in found.groups if name.endswith("Attention")]
    assert found.groups[name] == [("q_proj", "k_proj", "v_proj", "gate")]
    assert found.uncalled == {name: ("gate",)}


@pytest.mark.parametrize(
    ("step", "bug", "words"),
    [
        ("build", lambda m: 1 / 0, "ZeroDivisionError"),
        ("text", lambda m: setattr(m, "forward", lambda input_ids=None, **kwargs: 1 / 0), "ZeroDivisionError"),
        ("backward", lambda m: setattr(m, "loss_function", lambda **kwargs: None), "the loss is None"),
        ("text", lambda m: m.lm_head.register_forward_hook(lambda *a: a[-1] / 0), "not finite"),
    ],
)
def test_a_failure_is_a_result_that_names_the_step(step: str, bug: Any, words: str) -> None:
    class Model(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            bug(self)

    found = detect(Model)
    assert not found.ok
    assert found.step == step
    assert words in found.failure


def test_an_image_that_does_not_reach_the_logits_is_a_failure() -> None:
    class Blind(Gemma3ForConditionalGeneration):
        def forward(self, pixel_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(pixel_values=None if pixel_values is None else pixel_values * 0, **kwargs)

    # The class itself defines `get_image_features` and the signature of forward.
    Blind.forward.__signature__ = inspect.signature(Gemma3ForConditionalGeneration.forward)
    found = detect(Blind)
    assert found.step == "images"
    assert "do not depend on images" in found.failure


def test_nothing_random_is_drawn_and_every_registered_declaration_agrees() -> None:
    state = torch.get_rng_state()
    for name in ("Qwen2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3ForCausalLM"):
        family = registry.model_class(name)
        found = by_class(detect(family.reference_class()))
        declared = {
            original.__name__: list(rewrite.combined.values())
            for original, rewrite in family.rewrites.items()
            if issubclass(rewrite, CombinedProjections)
        }
        assert found.keys() == declared.keys()
        assert all(set(group) <= set(declared[layer][0]) for layer, groups in found.items() for group in groups)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_remembers_an_images_offset_is_found() -> None:
    kept = "transformers.models.qwen2_vl.modeling_qwen2_vl:Qwen2VLModel"
    assert detect(transformers.Qwen2VLForConditionalGeneration).keeps_offsets == (kept,)
    assert detect(transformers.Gemma3ForConditionalGeneration).keeps_offsets == ()
