"""Megatron-Core as an engine: its GPT model in a process of its own (extra `megatron`).

It is a trainer and has no cache: it scores tokens as fast as others, and generates slowly. As the second trainer of a
consistency check it is compared with the engine beside ours; as a witness it has a vote. `megatron_worker.py` is what
runs in the process.
"""

from __future__ import annotations

from importlib.util import find_spec

from nrl_models.engines.processes.worker_engine import WorkerEngine
from nrl_models.errors import EngineError


class MegatronEngine(WorkerEngine):
    """A running Megatron-Core, of one rank."""

    name = "megatron"
    who = "Megatron-Core"
    module = "nrl_models.engines.processes.megatron_worker"

    @classmethod
    def require(cls) -> None:
        """See `WorkerEngine.require`."""
        if find_spec("megatron") is None or find_spec("megatron.core") is None:
            raise EngineError("megatron-core is not installed: pip install 'nrl_models[megatron]'")
