"""Starting vLLM where a process has one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from vllm.model_executor.models import registry as models

from nrl_models.engines.vllm import VLLMEngine


class OneEngine:
    """Gives a vLLM on a checkpoint, the same one as long as the same is asked for: each start takes seconds.

    A context manager: leaving it stops the one that runs.
    """

    def __init__(self) -> None:
        self._asked, self._running = "", None
        # vLLM looks at each model class in a process that imports all of vLLM again, for the sake of GPUs.
        models._run_in_subprocess = lambda look: look()

    def __call__(self, path: Path, **options: Any) -> VLLMEngine:
        """A vLLM on the checkpoint in `path`: in fp32, for 256 tokens and no images, unless `options` say otherwise."""
        options = {"dtype": torch.float32, "max_length": 256, "language_model_only": True} | options
        asked = f"{path} {sorted(options.items())}"
        if self._running is None or asked != self._asked:
            self.stop()
            self._running, self._asked = VLLMEngine.start(path, **options), asked
        return self._running

    def stop(self) -> None:
        """Stop the one that runs, if one does: for a test that starts its own."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
