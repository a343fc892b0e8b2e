"""Classes that vLLM's weight transfer is made of, for this library's backend. Importing this needs vLLM.

`AdapterSource` is for every backend of vLLM. With `nccl` and `ipc`, vLLM's own engines carry what it yields; that needs
a GPU on both sides, and no test of this library has run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)

from nrl_models.common.state_dict.merged import export_adapter
from nrl_models.engines.base import finite
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.receiver import Receiver
from nrl_models.engines.transfer.reload import WeightReload
from nrl_models.engines.transfer.sender import ABANDON, BUCKET_BYTES, Sender, Sent, consumed
from nrl_models.engines.transfer.updates import PROTOCOL, Update
from nrl_models.engines.transfer.vllm_plugin import NAME
from nrl_models.errors import EngineError, MixedWeightsError, listed, one_line


class AdapterSource(WeightSource):
    """A model's weights under the hub's names, for any backend of vLLM's weight transfer.

    vLLM's own `ModuleSource` sends `named_parameters()`: names in memory, which are not the hub's for stacked experts
    and models of images, and no persistent buffers.

    Args:
        model: one of this library's, sharded or not. Of a sharded model every rank iterates. Adapters of PEFT in or
            around it are merged (`export_adapter`).
        max_bytes: see `StateDictAdapter.iter_export`; None yields live views.
    """

    def __init__(self, model: Any, max_bytes: int | None = None) -> None:
        self.model, self.max_bytes = model, max_bytes

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor, in the order of iteration; nothing is read."""
        plan = export_adapter(self.model).export_plan()
        return [ParamMeta(name, dtype, tuple(shape)) for name, shape, dtype in plan]

    def __iter__(self) -> Iterator[NamedTensor]:
        yield from export_adapter(self.model).iter_export(self.model, self.max_bytes)


# The engine's side


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """What a `Sender` says first.

    Args:
        protocol: `PROTOCOL` of its version of this library.
        deltas: whether it sends what changed alone, for which the engine keeps the last weights by hub name.
    """

    protocol: int
    deltas: bool = True


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """An update, or None: what was sent before is dropped."""

    update: Update | None


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Takes weights from a trainer on this machine, whole versions only: see `Receiver`.

    An update that the model took in part leaves it refusing: a step of it raises a MixedWeightsError, which ends an
    engine in a process of its own. A trainer that paused it before the update does not resume it, so that it waits,
    paused, for an update of all weights.
    """

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.receiver = Receiver(self._apply, self._refuse)
        self._refusing: Any = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """See `SharedMemoryInit`.

        Raises:
            EngineError: the trainer speaks another protocol.
        """
        if init_info.protocol != PROTOCOL or type(init_info.deltas) is not bool:
            raise EngineError(
                f"the trainer announces {init_info}, and this engine has protocol {PROTOCOL}: both need the same "
                "version of nrl_models"
            )
        self.receiver.keep = init_info.deltas

    def parse_update_info(self, update_dict: dict[str, Any]) -> SharedMemoryUpdate:
        """See `WeightTransferEngine`.

        Raises:
            EngineError: it is no update.
        """
        return SharedMemoryUpdate(None if update_dict == ABANDON else Update.of_json(update_dict))

    def start_weight_update(self) -> None:
        """See `Receiver.start`; the model stays as it is."""
        self.receiver.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and check an update; the model stays as it is, so there is nothing to wait for on the device."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """See `Receiver.stage`."""
        if update_info.update is None:
            self.receiver.start()
        else:
            self.receiver.stage(update_info.update)

    def finish_weight_update(self) -> None:
        """See `Receiver.finish`."""
        self.receiver.finish()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Drop an update that was not finished."""
        self.receiver.start()

    def _apply(self, tensors: Mapping[str, torch.Tensor], changed: Set[str]) -> None:
        """Load the layers in which something changed, and the others, too, if that is not enough."""
        if not changed:
            return
        groups = [group for group in layerwise_groups(list(tensors)) if not changed.isdisjoint(group)]
        some = [name for group in groups for name in group]
        reload = WeightReload(self.model, self.vllm_config)
        try:
            for name, tensor in tensors.items():  # also of a head whose embeddings alone changed
                reload.note_tied(name, tensor)
            reload.require_tied()
            reload.load((name, tensors[name]) for name in some)
            whole = len(some) == len(tensors)
            if not whole and reload.lacking():
                # A module of vLLM's is made of tensors of several layers.
                loaded = set(some)
                reload.load((name, tensor) for name, tensor in tensors.items() if name not in loaded)
                whole = True
            left = reload.finish()
            reload.clean_cache(self.vllm_config)
        except Exception as error:
            if reload.abandon():
                raise MixedWeightsError(one_line(error)) from error
            raise
        if not whole:
            return
        if missing := [*left.parameters, *left.buffers]:
            raise MixedWeightsError(f"{len(missing)} tensors were left unwritten: {listed(missing)}")

    def _refuse(self, message: str | None) -> None:
        """Have the model raise wherever vLLM computes with it; with None, no more."""
        model: Any = self.model
        if self._refusing is not None:
            self._refusing.remove()
            model.__dict__.pop("compute_logits", None)
            self._refusing = None
        if message is not None:

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise MixedWeightsError(message)

            self._refusing = model.register_forward_pre_hook(refuse)
            model.__dict__["compute_logits"] = refuse  # where a recorded graph runs in the place of the model


# The trainer's side


@dataclass
class SharedMemoryTrainerInit(TrainerInitInfo):
    """For `WeightTransferTrainerFactory.trainer_init`: this library's backend.

    Args:
        deltas, bucket_bytes: see `Sender`.
    """

    backend: ClassVar[str] = NAME

    deltas: bool = True
    bucket_bytes: int = BUCKET_BYTES


class SharedMemoryTrainer(TrainerWeightTransferEngine[SharedMemoryTrainerInit]):
    """vLLM's interface for a `Sender`.

    Attributes:
        sent: the last update; None before the first, and on ranks other than 0.
    """

    init_info_cls = SharedMemoryTrainerInit
    sender: Sender
    sent: Sent | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: SharedMemoryTrainerInit,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """On every rank; rank 0 reaches the engine.

        Raises:
            EngineError: no source; or the engine has another backend, or is out of reach.
        """
        if source is None:
            raise EngineError("a source of weights is needed: AdapterSource(model)")
        trainer = cls(client=client, source=source, is_sender=init_info.is_sender)
        trainer.sender = Sender(client, deltas=init_info.deltas, bucket_bytes=init_info.bucket_bytes)
        if trainer.is_sender:
            trainer.sender.prepare()
        return trainer

    def send_weights(self) -> None:
        """One update, on every rank: see `Sender.send`."""
        assert self.source is not None
        if self.is_sender:
            self.sent = self.sender.send(finite(self.source))
        else:
            consumed(self.source)
