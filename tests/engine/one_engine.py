"""Start vLLM engines in a process that can have only one at a time."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import vllm.v1.worker.gpu_model_runner  # noqa: F401  # imported now, so that `_shorten_starts` freezes its modules
from vllm.model_executor.models import registry as models
from vllm.platforms import current_platform

from nrl_models.engines.vllm import VLLMEngine


class OneEngine:
    """Return a vLLM engine for a checkpoint. Equal requests return the running engine, because a start takes seconds.

    A context manager: leaving it stops the running engine.
    """

    def __init__(self) -> None:
        self._running_request, self._running = "", None
        _shorten_starts()

    def __call__(self, path: Path, **options: Any) -> VLLMEngine:
        """Return a vLLM engine for `path`. Default `options`: fp32, 256 tokens, no images, a cache of 256 MiB."""
        defaults = {"dtype": torch.float32, "max_length": 256, "language_model_only": True}
        options = defaults | {"kv_cache_memory_bytes": 2**28} | options
        request = f"{path} {sorted(options.items())}"
        if self._running is None or request != self._running_request:
            self.stop()
            self._running, self._running_request = VLLMEngine.start(path, **options), request
        return self._running

    def stop(self) -> None:
        """Stop the running engine, if any, so that a test can start its own."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@cache
def _shorten_starts() -> None:
    """Leave out work that vLLM repeats at each start and stop in a process: 5 of 6 seconds with a tiny model."""
    # To protect GPU state, vLLM inspects each model class in a process that imports all of vLLM again.
    models._run_in_subprocess = lambda look: look()
    # vLLM collects garbage ten times, each time after it has unfrozen the objects of all modules.
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    # vLLM searches all modules for kernels to replace, which the first start has replaced.
    current_platform.register_triton_kernel_overrides = cache(current_platform.register_triton_kernel_overrides)
