"""Metadata that changes the model's output is either used or raises an error that names it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import new_model
from gguf_checkpoints import header_only, write_gguf
from transformers import AutoConfig, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from nrl_models import AutoModelForCausalLM, CheckpointError, check_parity
from nrl_models.common.gguf.gguf_metadata import HEAD_SIZES
from nrl_models.common.gguf.gguf_tables import configuration
from nrl_models.common.upstream import gguf_reading

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
POSITIONS = {"max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
TOKENS = torch.arange(2, 66)[None]


def yarn(**values: Any) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": scaling | values}


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}

Case = tuple[str, type[PreTrainedConfig], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "llama yarn": ("llama", LlamaConfig, yarn(), YARN),
    "llama yarn, attention": (
        "llama",
        LlamaConfig,
        yarn(attention_factor=0.5 * (0.1 * math.log(4) + 1)),
        YARN | {"rope.scaling.attn_factor": 0.5},
    ),
    "llama yarn, betas": (
        "llama",
        LlamaConfig,
        yarn(beta_fast=16.0, beta_slow=2.0),
        YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "llama linear": ("llama", LlamaConfig, LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama linear by default": ("llama", LlamaConfig, LINEAR, {"rope.scaling.factor": 4.0}),
    "llama none": ("llama", LlamaConfig, {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "qwen2 yarn": ("qwen2", Qwen2Config, yarn(), YARN),
    "qwen3moe yarn": (
        "qwen3moe",
        Qwen3MoeConfig,
        EXPERTS | yarn() | {"moe_intermediate_size": 48, "norm_topk_prob": True},
        YARN | EXPERT_KEYS,
    ),
    "qwen3moe norm": (
        "qwen3moe",
        Qwen3MoeConfig,
        EXPERTS | {"moe_intermediate_size": 48, "norm_topk_prob": False},
        EXPERT_KEYS | {"expert_weights_norm": False},
    ),
    "gemma2 softcaps": (
        "gemma2",
        Gemma2Config,
        {
            "attn_logit_softcapping": 0.02,
            "final_logit_softcapping": 0.5,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
        },
        {"attn_logit_softcapping": 0.02, "final_logit_softcapping": 0.5, "attention.sliding_window": 8},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_logits_match_equivalent_config(case: str, tmp_path: Path) -> None:
    architecture, config_class, settings, keys = CASES[case]
    model = new_model(config_class(**SIZES, **HEADS, **POSITIONS, **settings)).eval()
    model.set_attn_implementation("eager")  # in older releases, other attention implementations ignore softcaps
    file = tmp_path / "model.gguf"
    write_gguf(file, model, architecture, values={f"{architecture}.{key}": value for key, value in keys.items()})
    loaded = AutoModelForCausalLM.from_pretrained(file).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)
    assert check_parity(file).passed


def base_keys(architecture: str) -> dict[str, Any]:
    """Return the metadata keys of sizes that transformers maps for the architecture."""
    sizes = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
        "attention.key_length": 16,
        "rope.dimension_count": 16,
        "vocab_size": 320,
    }
    if architecture == "lfm2":
        sizes["attention.head_count_kv"] = [0, 4]  # type: ignore[assignment]
    if architecture in ("gemma4", "mamba"):  # heads that differ by layer, or no heads
        del sizes["attention.key_length"], sizes["rope.dimension_count"]
    if architecture == "stablelm":
        sizes["rope.dimension_count"] = 4
    return {key: value for key, value in sizes.items() if key in table(architecture) or key in HEAD_SIZES}


def table(architecture: str) -> dict[str, Any]:
    tables = gguf_reading().GGUF_TO_TRANSFORMERS_MAPPING["config"]
    return tables.get(TRANSFORMERS_NAMES.get(architecture, architecture)) or tables["t5"]


TRANSFORMERS_NAMES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
"""Architecture names of transformers by those of llama.cpp, which the files contain."""

_TABLES = {*gguf_reading().GGUF_SUPPORTED_ARCHITECTURES, "t5encoder"}
ARCHITECTURES = sorted(
    name
    for name in gguf.MODEL_ARCH_NAMES.values()
    if TRANSFORMERS_NAMES.get(name, name) in _TABLES and name not in ("deci", "gpt-oss")
)
"""Readable architectures, by llama.cpp's names. transformers has no model for deci, and misreads gpt-oss."""

