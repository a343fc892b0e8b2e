"""Exports of models whose weights are not in memory, or are quantized, raise before anything is yielded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig

from nrl_models import AutoModelForCausalLM, export_adapter, registry
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import StateDictError
from nrl_models.testing.case import FamilyCase

UP = "model.layers.0.mlp.up_proj.weight"

Export = Callable[[Any], Any]

EXPORTS: dict[str, Export] = {
    "views": lambda model: next(model.state_dict_adapter.iter_export(model)),
    "buckets": lambda model: next(model.state_dict_adapter.iter_export(model, max_bytes=1000)),
    "merged": lambda model: next(export_adapter(model).iter_export(model)),
    "live views": lambda model: model.state_dict_adapter.hf_views(model),
}
exports = pytest.mark.parametrize("name", EXPORTS)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(FamilyCase(registry.model_class("LlamaForCausalLM")).model())


def problem_subjects(error: pytest.ExceptionInfo[StateDictError]) -> list[str]:
    return [problem.subject for problem in error.value.problems]


@exports
def test_export_of_meta_model_raises(name: str, model: Any) -> None:
    on_meta = type(model).from_config(model.config, device="meta")
    with pytest.raises(StateDictError, match="have no values in memory") as raised:
        EXPORTS[name](on_meta)
    assert problem_subjects(raised) == list(on_meta.state_dict())
    assert on_meta.state_dict_adapter.export_plan() == model.state_dict_adapter.export_plan()


@exports
def test_export_of_offloaded_weights_raises(name: str, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map=offload_map(model),
        offload_folder=tmp_path / "offloaded",
    )
    with pytest.raises(StateDictError, match="save_pretrained and load the copy") as raised:
        EXPORTS[name](offloaded)
    assert problem_subjects(raised) == [key for key in model.state_dict() if key.startswith("model.layers.1.")]


def offload_map(model: Any) -> dict[str, str]:
    """Return a device map with the second layer on disk."""
    parts = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    return dict.fromkeys(["lm_head", "model.layers.0", *parts], "cpu") | {"model.layers.1": "disk"}


class WithScale(nn.Linear):
    """A linear that adds a tensor to its state dict, which is neither a parameter nor a buffer."""

    scale = torch.full((2,), 3.0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(prefix + "scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class WithBuffers(nn.Module):
    """A linear with 8-bit buffers and scales in place of its weight, as in GPTQ."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", linear.weight.detach().to(torch.int8))
        self.register_buffer("scales", torch.ones(len(linear.weight)))


def bitsandbytes_linear(linear: nn.Linear, **options: Any) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    result = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False)
    result.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **options)
    return result.to("cpu")


def hqq_linear(linear: nn.Linear) -> nn.Module:
    quantize = pytest.importorskip("hqq.core.quantize")
    config = quantize.BaseQuantizeConfig(nbits=4, group_size=32)
    return quantize.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=True)


def float8_linear(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return linear


QUANTIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "bitsandbytes": bitsandbytes_linear,
    "bitsandbytes in 16 bits": partial(bitsandbytes_linear, quant_storage=torch.bfloat16),
    "HQQ": hqq_linear,
    "float8": float8_linear,
    "buffers": WithBuffers,
}


@exports
@pytest.mark.parametrize("method", QUANTIZED)
def test_export_of_replaced_quantized_linear_raises(name: str, method: str, model: Any) -> None:
    model.model.layers[0].mlp.up_proj = QUANTIZED[method](model.model.layers[0].mlp.up_proj)
    with pytest.raises(StateDictError, match="quantized weights cannot be exported") as raised:
        EXPORTS[name](model)
    assert problem_subjects(raised) == [UP]
    with pytest.raises(StateDictError, match="quantized weights cannot be exported"):
        model.state_dict_adapter.export_plan()


def with_scale(linear: nn.Linear) -> nn.Module:
    result = WithScale(linear.in_features, linear.out_features, bias=False)
    result.weight = linear.weight
    return result


@pytest.mark.parametrize("method", ["scale", *(name for name in QUANTIZED if name != "float8")])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_saved_file_has_all_state_dict_tensors(architecture: str, method: str, tmp_path: Path) -> None:
    """Like transformers, saves tensors that are neither parameters nor buffers."""
    replaced = {"scale": with_scale, **QUANTIZED}[method]
    case = FamilyCase(registry.model_class(architecture))
    models = {"own": copy.deepcopy(case.model()), "transformers": case.reference()}
    for name, model in models.items():
        layer = model.model.layers[0].self_attn
        layer.q_proj = replaced(layer.q_proj)
        model.save_pretrained(tmp_path / name)
    files = {name: tmp_path / name / "model.safetensors" for name in models}
    assert files["own"].read_bytes() == files["transformers"].read_bytes()
    added = {name for name in models["own"].state_dict() if ".layers.0.self_attn.q_proj." in name}
    assert added <= load_file(files["own"]).keys()


