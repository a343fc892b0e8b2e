"""Start an engine by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.positions import model_limit
from nrl_models.common.trust.servers import TRANSFORMERS_BACKEND, VLLMS, require_engine
from nrl_models.common.trust.weight_names import require_standard_names
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
        name: One of `ENGINES`. `vllm-transformers` is vLLM with `model_impl="transformers"` in a subprocess.
        path: Directory of the checkpoint.
        dtype: Compute dtype; default: the checkpoint's. For a server, state the dtype that it was started with.
        max_length: Maximum number of tokens of a sequence.
        load_format: `auto` reads the checkpoint's weights, `dummy` creates random ones.
        seed: Random seed for sampling and for random weights.
        options: Further options. Other names raise `EngineError`.

            - `vllm`, `vllm-transformers`: keywords of `vllm.LLM`; `multiprocessing=True` (run in a subprocess),
              `log_level`, and `python` (start the vLLM of this interpreter or virtual environment).
            - `hf-generate`: `device`.
            - A server: `model` (its name there), `api_key`, `timeout` in seconds, and `deltas=False` (send complete
              weights in each refit).
            - `mlx`, `megatron`: none.

    Raises:
        EngineError: If the name or an option is unknown, an option has an invalid value, or the engine is not installed
            or does not start.
        CheckpointError: If a file of the checkpoint is a link to a file outside of its directory, or vLLM or mlx-lm
            would read other weights than the checkpoint has.

    Examples:
        >>> from nrl_models import Sampling, start_engine
        >>> engine = start_engine("hf-generate", "demo/checkpoint")
        >>> samples = engine.generate([[11, 12, 13]], Sampling(temperature=0.8), max_new_tokens=4)
        >>> len(samples[0].tokens) == len(samples[0].logprobs)
        True
    """
    require_engine(name)
    keywords = {"dtype": dtype, "max_length": max_length, "load_format": load_format, "seed": seed} | options
    if name in VLLMS:
        folder = resolve_folder(path)
        if is_gguf(folder):
            raise EngineError(
                f"{path} is a GGUF file, and vLLM would keep its weights quantized: dequantize it with "
                f"`nrl-models convert {path} DIR --dtype bfloat16`, then check DIR"
            )
        require_links_inside(folder)
        if load_format == "auto":
            require_standard_names(folder, "vLLM")
    if name == TRANSFORMERS_BACKEND:
        keywords["model_impl"] = "transformers"
    if name in VLLMS and "python" in options:
        from nrl_models.engines.processes.environment import EnvironmentEngine

        return EnvironmentEngine.start(path, **keywords)
    if name in VLLMS:
        from nrl_models.engines.vllm import VLLMEngine

        return VLLMEngine.start(path, **keywords)
    if name == "mlx":
        if load_format == "auto" and not is_gguf(folder := resolve_folder(path)):
            require_standard_names(folder, "mlx-lm", "model*.safetensors")
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
    """Return the number of positions that an engine needs beyond scored tokens. Most engines sample one more token."""
    return 0 if name in ("hf-generate", "megatron", "mlx") else 1


def longest_sequence(path: str | Path, name: str) -> int | None:
    """Return the maximum length of a sequence that an engine can score; None if the configuration has no limit.

    Args:
        path: Directory of the checkpoint.
        name: Name of the engine.
    """
    limit = model_limit(read_config(resolve_folder(path)))
    return None if limit is None else limit - room_to_score(name)


def engine_keywords(options: Mapping[str, Any] | None, **keywords: Any) -> dict[str, Any]:
    """Merge a command's keywords for `start_engine` with the engine options that the user passed.

    Args:
        options: Engine options of the user. Only `max_length` may override a keyword of the command.
        keywords: Keywords that the command sets.

    Raises:
        EngineError: If an option is also set by the command.
    """
    taken = sorted((options or {}).keys() & keywords.keys() - {"max_length"})
    if taken:
        raise EngineError(
            f"{', '.join(taken)}: not an engine option here. The command sets it, or has a separate argument for it "
            f"(--{', --'.join(name.replace('_', '-') for name in taken)}, if it has that)"
        )
    return keywords | dict(options or {})
