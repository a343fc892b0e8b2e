"""Fixtures with real pretrained models, from the package index. Where it has them not, tests are skipped, and say why.

They are kept in the user's cache directory (`NRL_MODELS_CACHE`), and are not to be changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nrl_models.errors import DownloadError
from nrl_models.onboarding import real_weights
from nrl_models.onboarding.real_weights import RealWeights


def _or_skip(get: Callable[[RealWeights], Path], weights: RealWeights) -> Path:
    try:
        return get(weights)
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as Hugging Face has it: bf16 safetensors, tokenizer, chat template."""
    return _or_skip(real_weights.checkpoint, real_weights.SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return _or_skip(real_weights.packaged, real_weights.SMOLLM2) / str(real_weights.SMOLLM2.gguf)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 as published."""
    return _or_skip(real_weights.checkpoint, real_weights.MINILM)


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma 3 270M as Hugging Face has it; skipped unless `NRL_MODELS_ACCEPT_TERMS=gemma` accepts its terms."""
    return _or_skip(real_weights.checkpoint, real_weights.GEMMA3_270M)
