"""Megatron-Core as an engine: its GPT model in a subprocess (extra `megatron`).

Megatron-Core is a trainer without a cache: it scores tokens as fast as other engines but generates slowly. In a
consistency check it can be the second trainer, or a witness that votes. The subprocess runs `megatron_worker.py`.
"""

from __future__ import annotations

from nrl_models.engines.processes.worker_engine import WorkerEngine


class MegatronEngine(WorkerEngine):
    """A running Megatron-Core, of one rank."""

    name = "megatron"
    engine_name = "Megatron-Core"
    module = "nrl_models.engines.processes.megatron_worker"
    distribution = "megatron-core"
