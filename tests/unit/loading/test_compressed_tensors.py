"""compressed-tensors checkpoints load as plain weights, or raise where transformers loads wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from nrl_models import AutoModelForCausalLM, CheckpointError

pytestmark = pytest.mark.integrations
FP8, INT8 = "float-quantized", "int-quantized"
LARGEST = {FP8: 448.0, INT8: 127.0}

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


def quantized(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8 bits, and the scale of each row."""
    scale = weight.abs().amax(1, keepdim=True) / LARGEST[form]
    rows = weight / scale
    return (rows.to(torch.float8_e4m3fn) if form == FP8 else rows.round().to(torch.int8)), scale


def write(folder: Path, config: PreTrainedConfig, form: str) -> dict[str, torch.Tensor]:
    """Write a random model whose linears are quantized; returns the weights that they stand for."""
    new_model(config).save_pretrained(folder)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith("proj.weight"):
            stored[name], scale = quantized(tensor, form)
            stored[f"{name}_scale"], plain[name] = scale, stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "float" if form == FP8 else "int", "strategy": "channel", "symmetric": True}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"dynamic": False}}},
    }
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))
    return plain


@pytest.mark.parametrize(("kind", "form"), [("dense", FP8), ("dense", INT8), ("experts", FP8)])
def test_loaded_saved_and_exported_as_plain_weights(kind: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    expected = write(tmp_path / "in", CONFIGS[kind], form)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    model(torch.arange(32)[None])  # compressed layers decompress on their first forward
    exported = dict(model.state_dict_adapter.iter_export(model))
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-6)
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_experts_in_nvfp4_raise_before_anything_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["experts"], FP8)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.experts.0.up_proj.weight_global_scale"
    save_file(tensors | {key: torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_global_scale .*experts in NVFP4"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
