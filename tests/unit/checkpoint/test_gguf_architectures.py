"""Loading a GGUF file of any architecture that transformers reads gives the logits of the model that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_architectures import BASE, CASES, RMS, Case, write
from gguf_checkpoints import header_only
from transformers import AutoConfig
from transformers import AutoModelForCausalLM as HFAutoModelForCausalLM

from nrl_models import AutoModelForCausalLM
from nrl_models.common.gguf.gguf_tables import configuration
from nrl_models.common.upstream import gguf_reading, has_reached
from nrl_models.errors import CheckpointError
from nrl_models.testing.case import randomize

TOKENS = torch.arange(2, 34)[None]


def case_of(architecture: str) -> Case:
    """Return the case of an architecture. Skips the test if the installed transformers does not compute its files."""
    case = CASES[architecture]
    if not has_reached(case.since):
        pytest.skip(f"transformers {case.since} computes {architecture}")
    return case


def require_same_logits(tmp_path: Path, architecture: str, **changed: Any) -> None:
    """Write a case with these metadata values (None removes one), load it, and compare the logits."""
    case = case_of(architecture)
    torch.manual_seed(0)
    model = HFAutoModelForCausalLM.from_config(case.config, dtype=torch.float32).eval()
    randomize(model)
    write(tmp_path / "model.gguf", model, architecture, case, **changed)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for each in (model, loaded):
        each.set_attn_implementation("eager")
    with torch.no_grad():
        expected, found = model(TOKENS).logits, loaded(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=case.tolerance, atol=case.tolerance)
    assert found.std() > 1e-3


@pytest.mark.parametrize("architecture", CASES)
def test_logits_match_original_model(architecture: str, tmp_path: Path) -> None:
    require_same_logits(tmp_path, architecture)


NOT_WRITTEN = {
    "deci": "transformers has no such model",
    "gpt-oss": "transformers cannot read its metadata, see below",
    "t5": "has no causal language model, see test_gguf_t5.py",
    "t5encoder": "as t5",
}
"""llama.cpp architectures that transformers reads, without a case here."""


def test_every_architecture_is_covered() -> None:
    tables = set(gguf_reading().GGUF_SUPPORTED_ARCHITECTURES)
    spelled = {name: name.replace("-", "_") for name in gguf.MODEL_ARCH_NAMES.values()}
    spelled |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "t5encoder": "t5"}
    assert {name for name, theirs in spelled.items() if theirs in tables} - NOT_WRITTEN.keys() <= CASES.keys()


def load_error(tmp_path: Path, architecture: str, **changed: Any) -> str:
    """Write a case with other metadata, and return the error of loading it."""
    case = case_of(architecture)
    model = HFAutoModelForCausalLM.from_config(case.config)
    write(tmp_path / "model.gguf", model, architecture, case, **changed)
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("minimax-m2", "expert_gating_func", 1),
        ("minimax-m2", "expert_gating_func", 0),
        ("minimax-m2", "expert_weights_norm", False),
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen2moe", "expert_gating_func", 2),
        ("llama", "expert_weights_norm", True),
        ("bloom", "attention.head_count_kv", 2),
        ("llama", "rope.dimension_count", 8),
        ("llama", "attention.value_length", 8),
        ("gemma4", "rope.dimension_count", 16),
        ("gemma4", "rope.dimension_count_swa", 8),
    ],
)
def test_unsupported_metadata_value_raises(architecture: str, key: str, value: Any, tmp_path: Path) -> None:
    assert f"{architecture}.{key}" in load_error(tmp_path, architecture, **{key: value})


@pytest.mark.parametrize(
    ("architecture", "changed"),
    [
        ("minimax-m2", {"expert_weights_norm": True, "expert_gating_func": 2}),
        ("qwen3moe", {"expert_gating_func": 1, "expert_weights_norm": None}),
        ("qwen2moe", {"expert_gating_func": 1, "expert_weights_norm": False}),
        ("llama", {"expert_weights_norm": False, "expert_count": 0, "expert_used_count": 0}),
    ],
    ids=str,
)
def test_supported_metadata_values(architecture: str, changed: dict[str, Any], tmp_path: Path) -> None:
    require_same_logits(tmp_path, architecture, **changed)


def test_expert_weights_norm(tmp_path: Path) -> None:
    for normalized in (True, False):
        case = CASES["qwen2moe"]
        model = HFAutoModelForCausalLM.from_config(case.config)
        file = tmp_path / f"{normalized}.gguf"
        write(file, model, "qwen2moe", case, expert_weights_norm=normalized)
        assert AutoConfig.for_model(**configuration(file)).norm_topk_prob is normalized


@pytest.mark.parametrize(("layers", "scalar"), [(2, 16), (46, 20), (62, 20)])
def test_gemma2_query_pre_attn_scalar(layers: int, scalar: int, tmp_path: Path) -> None:
    keys = CASES["gemma2"].keys | {"block_count": layers, "embedding_length": 80}
    assert configuration(header_only(tmp_path / "model.gguf", "gemma2", keys))["query_pre_attn_scalar"] == scalar


def test_duplicate_tensor_names_raise(tmp_path: Path) -> None:
    case = CASES["llama"]
    model = HFAutoModelForCausalLM.from_config(case.config)
    extra = {"blk.0.attn_norm.weight.weight": np.ones(64, np.float32)}
    write(tmp_path / "model.gguf", model, "llama", case, extra)
    with pytest.raises(CheckpointError, match=r"several names: blk\.0\.attn_norm\.weight, blk"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [("llama", "embedding_length", 1), ("llama", "attention.head_count", 0), ("gemma2", "attention.head_count", 3)],
)
def test_invalid_metadata_raises(architecture: str, key: str, value: int, tmp_path: Path) -> None:
    keys = CASES[architecture].keys | {key: value}
    file = header_only(tmp_path / "model.gguf", architecture, keys)
    with pytest.raises(CheckpointError, match="correct the file's metadata"):
        configuration(file)


def test_architecture_without_model_raises(tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", "deci", BASE | RMS)
    with pytest.raises(CheckpointError, match=r"'deci', which transformers .* has no model for") as caught:
        AutoModelForCausalLM.from_pretrained(file)
    assert "safetensors" in str(caught.value)


def test_zero_softcap_means_none(tmp_path: Path) -> None:
    keys = CASES["gemma2"].keys | {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    values = configuration(header_only(tmp_path / "model.gguf", "gemma2", keys))
    assert values["attn_logit_softcapping"] is None
    assert values["final_logit_softcapping"] is None


@pytest.mark.parametrize("architecture", ["falcon", "gpt2"])
def test_load_logs_no_unused_metadata(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    require_same_logits(tmp_path, architecture)
    assert "nothing in" not in caplog.text


@pytest.mark.parametrize("kind", ["yarn", "none"])
def test_gpt_oss_metadata_raises(kind: str, tmp_path: Path) -> None:
    file = header_only(tmp_path / "model.gguf", "gpt-oss", BASE | RMS | {"rope.scaling.type": kind})
    with pytest.raises(CheckpointError, match="gpt-oss") as caught:
        AutoModelForCausalLM.from_pretrained(file)
    assert "safetensors" in str(caught.value)
