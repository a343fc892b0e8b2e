"""A small model whose distribution is far from uniform, as a checkpoint and as engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import peaked_llama

from nrl_models import AutoModelForCausalLM
from nrl_models.engines.hf import HFEngine


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
