"""No load reads a pickle or a file outside the checkpoint: with any quantization method, and by any command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import INDEX, WEIGHTS, edit_config, stored
from test_unsafe_files import Payload
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM, start_engine
from nrl_models.cli import app
from nrl_models.errors import NRLModelsError

METHODS = sorted({*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes", "modelopt"})

LOADS: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
    "hf-generate": lambda folder: start_engine("hf-generate", folder),
}


def index_of(file: str, name: str = INDEX) -> Callable[[Path], None]:
    """Return a function that replaces the weights of a checkpoint by an index of one file."""

    def write(folder: Path) -> None:
        keys = list(stored(folder))
        (folder / WEIGHTS).unlink()
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, file)}))

    return write


def only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    shutil.copy(folder / "payload.bin", folder / "pytorch_model.bin")


ATTACKS: dict[str, Callable[[Path], object]] = {
    "index": index_of("payload.bin"),
    "index outside": index_of("../payload.bin"),
    "index of safetensors outside": index_of("../other.safetensors"),
    "pickle": only_pickle,
    "index of pickles": index_of("payload.bin", "pytorch_model.bin.index.json"),
    "configuration": lambda folder: edit_config(folder, transformers_weights="payload.bin"),
    "configuration outside": lambda folder: edit_config(folder, transformers_weights="../other.safetensors"),
}
"""Changes of a checkpoint next to a pickle, with another pickle and weights in the folder around it."""


@pytest.fixture(params=[pytest.param(name, marks=() if name == "index" else pytest.mark.long) for name in ATTACKS])
def unsafe(request: pytest.FixtureRequest, llama_checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    """A checkpoint that a load must not read. Opening a pickle fails the test."""
    folder = Path(shutil.copytree(llama_checkpoint, tmp_path / "checkpoint"))
    shutil.copy(folder / WEIGHTS, tmp_path / "other.safetensors")
    for place in (folder, tmp_path):
        torch.save(Payload(tmp_path / "ran"), place / "payload.bin")
    ATTACKS[request.param](folder)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail(f"opens {args[0]}"))
    return folder


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_every_quantization_method_raises_for_unsafe_files(
    load: Callable[[Path], Any], unsafe: Path, tmp_path: Path
) -> None:
    for method in METHODS:
        edit_config(unsafe, quantization_config={"quant_method": method, "load_in_4bit": True})
        with pytest.raises(NRLModelsError):
            load(unsafe)
    assert not (tmp_path / "ran").exists()


COMMANDS = (
    "inspect {folder}",
    "plan {folder} --mesh fsdp=2",
    "convert {folder} {folder}-out",
    "parity {folder}",
    "diagnose embeddings {folder}",
    "quirks {folder}",
    "certify {folder} --out {folder}-out",
    "consistency {folder} --engine hf-generate --out {folder}-out",
    "refit-check {folder} --engine hf-generate",
    "new {folder} --out {folder}-out",
    "train demo/sft model.pretrained_model_name_or_path={folder}",
)
READS_NO_WEIGHTS = ("plan", "quirks")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition(" ")[0])
def test_every_command_raises_for_unsafe_files(command: str, unsafe: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, command.format(folder=unsafe).split())
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert not (tmp_path / "ran").exists()
    if not command.startswith(READS_NO_WEIGHTS):
        assert result.exit_code, result.output
