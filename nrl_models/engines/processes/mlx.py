"""MLX as an engine: mlx-lm's models on MLX arrays, in a subprocess (extra `mlx`).

MLX is a third implementation in addition to transformers and vLLM. If those two disagree, it votes. It runs on Apple
GPUs and on CPUs. The subprocess runs `mlx_worker.py`.
"""

from __future__ import annotations

from nrl_models.engines.processes.worker_engine import WorkerEngine


class MLXEngine(WorkerEngine):
    """A running MLX; loads a checkpoint as mlx-lm does."""

    name = "mlx"
    engine_name = "MLX"
    module = "nrl_models.engines.processes.mlx_worker"
    distribution = "mlx-lm"
    hint = " (where there is no Apple GPU, also 'mlx[cpu]')"
