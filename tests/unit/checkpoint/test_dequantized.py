"""FP8 and MXFP4 checkpoints are dequantized on load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, edit_config, edit_weights, hf_tensors, new_model, problems, stored
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
)
from versions import needs, since

from nrl_models import AutoModelForCausalLM, AutoModelForImageTextToText, CheckpointError
from nrl_models.common.checkpoint.dequantized import FP4_VALUES, from_fp8, from_mxfp4, quantized_part
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.testing.tiny import tiny_config

BLOCK = (128, 128)


def to_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize in blocks with explicit loops. Edge blocks may be smaller."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    values = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = weight[place] / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


def dequantize_elementwise(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    down = torch.arange(values.shape[0])[:, None] // block[0]
    across = torch.arange(values.shape[1])[None] // block[1]
    return values.float() * scales[down, across]


@pytest.mark.parametrize("shape", [(256, 256), (80, 256), (300, 130), (1, 129)])
def test_from_fp8_applies_block_scales(shape: tuple[int, int]) -> None:
    values, scales = to_fp8(torch.randn(shape))
    assert torch.equal(from_fp8(values, scales, BLOCK), dequantize_elementwise(values, scales))
    stacked = from_fp8(values[None].repeat(3, 1, 1), torch.stack([scales, 2 * scales, 4 * scales]), BLOCK)
    assert torch.equal(stacked[2], 4 * dequantize_elementwise(values, scales))


def test_from_fp8_with_per_tensor_scale() -> None:
    values = torch.randn(3, 5).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(0.5), torch.tensor([0.5])):
        assert torch.equal(from_fp8(values, scale, None), values.float() / 2)


def test_from_fp8_exponent_scales_in_low_default_dtype(low_default_dtype: Callable[[], None]) -> None:
    values = torch.ones(4, 2, dtype=torch.float32).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[0], [60], [160], [254]], dtype=torch.uint8)
    low_default_dtype()
    actual = from_fp8(values, exponents, (1, 2))
    assert torch.equal(actual, torch.ldexp(values.float(), exponents.int() - 127))


def test_from_mxfp4_applies_group_exponents() -> None:
    codes = torch.randint(0, 16, (2, 6, 64))
    exponents = torch.randint(100, 150, (2, 6, 2), dtype=torch.uint8)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(2, 6, 2, 16)
    expected = torch.tensor(FP4_VALUES)[codes] * 2.0 ** (exponents.float() - 127).repeat_interleave(32, -1)
    actual = from_mxfp4(packed, exponents)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual.float(), expected.transpose(1, 2))


def test_from_mxfp4_matches_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    packed = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 140, (3, 8, 4), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(packed, exponents, dtype=torch.bfloat16)
    assert torch.equal(from_mxfp4(packed, exponents), expected)


# Complete checkpoints


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    """Latent sizes of 96 and of 64 + 16, which blocks of 128 do not divide."""
    return new_model(tiny_config(DeepseekV3Config, {"intermediate_size": 320}), dtype=torch.bfloat16).eval()


@pytest.fixture
def fp8(deepseek: PreTrainedModel, tmp_path: Path) -> Path:
    """`deepseek` as DeepSeek publishes it: linears and experts in FP8; norms, routers and embeddings unquantized."""
    folder = tmp_path / "fp8"
    deepseek.save_pretrained(folder)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("proj.weight") or "_proj_with_mqa" in key]:
            values, scales = to_fp8(tensors[key].float())
            tensors[key], tensors[f"{key}_scale_inv"] = values, scales

    tensors = edit_weights(folder, quantize)
    assert any(min(tensor.shape) % 128 for key, tensor in tensors.items() if key.endswith("_proj.weight"))
    method = {"quant_method": "fp8", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
    edit_config(folder, quantization_config=method, architectures=["DeepseekV3ForCausalLM"])
    return folder


def plain(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the unquantized tensors of a quantized checkpoint. transformers defines the list of fp32 tensors."""
    tensors = stored(folder)
    kept_in_fp32 = DeepseekV3ForCausalLM._keep_in_fp32_modules_strict
    return {
        key: (
            dequantize_elementwise(value, tensors[f"{key}_scale_inv"]) if value.dtype == torch.float8_e4m3fn else value
        ).to(torch.float32 if any(part in key for part in kept_in_fp32) else dtype)
        for key, value in tensors.items()
        if not key.endswith("_scale_inv")
    }


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_load_into_fused_projections_and_experts(
    fp8: Path, tmp_path: Path, dtype: torch.dtype, combine: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(fp8, dtype=dtype, combine=combine)
    assert getattr(model.config, "quantization_config", None) is None
    assert hasattr(model.model.layers[0].self_attn, "qkv_a_proj") is combine
    model.save_pretrained(tmp_path / "plain")
    assert_same(stored(tmp_path / "plain"), plain(fp8, dtype))
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert_same(hf_tensors(reloaded), hf_tensors(model))


# Published FP8 formats. Each function returns the stored tensors of a weight and its unquantized value.

Form = tuple[dict[str, torch.Tensor], torch.Tensor]


def per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def static_scheme(key: str, weight: torch.Tensor) -> Form:
    values, scale = per_tensor(weight)
    activation = key.removesuffix("weight") + "activation_scale"
    return {key: values, f"{key}_scale_inv": scale, activation: torch.tensor(3.0)}, values.float() * scale


def mistral_names(key: str, weight: torch.Tensor) -> Form:
    values, scale = per_tensor(weight)
    stem = key.removesuffix("weight")
    scales = {f"{stem}qscale_weight": scale[None], f"{stem}qscale_act": torch.ones(())}
    return {key: values} | scales, values.float() * scale


def vllm_names(key: str, weight: torch.Tensor) -> Form:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    stem = key.removesuffix("weight")
    scales = {f"{key}_scale": scale, f"{stem}input_scale": torch.ones(1), f"{stem}k_scale": torch.ones(1)}
    return {key: values} | scales, values.float() * scale


def exponents(key: str, weight: torch.Tensor) -> Form:
    biased = (to_fp8(weight)[1].log2().ceil() + 127).to(torch.uint8)
    scales = 2.0 ** (biased.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    scales = scales[: weight.shape[0], : weight.shape[1]]
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {key: values, f"{key}_scale_inv": biased}, values.float() * scales


def e8m0_and_fp4(key: str, weight: torch.Tensor) -> Form:
    """The format of DeepSeek-V4: E8M0 scales named `scale`, and experts in FP4 with one scale per 32 columns."""
    scale_key = key.removesuffix("weight") + "scale"
    if ".experts." not in key:
        tensors, expected = exponents(key, weight)
        return {key: tensors[key], scale_key: tensors[f"{key}_scale_inv"].view(torch.float8_e8m0fnu)}, expected
    codes = torch.randint(0, 16, weight.shape)
    biased = torch.randint(118, 124, (weight.shape[0], weight.shape[1] // 32), dtype=torch.uint8)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    expected = torch.tensor(FP4_VALUES)[codes] * 2.0 ** (biased.float() - 127).repeat_interleave(32, 1)
    return {key: packed, scale_key: biased.view(torch.float8_e8m0fnu)}, expected


FORMS: dict[str, tuple[Callable[[str, torch.Tensor], Form], dict[str, Any]]] = {
    "static": (static_scheme, {"weight_block_size": None, "activation_scheme": "static"}),
    "Mistral's names": (mistral_names, {"weight_block_size": None, "activation_scheme": "static"}),
    "vLLM's names": (vllm_names, {"activation_scheme": "static"}),
    "exponents": (exponents, {"weight_block_size": [*BLOCK], "scale_fmt": "ue8m0"}),
    "E8M0 and FP4": (e8m0_and_fp4, {"weight_block_size": [*BLOCK], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}),
}


def save_in_form(model: PreTrainedModel, form: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model with its linears in FP8. Returns the unquantized weights."""
    quantize, expected = FORMS[form][0], {}
    model.save_pretrained(folder)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("proj.weight") or "_proj_with_mqa" in key]:
            quantized, expected[key] = quantize(key, tensors.pop(key).float())
            tensors |= quantized

    edit_weights(folder, edit)
    assert expected
    return expected


@pytest.mark.parametrize("method", ["fp8", "mxfp8"])
@pytest.mark.parametrize("form", FORMS)
def test_published_fp8_formats(form: str, method: str, deepseek: PreTrainedModel, tmp_path: Path) -> None:
    expected = save_in_form(deepseek, form, tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": method, **FORMS[form][1]})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert_same({key: exported[key] for key in expected}, expected)


@pytest.mark.parametrize("requested", ["fp8", "mxfp8"])
def test_mxfp8_with_requested_dequantization_loads(requested: str, deepseek: PreTrainedModel, tmp_path: Path) -> None:
    expected = save_in_form(deepseek, "vLLM's names", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp8"})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config={"quant_method": requested, "dequantize": True}
    )
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert_same({key: exported[key] for key in expected}, expected)


def save_vision_language_model(config: PreTrainedConfig, part: str | None, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model in FP8, with the quantization settings in a part of its configuration. Returns the weights."""
    whole = new_model(config, "ForConditionalGeneration", dtype=torch.bfloat16)
    expected = save_in_form(whole, "static", folder)
    settings = {"quantization_config": {"quant_method": "fp8", **FORMS["static"][1]}}
    content = json.loads((folder / "config.json").read_text())
    edit_config(folder, **(settings if part is None else {part: content[part] | settings}))
    return expected


@pytest.mark.parametrize("part", ["text_config", None])
def test_vision_language_model_quantization_config(part: str | None, tmp_path: Path) -> None:
    expected = save_vision_language_model(tiny_config(Gemma3Config), part, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert not quantized_part(model.config)
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert_same({key: exported[key] for key in expected}, expected)


@needs("Qwen3_5ForConditionalGeneration")
@pytest.mark.parametrize("part", ["text_config", None])
def test_text_model_of_quantized_vision_language_checkpoint(part: str | None, tmp_path: Path) -> None:
    expected = save_vision_language_model(tiny_config(Qwen3_5Config), part, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not quantized_part(model.config)
    exported = dict(model.state_dict_adapter.iter_export(model))
    text = {key: tensor for key, tensor in expected.items() if ".language_model." in key}
    assert text
    assert_same({key: exported[key] for key in text}, text)


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1)])
def test_from_fp8_with_scale_per_expert(shape: tuple[int, ...]) -> None:
    values, scales = torch.randn(4, 6, 8).to(torch.float8_e4m3fn), torch.rand(shape)
    assert torch.equal(from_fp8(values, scales, (6, 8)), values.float() * scales.view(4, 1, 1))


@since("5.14")
def test_fp8_auto_dtype_uses_config_dtype(fp8: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(fp8, num_nextn_predict_layers=0)  # the checkpoint has no MTP layer
    assert model.dtype == torch.bfloat16
    assert not caplog.records
    edit_config(fp8, dtype=None)
    assert AutoModelForCausalLM.from_pretrained(fp8).dtype == torch.bfloat16


def test_fp8_mtp_weights_are_saved_dequantized(fp8: Path, tmp_path: Path) -> None:
    """Saving writes unquantized tensors in the model's dtype. In memory they remain the file's 8-bit values."""
    mtp = {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        "model.layers.2.enorm.weight": torch.randn(64),
    }
    values, scales = to_fp8(torch.randn(130, 64))
    name = "model.layers.2.mlp.experts.0.up_proj.weight"
    edit_weights(fp8, lambda tensors: tensors.update(mtp | {name: values, f"{name}_scale_inv": scales}))
    model = AutoModelForCausalLM.from_pretrained(fp8)
    expected = mtp | {name: dequantize_elementwise(values, scales).bfloat16()}
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert_same({key: exported[key] for key in expected}, expected)
    assert [part.dtype for part in kept_by(model)[name].stored] == [torch.float8_e4m3fn, torch.float32]
    model.save_pretrained(tmp_path / "plain")
    assert_same({key: stored(tmp_path / "plain")[key] for key in expected}, expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert_same({key: kept.read() for key, kept in kept_by(again).items()}, expected)


@since("5.10")
def test_mtp_weights_dequantized_with_transformers_config(deepseek: PreTrainedModel, tmp_path: Path) -> None:
    """transformers does not load MTP weights, so its quantizers would leave them in 8 bits."""
    folder, block = tmp_path / "fp8", (16, 16)
    deepseek.save_pretrained(folder)
    kept = {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128),
        "model.layers.2.mlp.up_proj.weight": torch.randn(48, 32),
    }

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(kept)
        for key in [key for key in tensors if key.endswith("proj.weight") or "_proj_with_mqa" in key]:
            tensors[key], tensors[f"{key}_scale_inv"] = to_fp8(tensors[key].float(), block)

    edit_weights(folder, quantize)
    method = {"quant_method": "fp8", "weight_block_size": [*block], "activation_scheme": "dynamic", "fmt": "e4m3"}
    edit_config(folder, quantization_config=method)
    asked = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked, dtype=torch.bfloat16)
    expected = {key: dequantize_elementwise(*to_fp8(tensor, block), block).bfloat16() for key, tensor in kept.items()}
    assert_same({key: tensor.read() for key, tensor in kept_by(model).items()}, expected)
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert_same(hf_tensors(again), hf_tensors(model))
    assert_same({key: tensor.read() for key, tensor in kept_by(again).items()}, expected)


@pytest.mark.parametrize(
    "requested", [FineGrainedFP8Config(dequantize=True), FineGrainedFP8Config()], ids=["yes", "no"]
)
def test_requested_dequantization_of_incomplete_blocks(requested: FineGrainedFP8Config, tmp_path: Path) -> None:
    """Without a GPU, transformers also dequantizes if the request is to keep the weights in FP8."""
    if not requested.dequantize and torch.cuda.is_available():
        pytest.skip("a GPU keeps the weights in FP8")
    reference = new_model(tiny_config(LlamaConfig, {"intermediate_size": 200}), dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("proj.weight")]:
            tensors[key], tensors[f"{key}_scale_inv"] = to_fp8(tensors[key].float())

    edit_weights(tmp_path, quantize)
    method = {"quant_method": "fp8", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic"}
    edit_config(tmp_path, quantization_config=method)
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
        for config in (None, requested)
    ]
    assert_same(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize("block", [BLOCK, (64, 32), (1, 32), (1, 64)], ids=str)
def test_fp8_blocks_without_size_in_config(block: tuple[int, int], tmp_path: Path) -> None:
    """192 rows have two blocks of 128, as in the quantizer. An even division would read two blocks of 96."""
    reference = new_model(tiny_config(LlamaConfig, {"intermediate_size": 192}))
    reference.save_pretrained(tmp_path)
    expected: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("proj.weight")]:
            tensors[key], tensors[f"{key}_scale_inv"] = to_fp8(tensors[key], block)
            expected[key] = dequantize_elementwise(tensors[key], tensors[f"{key}_scale_inv"], block)

    edit_weights(tmp_path, quantize)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    tensors = hf_tensors(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert_same({key: tensors[key] for key in expected}, expected)


def drop(key: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(key)


QUERY, MLP = "model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.mlp.down_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], set[tuple[str, str]]]] = {
    "missing scale": (drop(f"{QUERY}_scale_inv"), {("missing", f"{QUERY}_scale_inv")}),
    "missing values": (drop(QUERY), {("unexpected", f"{QUERY}_scale_inv")}),
    "missing scale and wrong shape": (
        lambda tensors: (tensors.pop(f"{QUERY}_scale_inv"), tensors.update({f"{MLP}_scale_inv": torch.ones(3, 3)})),
        {("missing", f"{QUERY}_scale_inv"), ("shape", f"{MLP}_scale_inv")},
    ),
    "integer scales": (
        lambda tensors: tensors.update({f"{QUERY}_scale_inv": tensors[f"{QUERY}_scale_inv"].int()}),
        {("dtype", f"{QUERY}_scale_inv")},
    ),
    "scales without quantized weight": (
        lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.ones(2)}),
        {("unexpected", "model.norm.weight_scale_inv")},
    ),
    "blocks of a vector": (
        lambda tensors: tensors.update(
            {
                "model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn),
                "model.norm.weight_scale_inv": torch.ones(1, 1),
            }
        ),
        {("shape", "model.norm.weight_scale_inv")},
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_fp8_error_lists_all_problems(fp8: Path, damage: str) -> None:
    edit, expected = DAMAGES[damage]
    edit_weights(fp8, edit)
    with pytest.raises(CheckpointError, match="quantized with fp8") as caught:
        AutoModelForCausalLM.from_pretrained(fp8)
    assert problems(caught.value) == expected


def test_mismatched_block_size_raises(fp8: Path) -> None:
    edit_config(fp8, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 128]})
    with pytest.raises(CheckpointError, match=r"in blocks of \(64, 128\) needs"):
        AutoModelForCausalLM.from_pretrained(fp8)


def test_fp8_without_quantization_config_raises(fp8: Path) -> None:
    edit_config(fp8, quantization_config=None)
    with pytest.raises(CheckpointError, match="quantized weights need a quantization_config") as caught:
        AutoModelForCausalLM.from_pretrained(fp8)
    assert ("unexpected", f"{QUERY}_scale_inv") in problems(caught.value)


@pytest.fixture
def mxfp4(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A gpt-oss checkpoint with its experts in MXFP4, and the unquantized experts."""
    folder = tmp_path / "mxfp4"
    new_model(tiny_config(GptOssConfig), dtype=torch.bfloat16).save_pretrained(folder)
    experts: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
            count, columns, rows = tensors.pop(key).shape
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(118, 124, (count, rows, columns // 32), dtype=torch.uint8)
            experts[key] = from_mxfp4(tensors[f"{key}_blocks"], tensors[f"{key}_scales"])

    edit_weights(folder, quantize)
    assert experts
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]})
    return folder, experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_load_into_experts(
    mxfp4: tuple[Path, dict[str, Any]], tmp_path: Path, input_ids: torch.Tensor, dtype: torch.dtype
) -> None:
    folder, experts = mxfp4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, combine=True)
    assert hasattr(model.model.layers[0].self_attn, "qkv_proj")
    assert_same(
        {key: hf_tensors(model)[key] for key in experts}, {key: expert.to(dtype) for key, expert in experts.items()}
    )
    model.train()(input_ids, labels=input_ids).loss.backward()
    model.save_pretrained(tmp_path / "plain")
    saved = stored(tmp_path / "plain")
    assert not any(key.endswith(("_blocks", "_scales")) for key in saved)
    assert_same({key: saved[key] for key in experts}, {key: tensor.to(dtype) for key, tensor in experts.items()})


def test_requested_dequantization_of_mxfp4_with_mesh(mxfp4: tuple[Path, dict[str, Any]]) -> None:
    folder, experts = mxfp4
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        model = AutoModelForCausalLM.from_pretrained(
            folder, mesh=mesh, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
        )
        saved = dict(model.state_dict_adapter.iter_export(model))
        assert_same({key: saved[key] for key in experts}, experts)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (lambda key, tensors: tensors.pop(f"{key}_scales"), "missing"),
        (lambda key, tensors: tensors.pop(f"{key}_blocks"), "unexpected"),
        (lambda key, tensors: tensors.update({f"{key}_scales": tensors[f"{key}_scales"][..., :-1].clone()}), "shape"),
    ],
    ids=["no scales", "no blocks", "wrong scale shape"],
)
def test_damaged_mxfp4_raises(
    mxfp4: tuple[Path, dict[str, Any]], edit: Callable[[str, dict[str, torch.Tensor]], object], kind: str
) -> None:
    folder, experts = mxfp4
    key = sorted(experts)[0]
    edit_weights(folder, lambda tensors: edit(key, tensors))
    with pytest.raises(CheckpointError, match="quantized with mxfp4") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert problems(caught.value) == {(kind, f"{key}_scales")}


@pytest.mark.parametrize("strict", [True, False])
def test_unsupported_quant_method_raises(strict: bool, fp8: Path) -> None:
    edit_config(fp8, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"(?s)is stored quantized.*quant_method 'modelopt', which neither"):
        AutoModelForCausalLM.from_pretrained(fp8, strict=strict)
