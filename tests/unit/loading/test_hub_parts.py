"""Tensors of the hub that transformers concatenates, in parts of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import assert_same, new_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Concatenate
from versions import since

import nrl_models
from nrl_models.common.upstream_conversions import WeightConverter
from nrl_models.families.table import TABLE
from nrl_models.testing.tiny import tiny_config

PARTS = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]

# Parts of these concatenations have the same size: gate and up projections, and convolutions of one width.
EQUAL = {
    ("gate", "up"),
    ("w1", "w3"),
    ("fc1", "fc3"),
    ("shard_*",),
}
ONE_WIDTH = {"glm5_next", "glm5_next_text", "kimi_linear", "bailing_hybrid"}
"""Model types whose queries, keys and values all have the width `qkv_dim`."""


@pytest.fixture
def olmo() -> PreTrainedModel:
    """transformers' Olmo Hybrid, with 128, 128 and 256 channels of queries, keys and values."""
    return new_model(tiny_config(transformers.OlmoHybridConfig)).eval()


def write_published_shapes(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite the convolutions of a saved checkpoint with the shapes of the published ones."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    joined = torch.cat([tensors[name] for name in PARTS])
    tensors |= {name: part.clone() for name, part in zip(PARTS, joined.split([128, 128, 256]), strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@since("5.15")
def test_published_part_sizes_load_and_export(olmo: PreTrainedModel, input_ids: torch.Tensor, tmp_path: Path) -> None:
    olmo.save_pretrained(tmp_path)
    published = write_published_shapes(tmp_path)
    model = nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(model(input_ids).logits, olmo(input_ids).logits, rtol=0, atol=1e-5)
    assert_same(model.state_dict_adapter.to_hf(model.state_dict()), published)
    model.save_pretrained(tmp_path / "saved")
    assert_same(load_file(tmp_path / "saved/model.safetensors"), published)


@since("5.15")
def test_equal_part_sizes_load(olmo: PreTrainedModel, input_ids: torch.Tensor, tmp_path: Path) -> None:
    olmo.save_pretrained(tmp_path)
    published = write_published_shapes(tmp_path)
    equal = torch.cat([published[name] for name in PARTS]).chunk(3)
    tensors = published | {name: part.clone() for name, part in zip(PARTS, equal, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(model(input_ids).logits, olmo(input_ids).logits, rtol=0, atol=1e-5)
    assert_same(model.state_dict_adapter.to_hf(model.state_dict()), published)


@since("5.15")
def test_unexpected_part_sizes_raise(olmo: PreTrainedModel, tmp_path: Path) -> None:
    olmo.save_pretrained(tmp_path)
    published = write_published_shapes(tmp_path)
    others = torch.cat([published[name] for name in PARTS]).split([256, 128, 128])
    tensors = published | {name: part.clone() for name, part in zip(PARTS, others, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(nrl_models.CheckpointError, match=r"q_conv1d\.weight .*\(256, 1, 4\), the model expects \(128"):
        nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path)


@since("5.23")
def test_new_embedding_is_exported_separately() -> None:
    config = tiny_config(transformers.Molmo2Config)
    model = nrl_models.AutoModelForImageTextToText.from_config(config)
    exported = model.state_dict_adapter.to_hf(model.state_dict())
    text = config.text_config
    for name, rows in {"embedding": text.vocab_size, "new_embedding": text.additional_vocab_size}.items():
        assert exported[f"model.transformer.wte.{name}"].shape == (rows, text.hidden_size)


def test_every_concatenation_has_declared_or_equal_part_sizes() -> None:
    """A new concatenation in transformers fails here, until its sizes are declared or it is added to the equal ones."""
    declared = {place for row in TABLE.values() for place in row.part_sizes}
    unknown: list[tuple[str, Any]] = []
    checked = 0
    for key, conversions in conversion_mapping._build_checkpoint_conversion_mapping().items():
        for conversion in conversions:
            if not isinstance(conversion, WeightConverter):
                continue
            if not any(isinstance(operation, Concatenate) for operation in conversion.operations):
                continue
            checked += 1
            sources = conversion.source_patterns
            is_equal = any(all(part in name for part, name in zip(parts, sources, strict=False)) for parts in EQUAL)
            is_declared = any(f"{key}: {target}" in declared for target in conversion.target_patterns)
            if not (is_equal or is_declared or key in ONE_WIDTH):
                unknown.append((key, sources))
    assert not unknown
    assert checked
