"""MLX as an engine: its own array library, and mlx-lm's own models, in a process of its own (extra `mlx`).

A third implementation beside transformers' classes and vLLM's: where two of them disagree, it has a vote. It runs on
Apple's GPUs, and on a CPU. `mlx_worker.py` is what runs in the process.
"""

from __future__ import annotations

from nrl_models.engines.processes.worker_engine import WorkerEngine


class MLXEngine(WorkerEngine):
    """A running MLX; loads a checkpoint as mlx-lm does."""

    name = "mlx"
    who = "MLX"
    module = "nrl_models.engines.processes.mlx_worker"
    distribution = "mlx-lm"
    hint = " (where there is no Apple GPU, also 'mlx[cpu]')"
