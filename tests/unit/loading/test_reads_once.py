"""Loading parses config.json once to find the names of weights, and reads each header once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.common.checkpoint import files


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the reads of headers, by file, and of config.json for the names of weights."""
    counts: Counter[str] = Counter()

    def stored_tensors(handle: Any, file: str, problems: Any) -> Iterator[Any]:
        counts[file] += 1
        return headers(handle, file, problems)

    def named_weights(folder: Path) -> Any:
        counts["config.json"] += 1
        return names(folder)

    headers, names = files.stored_tensors, files.named_weights
    monkeypatch.setattr(files, "stored_tensors", stored_tensors)
    monkeypatch.setattr(files, "named_weights", named_weights)
    monkeypatch.setattr("nrl_models.common.checkpoint.resolve_folder.named_weights", named_weights)
    return counts


def test_single_file_checkpoint_is_read_once(folder: Path, reads: Counter[str]) -> None:
    AutoModelForCausalLM.from_pretrained(folder)
    assert reads == {WEIGHTS: 1, "config.json": 1}


def test_single_file_next_to_index_is_read_once(shards: Path, reads: Counter[str]) -> None:
    tensors = {name: tensor for file in shards.glob("model-*") for name, tensor in load_file(file).items()}
    names = {file.name for file in shards.glob("model-*")}
    assert len(names) > 1
    save_file(tensors, shards / WEIGHTS, {"format": "pt"})
    AutoModelForCausalLM.from_pretrained(shards)
    assert reads == dict.fromkeys([*names, WEIGHTS, "config.json"], 1)


@pytest.mark.integrations
def test_bitsandbytes_quantization_reads_checkpoint_once(folder: Path, reads: Counter[str]) -> None:
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    assert reads == {WEIGHTS: 1, "config.json": 1}
