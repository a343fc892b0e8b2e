"""Rules for tiny configurations of any decoder: the class keeps its distinctive features, and its model runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from config.published_configs import STORED_OTHERWISE, published, shrunk
from transformers import (
    DeepseekV3Config,
    GemmaConfig,
    GPT2Config,
    HunYuanMoEV1Config,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3NextConfig,
    ZambaConfig,
)
from transformers.models.auto import modeling_auto
from transformers.utils import logging
from versions import since

from nrl_models import registry
from nrl_models.common.config.walk import all_values, parts, walk
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.inspect import expert_counts
from nrl_models.testing import sizes
from nrl_models.testing.tiny import TinyModelError, find_tiny, tiny_config

MAPPINGS = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
NO_DEFAULT = {"Gemma4AssistantConfig", "VisionEncoderDecoderConfig"}  # their default configurations are not valid


def config_classes() -> list[type[PreTrainedConfig]]:
    """Return the configurations of every decoder in transformers, text or vision-language."""
    names = [
        element
        for mapping in MAPPINGS
        for value in mapping.values()
        for element in ([value] if isinstance(value, str) else value)
    ]
    model_classes = (getattr(transformers, name, None) for name in names)
    return list(dict.fromkeys(model_class.config_class for model_class in model_classes if model_class is not None))


def all_parts(config: PreTrainedConfig, path: str = "") -> dict[str, PreTrainedConfig]:
    inside = {f"{path}.{key}": part for key, part in parts(config).items()}
    return {path: config} | {k: v for key, part in inside.items() for k, v in all_parts(part, key).items()}


def layer_kinds(config: PreTrainedConfig) -> set[Any]:
    keys = ("layer_types", "layers_block_type", "mlp_layer_types")
    return {
        (path, key, kind)
        for path, part in all_parts(config).items()
        for key in keys
        for kind in getattr(part, key, None) or ()
    }


NO_FEATURE = (
    "token_id",
    "dropout",
    "dropout_prob",
    "pdrop",
    "transformers_version",
    "architectures",
    *STORED_OTHERWISE,
)
"""Ends of keys that do not select a model's layers."""


def features(config: PreTrainedConfig) -> set[tuple[str, bool]]:
    """Return the path of each key, and whether it is set: `num_kv_shared_layers`, `num_experts`, `attention_k_eq_v`."""
    return {(path, bool(value)) for path, _, key, value in walk(config) if not key.endswith(NO_FEATURE)}


def model_class(name: str) -> Any:
    if (class_ := getattr(transformers, name, None)) is None:
        pytest.skip(f"this transformers has no {name}")
    return class_


@pytest.fixture
def quiet() -> Any:
    before = logging.get_verbosity()
    logging.set_verbosity(100)
    yield
    logging.set_verbosity(before)


@pytest.mark.long
@since("5.24")  # older versions lack some of the configurations
@pytest.mark.usefixtures("quiet")
def test_tiny_published_configs_keep_kinds_of_layers_and_features(tmp_path: Path) -> None:
    registry.register_custom_configs()
    file, lost = tmp_path / "config.json", {}
    for repository, entry in published().items():
        file.write_text(json.dumps(dict(entry.config)))
        config = read_config(tmp_path)
        file.write_text(json.dumps(shrunk(entry, config)))
        tiny = read_config(tmp_path)
        if different := (layer_kinds(config) - layer_kinds(tiny)) | (features(config) - features(tiny)):
            lost[repository] = different
    assert not lost


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
def test_all_decoders_keep_layer_types_and_valid_token_ids() -> None:
    wrong = []
    for config_class in config_classes():
        if config_class.__name__ in NO_DEFAULT:
            continue
        default = config_class()
        config = tiny_config(default)
        text = config.get_text_config(decoder=True)
        lost = layer_kinds(default) - layer_kinds(config)
        outside = [
            (key, value)
            for key, value in all_values(config)
            if sizes.is_token(key) and type(value) is int and not -1 <= value < getattr(text, "vocab_size", 10**6)
        ]
        wide = [
            (path, part.hidden_size)
            for path, part in all_parts(config).items()
            if type(getattr(part, "hidden_size", None)) is int and part.hidden_size > sizes.WIDTH
        ]
        single = 1 in expert_counts(config)
        if lost or outside or wide or single:
            wrong.append((config_class.__name__, lost, outside, wide, single))
    assert len(config_classes()) > 200
    assert not wrong


# Layers


