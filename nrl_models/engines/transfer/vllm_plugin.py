"""Register this library's weight-transfer backend in each process of vLLM.

vLLM calls `register`, an entry point of the group `vllm.general_plugins`. If `VLLM_PLUGINS` is set, it must include
`nrl_models`.
"""

from __future__ import annotations

NAME = "nrl_models"
"""The backend: `--weight-transfer-config '{"backend": "nrl_models"}'`."""

_CLASSES = "nrl_models.engines.transfer.vllm_engines"


def register() -> None:
    """Register both sides of the backend with vLLM's factories, unless they are registered."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, _CLASSES, "SharedMemoryEngine")
    if NAME not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(NAME, _CLASSES, "SharedMemoryTrainer")
