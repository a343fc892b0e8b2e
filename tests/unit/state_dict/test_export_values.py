"""Exports of models whose weights are not in memory, or are quantized, raise before anything is yielded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

from nrl_models import AutoModelForCausalLM, export_adapter, registry
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


def names_in(error: pytest.ExceptionInfo[StateDictError]) -> list[str]:
    return [problem.subject for problem in error.value.problems]


@exports
def test_model_on_meta(name: str, model: Any) -> None:
    on_meta = type(model).from_config(model.config, device="meta")
    with pytest.raises(StateDictError, match="have no values in memory") as raised:
        EXPORTS[name](on_meta)
    assert names_in(raised) == list(on_meta.state_dict())
    assert on_meta.state_dict_adapter.export_plan() == model.state_dict_adapter.export_plan()


@exports
def test_offloaded_weights(name: str, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map=offload_map(model),
        offload_folder=tmp_path / "offloaded",
    )
    with pytest.raises(StateDictError, match="save_pretrained and load the copy") as raised:
        EXPORTS[name](offloaded)
    assert names_in(raised) == [key for key in model.state_dict() if key.startswith("model.layers.1.")]


def offload_map(model: Any) -> dict[str, str]:
    """Return a device map with the second layer on disk."""
    parts = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    return dict.fromkeys(["lm_head", "model.layers.0", *parts], "cpu") | {"model.layers.1": "disk"}


@exports
@pytest.mark.parametrize("method", ["torch.ao", "torchao", "bitsandbytes"])
def test_quantized_weights(name: str, method: str, model: Any, tmp_path: Path) -> None:
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
    assert UP in names_in(raised)
    assert "model.norm.weight" not in names_in(raised)
    with pytest.raises(StateDictError, match="quantized weights cannot be exported"):
        model.state_dict_adapter.export_plan()
    with pytest.raises(StateDictError):
        next(before.iter_export(model))