def test_kv_shared_layers_follow_every_layer_type() -> None:
    config = tiny_config(model_class("Gemma3nForCausalLM").config_class)
    sharing = config.num_kv_shared_layers
    assert sharing == 2
    assert set(config.layer_types[-sharing:]) == {"sliding_attention", "full_attention"}
    assert set(config.layer_types[:-sharing]) == {"sliding_attention", "full_attention"}
    # one layer with sparse activations and one without
    assert set(config.activation_sparsity_pattern) == {0.95, 0.0}
    assert len(config.activation_sparsity_pattern) == config.num_hidden_layers == len(config.intermediate_size)


def test_moe_keeps_one_leading_dense_layer() -> None:
    assert DeepseekV3Config().first_k_dense_replace == 3
    assert tiny_config(DeepseekV3Config).first_k_dense_replace == 1
    assert tiny_config(DeepseekV3Config).num_hidden_layers == 2
    all_sparse = DeepseekV3Config(first_k_dense_replace=0)
    assert tiny_config(all_sparse).first_k_dense_replace == 0


def test_hybrid_keeps_one_layer_of_each_type() -> None:
    config = tiny_config(Qwen3NextConfig)
    assert config.layer_types == ["linear_attention", "full_attention"]
    config = tiny_config(JambaConfig)  # its configuration uses periods
    assert config.layers_block_type == ["mamba", "attention"]
    assert config.layers_num_experts == [1, 4]


def test_shared_block_is_used_twice() -> None:
    assert tiny_config(ZambaConfig).layers_block_type.count("hybrid") == 2


def test_layer_indices_are_renumbered() -> None:
    config = tiny_config(model_class("MllamaForConditionalGeneration").config_class)
    text, vision = config.text_config, config.vision_config
    assert (text.num_hidden_layers, text.cross_attention_layers) == (2, [1])
    assert (vision.num_hidden_layers, vision.intermediate_layers_indices) == (2, [1])
    assert vision.vision_output_dim == 2 * vision.hidden_size  # the last layer, and each of these


def test_per_layer_values_keep_proportions() -> None:
    config = tiny_config(model_class("Gemma4ForCausalLM").config_class)
    if not getattr(config, "is_heterogeneous", False):
        pytest.skip("this transformers has no values for single layers")
    heads = {kind: config.per_layer_config[layer].head_dim for layer, kind in enumerate(config.layer_types)}
    assert heads == {"sliding_attention": 32, "full_attention": 64}  # of 256 and 512


# Values


def test_disabled_features_stay_disabled() -> None:
    config = tiny_config(MixtralConfig)
    assert MixtralConfig().sliding_window is None
    assert config.sliding_window is None
    config = tiny_config(Qwen3Config)
    assert not config.attention_bias
    assert tiny_config(model_class("Cohere2ForCausalLM").config_class).sliding_window == 8


def test_router_chooses_from_more_experts_than_it_takes() -> None:
    default = HunYuanMoEV1Config()
    assert (default.num_experts, default.moe_topk) == (1, 1)
    config = tiny_config(default)
    assert (config.num_experts, config.moe_topk) == (4, 2)


def test_single_expert_group_is_not_split() -> None:
    assert tiny_config(DeepseekV3Config).n_group == 2
    assert tiny_config(DeepseekV3Config(n_group=1, topk_group=1)).n_group == 1


def test_tiny_config_keeps_equations_of_default() -> None:
    config = tiny_config(DeepseekV3Config)
    assert config.num_key_value_heads == config.num_attention_heads == 8
    assert config.qk_head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert config.head_dim == config.qk_rope_head_dim
    config = tiny_config(Mamba2Config)
    assert config.num_heads * config.head_dim == config.hidden_size * config.expand


def test_aliased_size_names_are_shrunk() -> None:
    config = tiny_config(GPT2Config)
    assert (config.n_embd, config.n_head, config.n_layer, config.n_positions) == (256, 8, 2, 256)


def test_lists_keep_length_and_proportions() -> None:
    config = tiny_config(model_class("Florence2ForConditionalGeneration").config_class)
    assert list(config.vision_config.embed_dim) == [32, 64, 128, 256]
    assert list(config.vision_config.num_heads) == [1, 2, 4, 8]
    assert list(config.vision_config.patch_size) == [7, 3, 3, 3]  # smaller than a tiny patch


