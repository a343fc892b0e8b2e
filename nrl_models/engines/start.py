"""Starts an engine by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nrl_models.engines.base import Engine
from nrl_models.errors import EngineError

ENGINES = ("vllm", "hf-generate", "http://HOST:PORT")
"""Names of engines; any `http://` or `https://` address is a server."""


def start_engine(
    name: str,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    **options: Any,
) -> Engine:
    """Start an engine on a checkpoint, or connect to a server that serves it.

    Args:
        name: one of `ENGINES`.
        path: the checkpoint's directory.
        dtype: to compute in; the checkpoint's by default. A server has its own.
        max_length: tokens of a sequence at most.
        load_format: `auto` reads the checkpoint's weights, `dummy` makes random ones.
        seed: of random numbers and weights.
        options: the engine's own, see its `start`.

    Raises:
        EngineError: an unknown name, or an engine that is not installed or does not start.
    """
    keywords = {"dtype": dtype, "max_length": max_length, "load_format": load_format, "seed": seed} | options
    if name == "vllm":
        from nrl_models.engines.vllm import VLLMEngine

        return VLLMEngine.start(path, **keywords)
    if name == "hf-generate":
        from nrl_models.engines.hf import HFEngine

        return HFEngine.start(path, **keywords)
    if name.startswith(("http://", "https://")):
        from nrl_models.engines.http import HTTPEngine

        return HTTPEngine.start(path, address=name, **keywords)
    raise EngineError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")
