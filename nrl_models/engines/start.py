"""Starts an engine by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.config.positions import model_limit
from nrl_models.common.trust.servers import TRANSFORMERS_BACKEND, VLLMS, require_engine
from nrl_models.engines.base import Engine
from nrl_models.errors import EngineError
from nrl_models.loading.read_config import read_config


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
        name: one of `ENGINES`. `vllm-transformers` is vLLM with `model_impl="transformers"`, in a process of its own.
        path: the checkpoint's directory.
        dtype: to compute in; the checkpoint's by default. A server has its own, and this says what it is.
        max_length: tokens of a sequence at most.
        load_format: `auto` reads the checkpoint's weights, `dummy` makes random ones.
        seed: of random numbers and weights.
        options: the engine's own, see its `start`. `python`, an environment's interpreter or directory, starts the vLLM
            that is there (`nrl_models.engines.processes.environment`).

    Raises:
        EngineError: an unknown name, or an engine that is not installed or does not start.
    """
    require_engine(name)
    keywords = {"dtype": dtype, "max_length": max_length, "load_format": load_format, "seed": seed} | options
    if name in VLLMS and is_gguf(resolve_folder(path)):
        raise EngineError(
            f"{path} is a GGUF file, and vLLM would keep its weights quantised: write the plain weights with "
            f"`nrl-models convert {path} DIR --dtype bfloat16`, and check DIR"
        )
    if name == TRANSFORMERS_BACKEND:
        keywords["model_impl"] = "transformers"
    if name in VLLMS and "python" in options:
        from nrl_models.engines.processes.environment import EnvironmentEngine

        return EnvironmentEngine.start(path, **keywords)
    if name in VLLMS:
        from nrl_models.engines.vllm import VLLMEngine

        return VLLMEngine.start(path, **keywords)
    if name == "mlx":
        from nrl_models.engines.processes.mlx import MLXEngine

        return MLXEngine.start(path, **keywords)
    if name == "megatron":
        from nrl_models.engines.processes.megatron_core import MegatronEngine

        return MegatronEngine.start(path, **keywords)
    if name == "hf-generate":
        from nrl_models.engines.hf import HFEngine

        return HFEngine.start(path, **keywords)
    from nrl_models.engines.http import HTTPEngine

    return HTTPEngine.start(path, address=name, **keywords)


def room_to_score(name: str) -> int:
    """How many positions an engine needs beyond the tokens it scores: most have to sample another token."""
    return 0 if name in ("hf-generate", "megatron", "mlx") else 1


def longest_sequence(path: str | Path, name: str) -> int | None:
    """Tokens of the longest sequence of a checkpoint that an engine can score; None if the configuration has no limit.

    Args:
        path: the checkpoint's directory.
        name: the engine's.
    """
    limit = model_limit(read_config(resolve_folder(path)))
    return None if limit is None else limit - room_to_score(name)


def engine_keywords(options: Mapping[str, Any] | None, **own: Any) -> dict[str, Any]:
    """What a command passes to `start_engine`: its own keywords, and the engine's options it was given.

    Args:
        options: the engine's; `max_length` among them takes the place of the command's.
        own: the command's.

    Raises:
        EngineError: an option that the command has another argument for, or decides itself.
    """
    taken = sorted((options or {}).keys() & own.keys() - {"max_length"})
    if taken:
        raise EngineError(
            f"{', '.join(taken)}: not an engine option here, but decided by the command or an argument of its own "
            f"(--{', --'.join(name.replace('_', '-') for name in taken)}, if it has that)"
        )
    return own | dict(options or {})
