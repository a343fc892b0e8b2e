"""Adapters are imported lazily, and a missing trainer package raises an error."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from nrl_models.adapters import automodel, hub_stream, prime_rl, trl
from nrl_models.errors import TrainerError, UnknownArgumentError
from nrl_models.families.llama.model import LlamaForCausalLM

TRAINERS = ("automodel", "prime_rl", "trl", "verl")


@pytest.mark.long
def test_adapters_are_imported_lazily() -> None:
    code = """
import sys, nrl_models
from nrl_models import *
nrl_models.AutoModelForCausalLM, nrl_models.registry.model_class("LlamaForCausalLM")
print([name for name in sys.modules if name.startswith("nrl_models.adapters")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_adapter_modules_are_short(trainer: str) -> None:
    assert len((Path(hub_stream.__file__).parent / f"{trainer}.py").read_text().splitlines()) < 150


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("call", "requirement"),
    [
        (automodel.register, r"nemo_automodel<0\.8,>=0\.7"),
        (prime_rl.register, r"prime-rl<0\.9,>=0\.8"),
        (lambda: trl.send_hub_tensors(None), r"trl<1\.17,>=1\.16"),
        (lambda: importlib.import_module("nrl_models.adapters.verl"), r"verl<0\.10,>=0\.9"),
    ],
    ids=TRAINERS,
)
def test_missing_trainer_raises(call: Any, requirement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.registry.version", missing)
    monkeypatch.delitem(sys.modules, "nrl_models.adapters.verl", raising=False)
    with pytest.raises(TrainerError, match=f"needs {requirement}, which is not installed"):
        call()


def test_module_without_transformers_model_raises() -> None:
    with pytest.raises(UnknownArgumentError, match="Sequential has no transformers model inside"):
        hub_stream.HubStream(nn.Sequential(nn.Linear(2, 2)))


def test_class_registered_with_transformers_loads(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, LlamaConfig, LlamaForCausalLM)
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, dtype=torch.float32)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.float32
    with pytest.raises(UnknownArgumentError, match=r"some/where is an adapter\. Load its base model"):
        LlamaForCausalLM.from_pretrained(llama_checkpoint, adapter_kwargs={"_adapter_model_path": "some/where"})
