"""Compare weights received from a trainer with the files that transformers saves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import silent_transformers

ARCHITECTURES = sorted(name for name in registry.architectures(aliases=False))

each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@lru_cache(maxsize=1)
def case_of(name: str) -> FamilyCase:
    """Return the tiny case of an architecture: our model and transformers' with the same random weights."""
    if requirement := registry.unmet_requirement(name):
        pytest.skip(f"needs {requirement}")
    return FamilyCase(registry.model_class(name), torch.device("cpu"))


def saved_by_transformers(reference: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors in the files that transformers' `save_pretrained` writes."""
    with TemporaryDirectory() as folder, silent_transformers():
        reference.save_pretrained(folder)
        return tensors_in(Path(folder))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the files of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def hook_of(trainer: str) -> str:
    """Return the trainer hook in docs/trainers.md, which the tests run."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    (code,) = [
        block
        for block in re.findall(r"^```\w+\n(.*?)^```$", page, re.M | re.S)
        if f"adapters.{trainer}" in block or f"import {trainer}" in block
    ]
    return code


class Receiver:
    """Receive tensors as an engine does, with a copy of each."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            assert name not in self.tensors, f"{name} was sent twice"
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter), f"{name} is a {type(tensor).__name__}"
            self.tensors[name] = tensor.detach().clone()


def assert_same_bytes(received: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Check that names, shapes, dtypes and bytes are identical."""
    assert received.keys() == saved.keys(), sorted(received.keys() ^ saved.keys())[:9]
    for name, tensor in saved.items():
        assert received[name].shape == tensor.shape, name
        assert received[name].dtype == tensor.dtype, name
        assert torch.equal(as_bytes(received[name]), as_bytes(tensor)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
