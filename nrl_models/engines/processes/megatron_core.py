"""Megatron-Core as an engine: its GPT model in a process of its own (extra `megatron`).

It is a trainer and has no cache: it scores tokens as fast as others, and generates slowly. As the second trainer of a
consistency check it is compared with the engine beside ours; as a witness it has a vote. `megatron_worker.py` is what
runs in the process.
"""

from __future__ import annotations

from nrl_models.engines.processes.worker_engine import WorkerEngine


class MegatronEngine(WorkerEngine):
    """A running Megatron-Core, of one rank."""

    name = "megatron"
    who = "Megatron-Core"
    module = "nrl_models.engines.processes.megatron_worker"
    distribution = "megatron-core"
