"""MLX as an engine: its own array library, and mlx-lm's own models, in a process of its own (extra `mlx`).

A third implementation beside transformers' classes and vLLM's: where two of them disagree, it has a vote. It runs on
Apple's GPUs, and on a CPU. `mlx_worker.py` is what runs in the process.
"""

from __future__ import annotations

from importlib.util import find_spec

from nrl_models.engines.processes.worker_engine import WorkerEngine
from nrl_models.errors import EngineError


class MLXEngine(WorkerEngine):
    """A running MLX; loads a checkpoint as mlx-lm does."""

    name = "mlx"
    who = "MLX"
    module = "nrl_models.engines.processes.mlx_worker"

    @classmethod
    def require(cls) -> None:
        """See `WorkerEngine.require`."""
        if find_spec("mlx_lm") is None:
            raise EngineError(
                "mlx-lm is not installed: pip install 'nrl_models[mlx]' (where there is no Apple GPU, also 'mlx[cpu]')"
            )