UNSUPPORTED = {
    "residual_scale": 0.5,
    "embedding_scale": 12.0,
    "attention.scale": 0.5,
    "attention.clamp_kqv": 8.0,
    "rope.scaling.type": "longrope",
    "expert_group_scale": 0.5,
    "swiglu_clamp_exp": 7.0,
    "a_key_of_tomorrow": 3,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unsupported_keys_raise(architecture: str, tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", architecture, base_keys(architecture) | UNSUPPORTED)
    with pytest.raises(CheckpointError, match=r"a_key_of_tomorrow \(model\.gguf\): is 3") as caught:
        configuration(file)
    named = {problem.subject.removeprefix(f"{architecture}.") for problem in caught.value.problems}
    assert named >= UNSUPPORTED.keys() - {"attention.clamp_kqv"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_neutral_values_are_accepted(architecture: str, tmp_path: Path) -> None:
    neutral = {
        "residual_scale": 1.0,
        "embedding_scale": 0.0,
        "attention.causal": True,
        "rope.scaling.type": "none",
        "rope.scaling.finetuned": False,
        "expert_weights_scale": 0.0,
        "tensor_data_layout": "Meta AI original pth",
    }
    with_neutral = header_only(tmp_path / "a.gguf", architecture, base_keys(architecture) | neutral)
    without = header_only(tmp_path / "b.gguf", architecture, base_keys(architecture))
    assert configuration(with_neutral) == configuration(without)


def test_unsupported_sliding_window_raises(tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", "llama", base_keys("llama") | {"attention.sliding_window": 4096})
    with pytest.raises(CheckpointError, match=r"llama\.attention\.sliding_window \(model\.gguf\): is 4096"):
        configuration(file)


@pytest.mark.parametrize("architecture", ["starcoder2", "stablelm", "phi3"])
def test_rope_freq_base_is_used(architecture: str, tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", architecture, base_keys(architecture) | {"rope.freq_base": 50_000.0})
    config = AutoConfig.for_model(**configuration(file))
    assert config.rope_parameters["rope_theta"] == 50_000.0


def test_rope_scaling_applies_to_full_attention_only(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    file = header_only(tmp_path / "model.gguf", "gemma3", base_keys("gemma3") | keys)
    config = AutoConfig.for_model(**configuration(file))
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    assert (full["rope_type"], full["factor"], full["rope_theta"]) == ("linear", 8.0, 1e6)
    assert sliding["rope_type"] == "default"


def test_sliding_window_pattern_sets_layer_types(tmp_path: Path) -> None:
    for number, pattern in enumerate(([True, False], 2)):
        keys = base_keys("gemma3") | {"attention.sliding_window_pattern": pattern}
        config = AutoConfig.for_model(**configuration(header_only(tmp_path / f"{number}.gguf", "gemma3", keys)))
        assert config.layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("architecture", ["stablelm", "nemotron"])
def test_rope_dimension_count_is_used(architecture: str, tmp_path: Path) -> None:
    keys = base_keys(architecture) | {"rope.dimension_count": 12}
    config = AutoConfig.for_model(**configuration(header_only(tmp_path / "model.gguf", architecture, keys)))
    assert config.rope_parameters["partial_rotary_factor"] == 12 / 16


def test_zero_sliding_window_means_none(tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", "phi3", base_keys("phi3") | {"attention.sliding_window": 0})
    assert AutoConfig.for_model(**configuration(file)).sliding_window is None


@pytest.mark.skipif("gemma4" not in ARCHITECTURES, reason="transformers does not read such a file")
def test_gemma4_head_sizes_per_layer_type(tmp_path: Path) -> None:
    keys = {"attention.key_length": 512, "attention.value_length": 512, "rope.dimension_count": 512}
    keys |= {"attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256}
    file = header_only(tmp_path / "model.gguf", "gemma4", base_keys("gemma4") | keys)
    assert configuration(file)["global_head_dim"] == 512


@pytest.mark.parametrize(
    ("key", "value"), [("attention.causal", False), ("a_key_of_tomorrow", 0), ("a_list_of_tomorrow", [0.5] * 5000)]
)
def test_false_and_zero_values_raise(key: str, value: Any, tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", "llama", base_keys("llama") | {key: value})
    with pytest.raises(CheckpointError, match=key):
        configuration(file)


def test_attention_factors_are_multiplied(tmp_path: Path) -> None:
    factors = {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 0.5}
    file = header_only(tmp_path / "model.gguf", "llama", base_keys("llama") | YARN | factors)
    assert configuration(file)["rope_scaling"]["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(("name", "value"), [("factor", "2"), ("factor", -4.0), ("attn_factor", "x")])
def test_invalid_scaling_values_name_the_key(name: str, value: Any, tmp_path: Path) -> None:
    values = base_keys("llama") | YARN | {f"rope.scaling.{name}": value}
    with pytest.raises(CheckpointError, match=rf"llama\.rope\.scaling\.{name} .*expected a number"):
        configuration(header_only(tmp_path / "model.gguf", "llama", values))
