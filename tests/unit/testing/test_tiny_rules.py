"""Rules for tiny configurations of any decoder: the class keeps its distinctive features, and its model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DeepseekV3Config,
    GemmaConfig,
    GPT2Config,
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

from nrl_models.common.config.walk import all_values, parts
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
    found = (getattr(transformers, name, None) for name in names)
    return list(dict.fromkeys(model_class.config_class for model_class in found if model_class is not None))


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


def model_class(name: str) -> Any:
    if (found := getattr(transformers, name, None)) is None:
        pytest.skip(f"this transformers has no {name}")
    return found


@pytest.fixture
def quiet() -> Any:
    before = logging.get_verbosity()
    logging.set_verbosity(100)
    yield
    logging.set_verbosity(before)


@pytest.mark.usefixtures("quiet")
def test_every_decoder_of_transformers_keeps_its_kinds_of_layers_and_has_its_tokens_among_its_words() -> None:
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
        if lost or outside or wide:
            wrong.append((config_class.__name__, lost, outside, wide))
    assert len(config_classes()) > 200
    assert not wrong


# Layers


def test_layers_that_share_keys_come_after_one_of_each_type_that_has_them() -> None:
    config = tiny_config(model_class("Gemma3nForCausalLM").config_class)
    sharing = config.num_kv_shared_layers
    assert sharing == 2
    assert set(config.layer_types[-sharing:]) == {"sliding_attention", "full_attention"}
    assert set(config.layer_types[:-sharing]) == {"sliding_attention", "full_attention"}
    # one layer with sparse activations and one without
    assert set(config.activation_sparsity_pattern) == {0.95, 0.0}
    assert len(config.activation_sparsity_pattern) == config.num_hidden_layers == len(config.intermediate_size)


def test_a_mixture_keeps_a_dense_layer_where_it_starts_with_some_and_only_there() -> None:
    assert DeepseekV3Config().first_k_dense_replace == 3
    assert tiny_config(DeepseekV3Config).first_k_dense_replace == 1
    assert tiny_config(DeepseekV3Config).num_hidden_layers == 2
    all_sparse = DeepseekV3Config(first_k_dense_replace=0)
    assert tiny_config(all_sparse).first_k_dense_replace == 0


def test_a_hybrid_keeps_one_layer_of_each_kind() -> None:
    config = tiny_config(Qwen3NextConfig)
    assert config.layer_types == ["linear_attention", "full_attention"]
    config = tiny_config(JambaConfig)  # its configuration uses periods
    assert config.layers_block_type == ["mamba", "attention"]
    assert config.layers_num_experts == [1, 4]


def test_a_block_that_layers_share_is_there_for_two() -> None:
    assert tiny_config(ZambaConfig).layers_block_type.count("hybrid") == 2


def test_numbers_of_layers_are_renumbered() -> None:
    config = tiny_config(model_class("MllamaForConditionalGeneration").config_class)
    text, vision = config.text_config, config.vision_config
    assert (text.num_hidden_layers, text.cross_attention_layers) == (2, [1])
    assert (vision.num_hidden_layers, vision.intermediate_layers_indices) == (2, [1])
    assert vision.vision_output_dim == 2 * vision.hidden_size  # the last layer, and each of these


def test_layers_with_values_of_their_own_keep_them_in_proportion() -> None:
    config = tiny_config(model_class("Gemma4ForCausalLM").config_class)
    if not getattr(config, "is_heterogeneous", False):
        pytest.skip("this transformers has no values for single layers")
    heads = {kind: config.per_layer_config[layer].head_dim for layer, kind in enumerate(config.layer_types)}
    assert heads == {"sliding_attention": 32, "full_attention": 64}  # of 256 and 512


# Values


def test_what_is_off_stays_off() -> None:
    config = tiny_config(MixtralConfig)
    assert MixtralConfig().sliding_window is None
    assert config.sliding_window is None
    config = tiny_config(Qwen3Config)
    assert not config.attention_bias
    assert tiny_config(model_class("Cohere2ForCausalLM").config_class).sliding_window == 8


def test_a_group_of_experts_is_never_made_two() -> None:
    assert tiny_config(DeepseekV3Config).n_group == 2
    assert tiny_config(DeepseekV3Config(n_group=1, topk_group=1)).n_group == 1


def test_equations_that_hold_in_the_default_hold_in_the_tiny_one() -> None:
    config = tiny_config(DeepseekV3Config)
    assert config.num_key_value_heads == config.num_attention_heads == 8
    assert config.qk_head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert config.head_dim == config.qk_rope_head_dim
    config = tiny_config(Mamba2Config)
    assert config.num_heads * config.head_dim == config.hidden_size * config.expand


def test_other_names_for_a_size_count_as_the_size() -> None:
    config = tiny_config(GPT2Config)
    assert (config.n_embd, config.n_head, config.n_layer, config.n_positions) == (256, 8, 2, 256)


def test_lists_keep_their_length_and_their_proportions() -> None:
    config = tiny_config(model_class("Florence2ForConditionalGeneration").config_class)
    assert list(config.vision_config.embed_dim) == [32, 64, 128, 256]
    assert list(config.vision_config.num_heads) == [1, 2, 4, 8]
    assert list(config.vision_config.patch_size) == [7, 3, 3, 3]  # smaller than a tiny patch


def test_special_tokens_that_differ_still_do_and_those_that_do_not_do_not() -> None:
    default, config = Qwen2_5_VLConfig(), tiny_config(Qwen2_5_VLConfig)
    keys = [key for key in default.to_dict() if sizes.is_token(key)]
    old, new = [getattr(default, key) for key in keys], [getattr(config, key) for key in keys]
    assert len(keys) >= 4
    for place in range(len(keys)):
        for other in range(len(keys)):
            assert (old[place] == old[other]) == (new[place] == new[other])
    assert all(value >= sizes.FIRST_SPECIAL for value in new)


@pytest.mark.parametrize(
    ("name", "pairs"), [("Qwen2_5_VLForConditionalGeneration", 16), ("Glm4vMoeForConditionalGeneration", 8)]
)
def test_three_kinds_of_positions_share_all_rotated_pairs(name: str, pairs: int) -> None:
    config = tiny_config(model_class(name).config_class).get_text_config()
    sections = config.rope_parameters["mrope_section"]
    assert len(sections) == 3
    assert sum(sections) == pairs
    assert min(sections) > 0


def test_what_a_given_configuration_says_is_kept_and_the_configuration_is_not_changed() -> None:
    given = GemmaConfig(hidden_size=2048, attention_bias=True, head_dim=64, rms_norm_eps=1e-3)
    before = given.to_dict()
    config = tiny_config(given)
    assert given.to_dict() == before
    assert (config.attention_bias, config.rms_norm_eps, config.hidden_size) == (True, 1e-3, 256)


def test_what_a_parent_gives_its_part_is_kept() -> None:
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
def test_a_class_is_given_what_it_cannot_do_without_and_no_more(name: str, needs: str) -> None:
    found = find_tiny(model_class(name).config_class, None, model_class(name))
    assert str(found.needs) == needs
    assert found.failure is None
    assert found.reached == "forward"


def test_a_model_without_attention_among_its_layers_is_given_some() -> None:
    found = find_tiny(model_class("Lfm2MoeForCausalLM").config_class, None, model_class("Lfm2MoeForCausalLM"))
    assert found.config is not None
    assert found.config.layer_types == ["conv", "full_attention"]


def test_a_class_that_cannot_be_built_says_why_and_what_to_do() -> None:
    with pytest.raises(TinyModelError, match=r"LlamaForCausalLM: .*hidden size \(250\) .* family's `tiny`"):
        tiny_config(LlamaConfig, {"hidden_size": 250, "num_attention_heads": 8}, model_class("LlamaForCausalLM"))


def test_overrides_reach_nested_parts_and_win() -> None:
    config = tiny_config(Qwen2_5_VLConfig, {"text_config": {"num_key_value_heads": 2}, "image_token_id": 7})
    assert config.text_config.num_key_value_heads == 2
    assert config.text_config.num_attention_heads == 8
    assert config.image_token_id == 7


def test_an_overridden_number_of_layers_is_one_for_everything_about_layers() -> None:
    default = tiny_config(Qwen3NextConfig)
    assert default.layer_types == ["linear_attention", "full_attention"]
    assert tiny_config(Qwen3NextConfig, {"num_hidden_layers": 1}).layer_types == ["linear_attention"]
    more = tiny_config(Qwen3NextConfig, {"num_hidden_layers": 4})
    assert sorted(more.layer_types) == ["full_attention", *["linear_attention"] * 3]


def test_the_answer_is_the_same_each_time_and_a_copy() -> None:
    state = torch.get_rng_state()
    first = tiny_config(Qwen3Config, None, model_class("Qwen3ForCausalLM"))
    first.layer_types.append("full_attention")
    first.hidden_size = 1
    again = tiny_config(Qwen3Config, None, model_class("Qwen3ForCausalLM"))
    assert (again.hidden_size, len(again.layer_types)) == (256, 2)
    assert torch.equal(torch.get_rng_state(), state)
