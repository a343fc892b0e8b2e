"""TRL: sync weights to vLLM under the hub's names, with experts unstacked.

TRL's trainers send vLLM the tensors of `named_parameters`: stacked experts under names that vLLM cannot load, prefixes
of transformers' modules, and no buffers. One call changes the tensors that a trainer sends, and nothing else:

    trainer = GRPOTrainer(model=model, args=GRPOConfig(use_vllm=True), ...)
    nrl_models.adapters.trl.send_hub_tensors(trainer)
    trainer.train()

TRL still gathers (FSDP, DeepSpeed), merges adapters and streams. Only names, shapes and order change.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from nrl_models.adapters.hub_stream import HubStream, check_trainer
from nrl_models.common.dtypes import dtype_name
from nrl_models.errors import UnknownArgumentError

REQUIREMENT = "trl>=1.16,<1.17"


def send_hub_tensors(trainer: Any) -> None:
    """Make a TRL trainer send the hub's tensors to vLLM. Call it before training starts.

    Args:
        trainer: A trainer with a `vllm_generation` (GRPO, RLOO, distillation and others, `use_vllm=True`, colocate or
            server) or an asynchronous one (`AsyncGRPOTrainer`, `AsyncDistillationTrainer`). Its model is from this
            library or from transformers.

    Raises:
        TrainerError: If TRL is not installed, or has another version.
        UnknownArgumentError: If the trainer sends no weights to vLLM.
    """
    check_trainer(REQUIREMENT)
    if (generation := getattr(trainer, "vllm_generation", None)) is not None:
        _hook_generation(generation)
    elif hasattr(trainer, "_streaming_iter") and not getattr(trainer, "_lora_sync", False):
        _hook_asynchronous(trainer)
    else:
        raise UnknownArgumentError(
            f"this {type(trainer).__name__} sends vLLM no weights: expected use_vllm=True, or an asynchronous trainer "
            "that does not send adapters as files"
        )


def _hook_generation(generation: Any) -> None:
    """Hook `VLLMGeneration`, which sends the tensors of its `_iter_named_params`. Used by synchronous trainers."""
    stream, gathered = HubStream(generation.model), generation._iter_named_params

    def iter_named_params() -> Iterator[tuple[str, torch.Tensor]]:
        yield from stream(gathered(), generation.model)

    generation._iter_named_params = iter_named_params
    generation._weight_metadata = None  # cached for the previous names


def _hook_asynchronous(trainer: Any) -> None:
    """Hook asynchronous trainers, which announce all tensors at creation and stream them in each update.

    Frozen parameters are skipped, as in TRL, because the engine already has them.
    """
    stream, gathered = HubStream(trainer.model), trainer._streaming_iter

    def streaming_iter() -> Iterator[tuple[str, torch.Tensor]]:
        yield from stream(gathered(), trainer.accelerator.unwrap_model(trainer.model))

    client = trainer.weight_transfer
    if hasattr(client, "_weight_update_info"):  # on the sending process, with TRL's client
        client._weight_update_info |= _announced(trainer, stream)
    trainer._streaming_iter = streaming_iter


def _announced(trainer: Any, stream: HubStream) -> dict[str, list[Any]]:
    """Return names, dtypes and shapes of the streamed tensors, in order, without gathering them."""
    module: Any = import_module(trainer._streaming_iter.__module__)
    model = trainer.accelerator.unwrap_model(trainer.model)
    shapes = (
        (name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        for name, parameter in module._iter_vllm_named_params(model)
    )
    tensors = dict(stream(shapes, model))
    return {
        "names": list(tensors),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
