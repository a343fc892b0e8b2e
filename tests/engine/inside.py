"""One small cell, and access to the model inside a vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nrl_models.consistency.cells import Settings
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.logprobs import Sampling

SETTINGS = Settings(
    lengths=(64,),
    data=("dummy",),
    modes=("sampling",),
    batches=(2,),
    sampling=Sampling(0.7, top_p=0.95),
    new_tokens=24,
    threshold=1.001,
)
"""One small cell, with a bound that only equal precision meets."""


def model_of(engine: VLLMEngine) -> torch.nn.Module:
    """Return the model inside a vLLM engine of this process."""
    return engine.llm.collective_rpc("nrl_model")[0]


@contextmanager
def changed(tensor: torch.Tensor, value: torch.Tensor) -> Iterator[None]:
    """Change a tensor within a `with` block."""
    original = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(original)


def clear_prefix_cache(engine: VLLMEngine) -> None:
    """Clear vLLM's prefix cache."""
    engine.llm.reset_prefix_cache()