def test_special_tokens_keep_equality_relations() -> None:
    default, config = Qwen2_5_VLConfig(), tiny_config(Qwen2_5_VLConfig)
    keys = [key for key in default.to_dict() if sizes.is_token(key)]
    old, new = [getattr(default, key) for key in keys], [getattr(config, key) for key in keys]
    assert len(keys) >= 4
    for index in range(len(keys)):
        for other in range(len(keys)):
            assert (old[index] == old[other]) == (new[index] == new[other])
    assert all(value >= sizes.FIRST_SPECIAL for value in new)


@pytest.mark.parametrize(
    ("name", "pairs"), [("Qwen2_5_VLForConditionalGeneration", 16), ("Glm4vMoeForConditionalGeneration", 8)]
)
def test_mrope_sections_cover_all_rotated_pairs(name: str, pairs: int) -> None:
    config = tiny_config(model_class(name).config_class).get_text_config()
    sections = config.rope_parameters["mrope_section"]
    assert len(sections) == 3
    assert sum(sections) == pairs
    assert min(sections) > 0


def test_passed_config_is_respected_and_not_modified() -> None:
    original = GemmaConfig(hidden_size=2048, attention_bias=True, head_dim=64, rms_norm_eps=1e-3)
    before = original.to_dict()
    config = tiny_config(original)
    assert original.to_dict() == before
    assert (config.attention_bias, config.rms_norm_eps, config.hidden_size) == (True, 1e-3, 256)


def test_parent_config_values_are_kept() -> None:
    # LLaVA's tower is a CLIP without some of CLIP's defaults. LLaVA's configuration sets them.
    config_class = model_class("LlavaForConditionalGeneration").config_class
    default, config = config_class(), tiny_config(config_class)
    assert default.vision_config.projection_dim != type(default.vision_config)().projection_dim
    assert config.vision_config.projection_dim == sizes.WIDTH
    assert config.vision_config.patch_size == 14


# Classes whose default configuration is not sufficient


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("LlamaForCausalLM", ""),
        ("Gemma4ForConditionalGeneration", "vision_config"),  # but not experts, although they are also unset
        ("HunYuanDenseV1ForCausalLM", "head_dim"),
        pytest.param("DbrxForCausalLM", "clip_qkv, DbrxAttentionConfig.rope_theta", marks=since("5.15")),
        ("Dots1ForCausalLM", "n_shared_experts, n_routed_experts, num_experts_per_tok"),
        ("BambaForCausalLM", "attn_layer_indices"),
        ("Lfm2MoeForCausalLM", "layer_types"),
    ],
)
def test_find_tiny_sets_only_required_values(name: str, needs: str) -> None:
    result = find_tiny(model_class(name).config_class, None, model_class(name))
    assert str(result.needs) == needs
    assert result.failure is None
    assert result.reached == "forward"


def test_model_without_attention_layers_gets_one() -> None:
    result = find_tiny(model_class("Lfm2MoeForCausalLM").config_class, None, model_class("Lfm2MoeForCausalLM"))
    assert result.config is not None
    assert result.config.layer_types == ["conv", "full_attention"]


def test_unbuildable_config_raises_with_advice() -> None:
    with pytest.raises(TinyModelError, match=r"LlamaForCausalLM: .*hidden size \(250\) .* family's `tiny`"):
        tiny_config(LlamaConfig, {"hidden_size": 250, "num_attention_heads": 8}, model_class("LlamaForCausalLM"))


def test_overrides_apply_to_nested_configs() -> None:
    config = tiny_config(Qwen2_5_VLConfig, {"text_config": {"num_key_value_heads": 2}, "image_token_id": 7})
    assert config.text_config.num_key_value_heads == 2
    assert config.text_config.num_attention_heads == 8
    assert config.image_token_id == 7


def test_num_hidden_layers_override_updates_layer_types() -> None:
    default = tiny_config(Qwen3NextConfig)
    assert default.layer_types == ["linear_attention", "full_attention"]
    assert tiny_config(Qwen3NextConfig, {"num_hidden_layers": 1}).layer_types == ["linear_attention"]
    more = tiny_config(Qwen3NextConfig, {"num_hidden_layers": 4})
    assert sorted(more.layer_types) == ["full_attention", *["linear_attention"] * 3]


def test_tiny_config_is_deterministic_and_a_copy() -> None:
    state = torch.get_rng_state()
    first = tiny_config(Qwen3Config, None, model_class("Qwen3ForCausalLM"))
    first.layer_types.append("full_attention")
    first.hidden_size = 1
    again = tiny_config(Qwen3Config, None, model_class("Qwen3ForCausalLM"))
    assert (again.hidden_size, len(again.layer_types)) == (256, 2)
    assert torch.equal(torch.get_rng_state(), state)
