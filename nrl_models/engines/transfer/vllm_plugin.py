"""Makes vLLM know this library's backend of weight transfer, in each of its processes.

vLLM calls `register` itself: it is an entry point of the group `vllm.general_plugins`. Where `VLLM_PLUGINS` lists
plugins, `nrl_models` has to be among them.
"""

from __future__ import annotations

NAME = "nrl_models"
"""The backend: `--weight-transfer-config '{"backend": "nrl_models"}'`."""

_CLASSES = "nrl_models.engines.transfer.vllm_engines"


def register() -> None:
    """Register the backend's two sides with vLLM's factories; nothing happens if they are registered."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, _CLASSES, "SharedMemoryEngine")
    if NAME not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(NAME, _CLASSES, "SharedMemoryTrainer")
