"""A small model whose distribution is far from uniform, with transformers' model as the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import peaked_llama

from nrl_models import AutoModelForCausalLM
from nrl_models.consistency.prompts import Prompts
from nrl_models.engines.hf import HFEngine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `peaked_llama`."""
    return peaked_llama(tmp_path_factory.mktemp("consistency"))


@pytest.fixture
def trainer(checkpoint: Path) -> HFEngine:
    """The nrl_models model of the checkpoint. Tests may change it."""
    return HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), "trainer")


@pytest.fixture
def engine(checkpoint: Path) -> HFEngine:
    """transformers' model of the checkpoint as an engine. Tests may change it."""
    return HFEngine.start(checkpoint, dtype=torch.float32)


@pytest.fixture
def prompts() -> Prompts:
    """Prompts with consecutive token ids."""
    return Prompts(None, 512)
