"""Settings of rotary embeddings that transformers would ignore raise an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DbrxConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nrl_models import AutoModelForCausalLM
from nrl_models.errors import ConfigurationError
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.inspect import inspect
from nrl_models.quirks.subject import Subject
from nrl_models.testing.tiny import tiny_config
from tests.unit.checkpoints import new_model

DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    new_model(tiny_config(LlamaConfig)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def dbrx(tmp_path: Path) -> Path:
    attention = {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000}
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}
    sizes: dict[str, Any] = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 100}
    new_model(DbrxConfig(**sizes, attn_config=attention, ffn_config=experts)).save_pretrained(tmp_path)
    _set_rope(tmp_path)
    return tmp_path


def _set_rope(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
    path.write_text(json.dumps(content | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 1000, "rope_parameters": DEFAULT}, r"rope_theta: is 1000, but rope_parameters has 500000.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": DEFAULT},
            r"rope_parameters.rope_theta: is 500000.0, but rope_scaling replaces .* compute with 10000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": DEFAULT | {"factor": 4.0}},
            r"rope_parameters.factor: is 4.0, but rope_scaling replaces .* compute with 2.0",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}},
            r"partial_rotary_factor: is 0.5, but rope_parameters has 0.25",
        ),
    ],
    ids=["base", "replaced-base", "replaced-factor", "partial"],
)
def test_contradicting_rope_settings_raise(values: dict[str, Any], message: str, llama: Path) -> None:
    _set_rope(llama, **values)
    for read in (AutoModelForCausalLM.from_pretrained, inspect, Subject.of_checkpoint):
        with pytest.raises(ConfigurationError, match=message):
            read(llama)
    chosen = AutoModelForCausalLM.from_pretrained(llama, rope_parameters=DEFAULT)  # type: ignore[call-arg]
    assert chosen.config.rope_parameters == DEFAULT
    AutoModelForCausalLM.from_pretrained(llama, ignore_config_keys=("rope_parameters", "rope_theta", *values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_theta": 500000, "rope_parameters": DEFAULT},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": DEFAULT},
        {"rope_theta": 500000, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": DEFAULT},
        {"rope_scaling": DEFAULT, "rope_parameters": DEFAULT},
    ],
    ids=str,
)
def test_rope_settings_without_contradiction_load(values: dict[str, Any], llama: Path) -> None:
    _set_rope(llama, **values)
    AutoModelForCausalLM.from_pretrained(llama)


@pytest.mark.skipif("bailing_hybrid" not in CONFIG_MAPPING, reason="transformers lacks the class")
def test_declared_default_is_not_a_contradiction(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["bailing_hybrid"](rope_parameters=DEFAULT)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] != DEFAULT["rope_theta"]
    assert read_config(tmp_path).rope_parameters["rope_theta"] == DEFAULT["rope_theta"]


def _load(folder: Path) -> object:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("read", [_load, inspect, Subject.of_checkpoint])
def test_base_that_dbrx_ignores_raises(read: Callable[[Path], object], dbrx: Path) -> None:
    message = (
        r"attn_config.rope_theta: is 500000, but DbrxForCausalLM computes with rope_parameters.rope_theta, .* 10000"
    )
    with pytest.raises(ConfigurationError, match=message):
        read(dbrx)


def test_base_of_dbrx_in_rope_parameters_loads(dbrx: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AutoModelForCausalLM.from_pretrained(dbrx)
    advice = re.search(r"pass rope_parameters=(\{.*\})", str(caught.value))
    assert advice is not None
    parameters = json.loads(advice[1].replace("'", '"'))
    model = AutoModelForCausalLM.from_pretrained(dbrx, rope_parameters=parameters)  # type: ignore[call-arg]
    expected = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.transformer.rotary_emb.inv_freq, expected)
    model.save_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(dbrx, ignore_config_keys="attn_config.rope_theta")


@pytest.mark.parametrize(
    ("scaling", "advice"),
    [
        (
            {"type": "su", "factor": 2.0},
            "'su' is the former name of 'longrope'. Change the value of 'type' in rope",
        ),
        (
            {"rope_type": "yarm", "factor": 2.0},
            "correct the value of 'rope_type' in rope_scaling or rope_parameters of",
        ),
    ],
    ids=str,
)
def test_advice_for_unknown_rope_type_works(scaling: dict[str, Any], advice: str, llama: Path) -> None:
    _set_rope(llama, rope_scaling=scaling)
    with pytest.raises(ConfigurationError, match=re.escape(f"What to do: {advice}")) as caught:
        AutoModelForCausalLM.from_pretrained(llama)
    assert "ignore_config_keys" not in str(caught.value)  # the model's code would fail with this value
    AutoModelForCausalLM.from_pretrained(llama, rope_parameters=DEFAULT)  # type: ignore[call-arg]
