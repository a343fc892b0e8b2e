"""Damaged bytes or keys in any file of a checkpoint give either a model or a typed error.

`tests/campaign` damages files more thoroughly, with Hypothesis.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, WEIGHTS

from nrl_models import AutoModelForCausalLM
from nrl_models.errors import CheckpointError, NRLModelsError, ProblemKind

CASES = 120
VALUES = (None, True, -1, 0, 2**40, 1e300, "", "x", "../x", [], [None], {}, {"a": [1]})


def damaged_bytes(choose: random.Random, data: bytes, header: int) -> bytes:
    """Flip, remove or insert a byte of the header, or truncate the file."""
    at = choose.randrange(header)
    kinds = {
        "flip": data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :],
        "remove": data[:at] + data[at + 1 :],
        "insert": data[:at] + choose.randbytes(1) + data[at:],
        "cut": data[: choose.randrange(len(data))],
    }
    return kinds[choose.choice(list(kinds))]


def damaged_keys(choose: random.Random, content: Any) -> Any:
    """Remove, replace or rename one key of an object, or of an object inside it."""
    holder = content
    while nested := [value for value in holder.values() if isinstance(value, dict) and value]:
        if choose.random() < 0.5:
            break
        holder = choose.choice(nested)
    key = choose.choice(list(holder))
    kind = choose.choice(["remove", "replace", "replace", "rename"])
    value = holder.pop(key)
    if kind == "replace":
        holder[key] = choose.choice(VALUES)
    elif kind == "rename":
        holder[f"{key}_"] = value
    return content


def damage(choose: random.Random, file: Path) -> None:
    """Damage the bytes or the keys of a JSON or safetensors file."""
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
    if choose.random() < 0.5:
        file.write_bytes(damaged_bytes(choose, data, size))
    elif file.suffix == ".safetensors":
        header = json.dumps(damaged_keys(choose, json.loads(data[8:size]))).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
    else:
        file.write_text(json.dumps(damaged_keys(choose, json.loads(data))))


@pytest.mark.long
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", WEIGHTS, INDEX, "model-00001-of-*"])
def test_damaged_file_loads_or_raises_typed_error(
    name: str, llama_checkpoint: Path, llama_shards: Path, tmp_path: Path
) -> None:
    source = llama_shards if name in (INDEX, "model-00001-of-*") else llama_checkpoint
    outcomes: Counter[str] = Counter()
    for seed in range(CASES):
        folder = Path(shutil.copytree(source, tmp_path / str(seed)))
        damage(random.Random(f"{name} {seed}"), next(folder.glob(name)))
        try:
            AutoModelForCausalLM.from_pretrained(folder)
            outcomes["loaded"] += 1
        except NRLModelsError:
            outcomes["typed"] += 1
        shutil.rmtree(folder)
    assert outcomes["typed"] > CASES // 4
    assert outcomes.total() == CASES


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", WEIGHTS, INDEX, "model-00001-of-*"])
@pytest.mark.parametrize("kind", ["removed", "empty", "directory"])
def test_missing_or_empty_file_raises(
    name: str, kind: str, llama_checkpoint: Path, llama_shards: Path, tmp_path: Path
) -> None:
    source = llama_shards if name in (INDEX, "model-00001-of-*") else llama_checkpoint
    folder = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    file = next(folder.glob(name))
    file.unlink()
    if kind == "empty":
        file.touch()
    elif kind == "directory":
        file.mkdir()
    if name == "generation_config.json" and kind == "removed":
        AutoModelForCausalLM.from_pretrained(folder)
    else:
        with pytest.raises(CheckpointError) as caught:
            AutoModelForCausalLM.from_pretrained(folder)
        assert ProblemKind.REPLACED not in {problem.kind for problem in caught.value.problems}
