"""Small models as checkpoints, trainers and engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import peaked_llama
from http_refit_server import Served, serving, train
from test_transfer import Workers, model_of
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.http import HTTPEngine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `peaked_llama`."""
    return peaked_llama(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def trainer(checkpoint: Path) -> HFEngine:
    """The nrl_models model of the checkpoint. Shared: do not change it."""
    return HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), "trainer")


@pytest.fixture
def engine(checkpoint: Path) -> HFEngine:
    """transformers' model of the checkpoint as an engine. Tests may change it."""
    return HFEngine.start(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Three prompts, two of the same length."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(16, 480, (size,), generator=generator).tolist() for size in (9, 14, 9)]


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """A small model. Shared: do not change it."""
    return model_of("LlamaForCausalLM")


@pytest.fixture
def trainer_model(llama: PreTrainedModel) -> PreTrainedModel:
    """The small model. Tests may change it."""
    return copy.deepcopy(llama)


@pytest.fixture
def engine_and_server(llama: PreTrainedModel) -> Iterator[tuple[HTTPEngine, Served]]:
    """An engine whose server has the small model with other weights."""
    served = copy.deepcopy(llama)
    train(served, 0.5, torch.Generator().manual_seed(9))
    with serving(Workers(served)) as engine_and_server:
        yield engine_and_server
