"""compressed-tensors checkpoints load, save and export as unquantized weights, in every supported format."""

from __future__ import annotations

import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, edit_weights, hf_tensors
from compressed_checkpoints import FORMS, Parts, group, write
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM as HFAutoModelForCausalLM
from transformers import (
    CompressedTensorsConfig,
    DeepseekV3Config,
    Gemma3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.utils import logging as hf_logging
from versions import since

from nrl_models import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CheckpointError,
    check_parity,
    start_engine,
)
from nrl_models.common.compressed import compressed_files
from nrl_models.errors import UnmetRequirementError
from nrl_models.testing.tiny import tiny_config

pytestmark = pytest.mark.integrations
pytest.importorskip("compressed_tensors")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": LlamaConfig(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
}

REQUEST: dict[str, Any] = (
    {"dequantize": True}
    if "dequantize" in inspect.signature(CompressedTensorsConfig).parameters
    else {"run_compressed": False}
)
"""Keywords that request unquantized weights. The second is the former name."""


def require_unquantized(model: Any, expected: Parts, folder: Path, form: str) -> None:
    """Check a loaded model, its export and its saved checkpoint."""
    exported = dict(model.state_dict_adapter.iter_export(model))
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    assert exported.keys() == saved.keys() == expected.keys()
    # The package dequantizes FP4 in bf16.
    tolerance = {"rtol": 2**-7, "atol": 0.0} if form.endswith("fp4") else {"rtol": 2e-7, "atol": 1e-7}
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, **tolerance)
        torch.testing.assert_close(exported[name], tensor, **tolerance)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_load_save_and_export_unquantized_weights(kind: str, form: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "in", CONFIGS[kind], form)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    require_unquantized(model, expected, tmp_path / "out", form)


@pytest.mark.parametrize(
    ("config_class", "form", "targets"),
    [
        (MixtralConfig, "nvfp4", None),
        (MixtralConfig, "int4", [r"re:.*_proj$", r"re:.*\.w[123]$"]),
        (DeepseekV3Config, "fp8", None),
        (Gemma3Config, "int8", None),
    ],
)
def test_other_names_of_experts_and_towers(
    config_class: type[PreTrainedConfig], form: str, targets: list[str] | None, tmp_path: Path
) -> None:
    """Experts are stored as `w1`, `w2` and `w3`, or in a model with latent attention; a tower is also quantized."""
    expected = write(tmp_path / "in", tiny_config(config_class), form, targets=targets)
    auto = AutoModelForImageTextToText if config_class is Gemma3Config else AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "in", dtype=torch.float32)
    require_unquantized(model, expected, tmp_path / "out", form)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=since("5.23")) if form in ("int8", "int8-zeros") else form for form in FORMS]
)
def test_dense_weights_match_transformers(form: str, tmp_path: Path) -> None:
    if form == "fp8-block" and Version(version("compressed-tensors")) < Version("0.19"):
        pytest.skip("the package dequantizes uneven blocks incorrectly")
    write(tmp_path, CONFIGS["dense"], form)
    dequantize = CompressedTensorsConfig(**REQUEST)
    theirs: Any = HFAutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=dequantize)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, state[name].to(parameter.dtype)), name


@pytest.mark.parametrize(("kind", "form"), [("dense", "int4"), ("experts", "int8"), ("experts", "nvfp4")])
def test_reference_models_have_unquantized_weights(kind: str, form: str, tmp_path: Path) -> None:
    expected = write(tmp_path, CONFIGS[kind], form)
    assert check_parity(tmp_path, checks=["1", "3"]).passed
    with start_engine("hf-generate", tmp_path) as engine:
        engine.model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=2**-7 if form == "nvfp4" else 2e-7, atol=1e-7)


