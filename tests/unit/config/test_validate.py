"""Validation raises an error for unsupported configuration values, and logs keys without an effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config
from published_configs import published
from transformers import (
    AutoConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    RwkvConfig,
    RwkvForCausalLM,
)

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.common.config.ignored import ignoring
from nrl_models.common.config.validate import check_config, examine
from nrl_models.errors import ConfigurationError, NRLModelsError, ProblemKind
from nrl_models.families.gemma3.model import Gemma3ForConditionalGeneration
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.loading.read_config import read_config
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config
from tools.ledger.ledger import KeyKind, recorded


def config_of(name: str, **changes: Any) -> tuple[type, PreTrainedConfig]:
    registry.register_custom_configs()
    values = dict(published()[name].config) | changes
    return registry.model_class(values["architectures"][0]), AutoConfig.for_model(**values)


def problems(model_class: type, config: PreTrainedConfig, ignored: Any = ()) -> dict[str, tuple[str, str]]:
    with pytest.raises(ConfigurationError) as caught:
        check_config(model_class, config, ignored)
    return {problem.subject: (problem.kind, problem.detail) for problem in caught.value.problems}


def llama_with(llama_config: LlamaConfig, **values: Any) -> LlamaConfig:
    return LlamaConfig(**llama_config.to_dict() | values)


@pytest.mark.parametrize("values", [
    {"is_llama_config": True}, {"unk_token_id": 3}, {"use_qk_norm": True}, {"position_embedding_type": "absolute"},
    {"mtp_num_hidden_layers": 1}, {"swa_head_dim": 192}, {"image_token_id": 7}, {"qkv_bias": False},
    {"logit_scale": 1.0}, {"attn_logit_softcapping": None}, {"rope_thetaa": 1e4},
    {"some_block": {"factor": 2}}, {"hidden_activation": "silu"},
])  # fmt: skip
def test_unread_key_is_logged_once(values: dict, llama_config: LlamaConfig, caplog: pytest.LogCaptureFixture) -> None:
    config = llama_with(llama_config, **values)
    config.name_or_path = f"a checkpoint with {values}"
    for _ in range(2):
        check_config(LlamaForCausalLM, config)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    ((key, value),) = values.items()
    assert caplog.text.rstrip().endswith(
        f"{config.name_or_path} has keys that nothing in LlamaForCausalLM reads; they are ignored: {key}: {value!r}"
    )


@pytest.mark.parametrize(("key", "value", "other"), [
    ("attn_logit_softcapping", 50.0, "Gemma2ForCausalLM"), ("logit_scale", 0.0625, "CohereForCausalLM"),
    ("residual_multiplier", 0.22, "GraniteForCausalLM"), ("query_pre_attn_scalar", 224, "Gemma2ForCausalLM"),
])  # fmt: skip
def test_value_used_by_other_models_raises(key: str, value: float, other: str, llama_config: LlamaConfig) -> None:
    kind, detail = problems(LlamaForCausalLM, llama_with(llama_config, **{key: value}))[key]
    assert kind == "unsupported"
    assert detail.startswith(f"is {value!r}; it changes the outputs of ")
    assert detail.endswith("but LlamaForCausalLM does not read it")
    assert recorded()[other].kinds.get(key) is KeyKind.OUTPUTS
    for neutral in (None, True, False, 0, 1.0, -1, "eager"):
        assert not examine(LlamaForCausalLM, llama_with(llama_config, **{key: neutral})).problems


@pytest.mark.parametrize(("misspelled", "value", "meant"), [
    ("num_key_value_head", 8, "num_key_value_heads"), ("rope_thetaa", 1e6, "rope_theta"),
    ("rms_norm_epsilon", 1e-5, "rms_norm_eps"), ("rope_scalings", {"factor": 2.0}, "rope_scaling"),
    ("rmsnorm_eps", 1e-5, "rms_norm_eps"), ("attn_bias", True, "attention_bias"), ("hiden_act", "gelu", "hidden_act"),
    ("tie_word_embedding", True, "tie_word_embeddings"), ("hidden_activation", "gelu", "hidden_act"),
    ("Hidden_Act", "gelu", "hidden_act"), ("num_hidden_layer", 0, "num_hidden_layers"),
])  # fmt: skip
def test_misspelled_key_raises_with_suggestion(
    misspelled: str, value: Any, meant: str, llama_config: LlamaConfig
) -> None:
    kind, detail = problems(LlamaForCausalLM, llama_with(llama_config, **{misspelled: value}))[misspelled]
    assert kind == "unknown"
    assert detail == f"is {value!r}, but neither LlamaConfig nor the model reads this key; did you mean {meant}?"


def test_same_value_under_other_name_is_only_logged(llama_config: LlamaConfig) -> None:
    same = {"decoder_attention_heads": llama_config.num_attention_heads, "layer_norm_eps": llama_config.rms_norm_eps}
    result = examine(LlamaForCausalLM, llama_with(llama_config, **same))
    assert not result.problems
    assert set(result.unread) == set(same)
    different = examine(LlamaForCausalLM, llama_with(llama_config, decoder_attention_heads=3, layer_norm_eps=0.5))
    assert {problem.subject for problem in different.problems} == set(same)


@pytest.mark.parametrize(("rope", "message"), [
    ({"rope_type": "su"}, "is 'su'; only 'default' or 'dynamic' or 'linear'"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "is 'linear', and type, its former name, is 'yarn'"),
])  # fmt: skip
def test_unknown_rope_type_raises(rope: dict, message: str, llama_config: LlamaConfig) -> None:
    llama_config.rope_parameters = {"rope_theta": 1e4, **rope}
    ((path, (kind, detail)),) = problems(LlamaForCausalLM, llama_config).items()
    assert path == "rope_parameters.rope_type"
    assert kind == "unsupported"
    assert detail.startswith(message)
    check_config(LlamaForCausalLM, llama_config, path)
    gemma = FamilyCase(Gemma3ForConditionalGeneration).config
    gemma.text_config.rope_parameters["full_attention"] |= rope
    assert set(problems(Gemma3ForConditionalGeneration, gemma)) == {
        "text_config.rope_parameters.full_attention.rope_type"
    }


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mlx_quantization_raises(key: str, folder: Path) -> None:
    edit_config(folder, **{key: {"group_size": 64, "bits": 4}})
    with pytest.raises(ConfigurationError, match=f"{key}: .* the format of MLX.*\n.*\n.*mlx_lm.convert --dequantize"):
        AutoModelForCausalLM.from_pretrained(folder)
    old_bitsandbytes = {"load_in_8bit": True, "bits": 8}
    assert not examine(LlamaForCausalLM, LlamaConfig(quantization_config=old_bitsandbytes)).problems


def test_removed_position_embedding_type_raises() -> None:
    _, config = config_of("google-bert/bert-base-uncased", position_embedding_type="relative_key")
    assert problems(registry.model_class("BertLMHeadModel"), config) == {
        "position_embedding_type": ("unsupported", "is 'relative_key'; only 'absolute' is supported"),
    }


def test_ignoring_context_ignores_keys(llama_config: LlamaConfig) -> None:
    config = llama_with(llama_config, attn_logit_softcapping=50.0)
    with ignoring(["attn_logit_softcapping"]):
        check_config(LlamaForCausalLM, config)
    assert set(problems(LlamaForCausalLM, config)) == {"attn_logit_softcapping"}


def test_error_lists_all_problems_with_suggestions(llama_config: LlamaConfig) -> None:
    config = LlamaConfig(**llama_config.to_dict(), rms_norm_epsilon=1e-5, attn_logit_softcapping=50.0)
    with pytest.raises(ConfigurationError) as caught:
        AutoModelForCausalLM.from_config(config)
    message = str(caught.value)
    assert "LlamaForCausalLM does not support (2 problems)" in message
    assert "rms_norm_epsilon: is 1e-05" in message
    assert "did you mean rms_norm_eps?" in message
    assert "attn_logit_softcapping: is 50.0; it changes the outputs of " in message
    assert "but LlamaForCausalLM does not read it" in message
    assert "ignore_config_keys=('rms_norm_epsilon', 'attn_logit_softcapping')" in message
    assert "--ignore-config-key KEY" in message


def test_config_is_validated_before_reading_weights(folder: Path) -> None:
    edit_config(folder, attention_bais=False)
    (folder / "model.safetensors").write_bytes(b"not what it was")
    with pytest.raises(ConfigurationError, match=r"attention_bais: is False.* did you mean attention_bias"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("ignored", ["logit_scale", ("logit_scale",), {"logit_scale", "something_else"}])
def test_ignore_config_keys_argument(folder: Path, ignored: Any) -> None:
    edit_config(folder, logit_scale=0.5)
    with pytest.raises(ConfigurationError, match="logit_scale"):
        LlamaForCausalLM.from_pretrained(folder)
    assert LlamaForCausalLM.from_pretrained(folder, ignore_config_keys=ignored).config.logit_scale == 0.5
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, ignore_config_keys=ignored)
    assert model.config.logit_scale == 0.5


def test_nested_keys_are_checked_and_ignored_by_path() -> None:
    config = FamilyCase(Gemma3ForConditionalGeneration).config
    config.vision_config.logit_scale = 0.5
    config.text_config.logit_scale = 0.5
    paths = {"text_config.logit_scale", "vision_config.logit_scale"}
    assert set(problems(Gemma3ForConditionalGeneration, config)) == paths
    assert set(problems(Gemma3ForConditionalGeneration, config, min(paths))) == {max(paths)}
    check_config(Gemma3ForConditionalGeneration, config, "logit_scale")


def test_generation_and_bookkeeping_keys_pass(llama_config: LlamaConfig) -> None:
    config = LlamaConfig(
        **llama_config.to_dict(), temperature=0.7, num_beams=4, unsloth_version="2025.1", aux_loss_alpha=0.001,
        _attn_implementation_autoset=True, auto_map={"AutoConfig": "x.Y"}, **{"transformers.js_config": {"a": 1}},
    )  # fmt: skip
    assert not examine(LlamaForCausalLM, config).unread


@pytest.mark.parametrize("key", ["scoring_func", "topk_method", "moe_layer_freq"])
def test_value_unsupported_by_family_raises(key: str) -> None:
    model_class, config = config_of("deepseek-ai/DeepSeek-V3", **{key: 2})
    kind, detail = problems(model_class, config)[key]
    assert kind == "unsupported"
    assert detail == f"is 2; only {published()['deepseek-ai/DeepSeek-V3'].config[key]!r} is supported"
    check_config(model_class, config, key)


def test_value_without_effect_raises() -> None:
    # gpt-oss always uses its own activation and ignores the configuration.
    model_class, config = config_of("openai/gpt-oss-20b", hidden_act="gelu")
    assert problems(model_class, config) == {
        "hidden_act": ("unsupported", "is 'gelu', which no code supports; only 'silu' is supported")
    }
    check_config(model_class, config, "hidden_act")


def test_key_read_only_by_modeling_code_passes() -> None:
    # `classifier_dropout` is not declared, but the token classifier of every model reads it.
    config = tiny_config(LlamaConfig)
    config.classifier_dropout = 0.3
    check_config(registry.model_class("LlamaForTokenClassification"), config)


@pytest.mark.parametrize(
    ("key", "value", "kind", "detail"),
    [
        ("attn_logit_softcapping", 50.0, ProblemKind.UNSUPPORTED, "but RwkvForCausalLM does not read it"),
        ("layer_norm_epsilom", 1e-3, ProblemKind.UNKNOWN, "did you mean layer_norm_epsilon?"),
    ],
)
def test_config_of_class_without_family_is_checked(
    key: str, value: float, kind: ProblemKind, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert "RwkvForCausalLM" not in registry.architectures()
    found = problems(RwkvForCausalLM, RwkvConfig(num_hidden_layers=1, **{key: value}))
    assert found[key][0] == kind
    assert detail in found[key][1]
    check_config(RwkvForCausalLM, RwkvConfig(num_hidden_layers=1, use_qk_norm=True))
    assert "keys that nothing in RwkvForCausalLM reads; they are ignored: use_qk_norm" in caplog.text


def test_remote_code_is_not_checked() -> None:
    """It may read keys in modules that are not searched."""
    remote = type("RwkvForCausalLM", (RwkvForCausalLM,), {"__module__": "transformers_modules.modeling_rwkv"})
    check_config(remote, RwkvConfig(num_hidden_layers=1, attn_logit_softcapping=50.0))


def test_misspelled_default_of_transformers_passes() -> None:
    """As in EdgeTAM's configuration (`archirecture`)."""

    class Outer(PreTrainedConfig):
        model_type = "outer"
        sub_configs = {"inner": RwkvConfig}

        def __init__(self, inner: dict[str, Any] | None = None, **values: Any) -> None:
            self.inner = RwkvConfig(**(inner or {"layer_norm_epsilom": 1e-3}))
            super().__init__(**values)

    check_config(RwkvForCausalLM, Outer())
    with pytest.raises(ConfigurationError, match=r"inner\.layer_norm_epsilom: is 0\.1"):
        check_config(RwkvForCausalLM, Outer({"layer_norm_epsilom": 0.1}))