def test_tensors_added_by_modules_export_and_load(model: Any) -> None:
    layer = model.model.layers[0].self_attn
    layer.q_proj = with_scale(layer.q_proj)
    scale = "model.layers.0.self_attn.q_proj.scale"
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert torch.equal(exported[scale], layer.q_proj.scale)
    assert exported.keys() == model.state_dict().keys()
    model.load_state_dict(exported | {scale: torch.ones(2)})
    assert torch.equal(layer.q_proj.scale, torch.ones(2))


@exports
@pytest.mark.parametrize("method", ["torch.ao", "torchao", "bitsandbytes"])
def test_export_of_quantized_weights_raises(name: str, method: str, model: Any, tmp_path: Path) -> None:
    before = model.state_dict_adapter
    if method == "torch.ao":
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    elif method == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes")
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
        )
    with pytest.raises(StateDictError, match="quantized weights cannot be exported") as raised:
        EXPORTS[name](model)
    assert UP in problem_subjects(raised)
    assert "model.norm.weight" not in problem_subjects(raised)
    with pytest.raises(StateDictError, match="quantized weights cannot be exported"):
        model.state_dict_adapter.export_plan()
    with pytest.raises(StateDictError):
        next(before.iter_export(model))


@exports
def test_export_of_int8_head_raises_if_configuration_ties_it(name: str, model: Any) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model.config.tie_word_embeddings = True  # the embeddings stay as they are
    head = bitsandbytes.nn.Linear8bitLt(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    head.weight = bitsandbytes.nn.Int8Params(model.lm_head.weight.data, requires_grad=False).to("cpu")
    model.lm_head = head
    with pytest.raises(StateDictError, match="quantized weights cannot be exported") as raised:
        EXPORTS[name](model)
    assert problem_subjects(raised) == ["lm_head.weight"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_export_works_in_inference_mode(architecture: str) -> None:
    model = copy.deepcopy(FamilyCase(registry.model_class(architecture)).model())
    with torch.inference_mode():
        found = dict(export_adapter(model).iter_export(model))
        loaded = model.state_dict_adapter.from_hf(found)
    assert found.keys() == {name for name, *_ in model.state_dict_adapter.export_plan()}
    assert_same(loaded, model.state_dict())


@pytest.mark.parametrize("method", ["unload", "merge_and_unload"])
def test_peft_model_exports_after_its_adapters_are_unloaded(method: str, model: Any) -> None:
    """PEFT removes adapters in place, so callers may keep the `PeftModel`."""
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    unloaded = getattr(wrapped, method)()
    expected = unloaded.state_dict()
    for max_bytes in (None, 1000):
        assert_same(dict(export_adapter(wrapped).iter_export(wrapped, max_bytes)), expected)
    assert_same(export_adapter(wrapped).hf_views(wrapped), expected)


@pytest.mark.parametrize("kind", ["attribute", "LoRA", "modules_to_save"])
def test_value_head_is_not_exported(kind: str, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An engine has no such module, so its refit would fail."""
    expected = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}
    engine = HFEngine(copy.deepcopy(model))
    name = f"value_head_{kind}".lower()  # each name is logged once
    model.add_module(name, nn.Linear(model.config.hidden_size, 1))
    trainer = model
    if kind != "attribute":
        saved = [name] if kind == "modules_to_save" else None
        trainer = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=saved))
    with caplog.at_level(logging.WARNING):
        adapter = export_adapter(trainer)
        found = dict(adapter.iter_export(trainer))
    assert caplog.text.count(f"{name}: not exported") == 1
    assert [each for each, _, _ in adapter.export_plan()] == list(found)
    assert found.keys() == expected.keys()
    for each, tensor in expected.items():
        torch.testing.assert_close(found[each], tensor, rtol=0, atol=0)
    engine.refit(found.items())


def test_module_inside_the_decoder_is_exported(model: Any) -> None:
    """The model computes with it, so engines must reject it."""
    model.model.layers[0].mlp.extra = nn.Linear(2, 2, bias=False)
    names = [name for name, _ in export_adapter(model).iter_export(model)]
    assert "model.layers.0.mlp.extra.weight" in names