def test_config_groups_match_layer_names(tmp_path: Path) -> None:
    expected = write(tmp_path / "in", CONFIGS["experts"], "fp8", experts="int4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    require_unquantized(model, expected, tmp_path / "out", "int4")


def test_bfloat16_scales(tmp_path: Path) -> None:
    expected = write(tmp_path, CONFIGS["experts"], "int8")

    def to_bfloat16(tensors: Parts) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].bfloat16()
            weight = name.removesuffix("_scale")
            expected[weight] = (tensors[weight].float() * tensors[name].float()).bfloat16()

    edit_weights(tmp_path, to_bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    exported = dict(model.state_dict_adapter.iter_export(model))
    for name in expected:
        assert torch.equal(exported[name], expected[name].bfloat16()), name


@pytest.mark.parametrize(
    "quantization_config",
    [CompressedTensorsConfig(**REQUEST), {"quant_method": "compressed-tensors", "dequantize": True}, None],
    ids=["object", "mapping", "none"],
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_explicit_dequantization_config(
    kind: str, quantization_config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = write(tmp_path / "in", CONFIGS[kind], "int8")
    hf_logging.enable_propagation()
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=quantization_config)
    finally:
        hf_logging.disable_propagation()
    assert "run_compressed" not in caplog.text
    require_unquantized(model, expected, tmp_path / "out", "int8")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "quantization_config",
    [
        CompressedTensorsConfig(run_compressed=True),
        CompressedTensorsConfig(),
        {"quant_method": "compressed-tensors"},
        {"quant_method": "torchao"},
    ],
    ids=["run_compressed", "default", "mapping", "other method"],
)
def test_keeping_quantized_weights_raises(kind: str, quantization_config: Any, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS[kind], "fp8")
    with pytest.raises(CheckpointError, match=r"(?s)dequantized on load.*CompressedTensorsConfig\(dequantize=True\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization_config)


WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("form", "part", "value", "message"),
    [
        ("int4", "_packed", torch.zeros(64, 9, dtype=torch.int32), r"has shape \(64, 9\), expected \(64, 8\)"),
        ("int4", "_packed", torch.zeros(64, 8), r"is torch\.float32, expected torch\.int32"),
        ("int4", "_scale", torch.ones(64, 3), r"has shape \(64, 3\), expected \(64, 2\)"),
        ("int4", "_shape", torch.tensor([64]), "expected two sizes"),
        ("int4", "_shape", torch.tensor([64, -1]), "has shape"),
        ("int4", "_shape", None, r"weight_shape.*is missing"),
        ("int4", "_scale", None, r"weight_scale.*is missing"),
        ("int4-zeros", "_zero_point", None, r"weight_zero_point.*is missing"),
        ("int4", "_g_idx", torch.zeros(64, dtype=torch.int32), "orders columns"),
        ("nvfp4", "_global_scale", None, r"weight_global_scale.*is missing"),
        ("nvfp4", "_scale", torch.ones(64, 4), r"is torch\.float32, expected torch\.float8_e4m3fn"),
        ("int8", "", None, r"weight.*is missing"),
        ("int8", "", torch.zeros(64, 64), r"is torch\.float32, expected torch\.int8"),
        ("int8", "_scale", torch.ones(64), r"has shape \(64,\), expected \(64, 1\)"),
    ],
)
def test_invalid_quantized_tensors_raise(
    form: str, part: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path, CONFIGS["dense"], form)

    def edit(tensors: Parts) -> None:
        tensors.pop(WEIGHT + part, None)
        if value is not None:
            tensors[WEIGHT + part] = value

    edit_weights(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("form", ["int4-zeros", "int8-zeros"])
def test_nonzero_zero_points_with_symmetric_config_raise(form: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["dense"], form)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path, quantization_config=settings | {"config_groups": {"a": group(form.removesuffix("-zeros"))}})
    with pytest.raises(CheckpointError, match=r"weight_zero_point .*is not zero, and .* symmetric"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_all_zero_zero_points_load(form: str, tmp_path: Path) -> None:
    expected = write(tmp_path, CONFIGS["dense"], form)

    def edit(tensors: Parts) -> None:
        scales = {name: each for name, each in tensors.items() if name.endswith("_scale") and "weight" in name}
        tensors |= {f"{name[:-5]}zero_point": torch.zeros_like(each, dtype=torch.int8) for name, each in scales.items()}

    edit_weights(tmp_path, edit)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(hf_tensors(model)[WEIGHT], expected[WEIGHT], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "marlin-24"}, "is stored in format 'marlin-24'"),
        ({"format": "nonsense"}, "is stored in format 'nonsense'"),
        ({"config_groups": {"a": group("fp8", ["re:.*mlp.*"])}}, "no group"),
        ({"config_groups": {"a": group("fp8"), "b": group("int8")}}, "is a target of 2 groups"),
        ({"config_groups": {"a": group("fp8", ["re:(("])}}, r"config\.config_groups\.a\.targets: 're:\(\(' is not a"),
        ({"config_groups": 3}, "quantization_config: is invalid"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": "x"}}}}, "is invalid"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
    ids=str,
)
def test_unsupported_quantization_config_raises(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["dense"], "fp8")
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path, quantization_config=settings | values)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_missing_package_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CONFIGS["dense"], "fp8")
    monkeypatch.setattr(compressed_files, "find_spec", lambda name: None)
    with pytest.raises(UnmetRequirementError, match=r"not installed.*pip install compressed-tensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_old_package_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CONFIGS["dense"], "fp8")
    monkeypatch.setattr(compressed_files, "version", lambda name: "0.15.0")
    with pytest.raises(UnmetRequirementError, match=r"needs compressed-tensors>=0\.16; 0\.15\.0 is installed"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