@pytest.mark.parametrize(("window", "named"), [(None, "null"), (0, "0"), (-1, "-1")])
def test_sliding_layers_without_window_raise(window: int | None, named: str) -> None:
    config = Qwen2Config(num_hidden_layers=1, sliding_window=8, layer_types=["sliding_attention"])
    config.sliding_window = window
    with pytest.raises(ConfigurationError, match=rf"sliding_window: is {named}, and 1 of the layer_types"):
        AutoModelForCausalLM.from_config(config, device="meta")


def test_too_many_experts_per_token_raise() -> None:
    config = MixtralConfig(num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=9)
    with pytest.raises(ConfigurationError, match=r"num_experts_per_tok: is 9, and num_local_experts is 4"):
        AutoModelForCausalLM.from_config(config, device="meta")


DEFAULT_WINDOWS = {
    "Dots3NoteForCausalLM",
    "Dots3NoteForConditionalGeneration",
    "ModernBertDecoderForCausalLM",  # computes it from another key
}
"""Architectures for which transformers' code sets a missing size."""


def without_window(config: PreTrainedConfig) -> tuple[str, dict[str, Any]] | None:
    """Return the key with the size of the window, and the content of a file that lacks it; None without windows."""
    text: Any = config.get_text_config(decoder=True)
    kinds = {str(kind).partition("_")[0] for kind in getattr(text, "layer_types", None) or ()}
    keys = [key for key in ("sliding_window", "attention_chunk_size") if type(getattr(text, key, None)) is int]
    if not keys or kinds.isdisjoint(("sliding", "chunked")):
        return None
    content = json.loads(config.to_json_string(use_diff=False))
    inner = next((content[name] for name in config.sub_configs if getattr(config, name, None) is text), content)
    written = text.attribute_map.get(keys[0], keys[0])
    inner[written] = None
    return written, content


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["Gemma3ForConditionalGeneration", "GptOssForCausalLM", "Llama4ForCausalLM", "MistralForCausalLM"], 3),
        pytest.param(registry.architectures(aliases=False), 30, marks=pytest.mark.long),
    ],
    ids=["few", "all"],
)
def test_missing_window_raises(names: list[str], count: int, tmp_path: Path) -> None:
    raised, loaded = set(), set()
    for name in names:
        if registry.unmet_requirement(name) or name.endswith("Classification"):
            continue
        model_class: Any = registry.model_class(name)
        if (case := without_window(FamilyCase(model_class).config)) is None:
            continue
        (tmp_path / "config.json").write_text(json.dumps(case[1]))
        try:
            model_class.from_config(read_config(tmp_path), device="meta")
        except NRLModelsError as error:
            assert case[0] in str(error), name  # noqa: PT017
            raised.add(name)
        else:
            loaded.add(name)
    assert len(raised) >= count
    assert loaded <= DEFAULT_WINDOWS
