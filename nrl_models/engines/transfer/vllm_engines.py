"""Classes for vLLM's weight transfer with this library's backend. Importing this module needs vLLM.

`AdapterSource` works with every backend of vLLM. With `nccl` and `ipc`, vLLM's own engines send its tensors. That needs
a GPU on both sides, and this library has no test for it.
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
from nrl_models.engines.engine_types import BUCKET_BYTES, NamedTensor
from nrl_models.engines.transfer.receiver import Receiver
from nrl_models.engines.transfer.reload import WeightReload
from nrl_models.engines.transfer.sender import ABANDON, Sender
from nrl_models.engines.transfer.sent_tensors import finite
from nrl_models.engines.transfer.updates import PROTOCOL, Update
from nrl_models.engines.transfer.vllm_plugin import NAME
from nrl_models.errors import EngineError, MixedWeightsError, listed, one_line


class AdapterSource(WeightSource):
    """A model's weights under the hub's names, for all backends of vLLM's weight transfer.

    vLLM's `ModuleSource` sends `named_parameters()`. These names in memory differ from the hub's for stacked experts
    and image models, and persistent buffers are missing.

    Args:
        model: A model of this library, sharded or not. If it is sharded, every rank has to iterate. PEFT adapters are
            merged (`export_adapter`).
        max_bytes: See `StateDictAdapter.iter_export`. None yields views.
    """

    def __init__(self, model: Any, max_bytes: int | None = None) -> None:
        self.model, self.max_bytes = model, max_bytes

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each tensor, in order of iteration, without reading them."""
        plan = export_adapter(self.model).export_plan()
        return [ParamMeta(name, dtype, tuple(shape)) for name, shape, dtype in plan]

    def __iter__(self) -> Iterator[NamedTensor]:
        yield from export_adapter(self.model).iter_export(self.model, self.max_bytes)


# The engine's side


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """First message of a `Sender`.

    Args:
        protocol: `PROTOCOL` of the trainer's version of this library.
        deltas: Whether the trainer sends deltas. The engine then keeps the last weights by hub name.
    """

    protocol: int
    deltas: bool = True


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """An update, or None to discard the data sent before."""

    update: Update | None


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Receives weights from a trainer on this machine, in complete versions only: see `Receiver`.

    After an update that was applied only in part, every step of the model raises `MixedWeightsError`, which ends an
    engine that runs in a subprocess. If the trainer paused the engine before the update, it does not resume it: the
    engine stays paused until an update of all weights.
    """

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.receiver = Receiver(self._apply, self._refuse)
        self._refusing: Any = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Configure the receiver from the first message of a `Sender`.

        Raises:
            EngineError: If the trainer uses another protocol version.
        """
        if init_info.protocol != PROTOCOL or type(init_info.deltas) is not bool:
            raise EngineError(
                f"the trainer announces {init_info}, and this engine has protocol {PROTOCOL}: both need the same "
                "version of nrl_models"
            )
        self.receiver.keep = init_info.deltas

    def parse_update_info(self, update_dict: dict[str, Any]) -> SharedMemoryUpdate:
        """Parse a message of `SharedMemoryTrainer`: an update, or the request to discard the data sent before.

        Raises:
            EngineError: If the value is not an update.
        """
        return SharedMemoryUpdate(None if update_dict == ABANDON else Update.of_json(update_dict))

    def start_weight_update(self) -> None:
        """Prepare for an update, see `Receiver.start`. Does not modify the model."""
        self.receiver.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and verify an update. Does not modify the model, so the device need not be synchronized."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Read and verify an update, see `Receiver.stage`. Without an update, discard the data sent before."""
        if update_info.update is None:
            self.receiver.start()
        else:
            self.receiver.stage(update_info.update)

    def finish_weight_update(self) -> None:
        """Apply the update to the model, see `Receiver.finish`, and wait for the device."""
        self.receiver.finish()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Discard an unfinished update."""
        self.receiver.start()

    def _apply(self, tensors: Mapping[str, torch.Tensor], changed: Set[str]) -> None:
        """Reload the layers with changed weights. If a module is then incomplete, reload the other layers as well."""
        if not changed:
            return
        groups = [group for group in layerwise_groups(list(tensors)) if not changed.isdisjoint(group)]
        some = [name for group in groups for name in group]
        reload = WeightReload(self.model, self.vllm_config)
        try:
            for name, tensor in tensors.items():  # also note the head if only its embeddings changed
                reload.note_tied(name, tensor)
            reload.require_tied()
            reload.load((name, tensors[name]) for name in some)
            full_reload = len(some) == len(tensors)
            if not full_reload and reload.lacking():
                # A module of vLLM consists of tensors of several layers.
                loaded = set(some)
                reload.load((name, tensor) for name, tensor in tensors.items() if name not in loaded)
                full_reload = True
            left = reload.finish()
            reload.clean_cache(self.vllm_config)
        except Exception as error:
            if reload.abandon():
                raise MixedWeightsError(one_line(error)) from error
            raise
        if not full_reload:
            return
        if missing := [*left.parameters, *left.buffers]:
            raise MixedWeightsError(f"{len(missing)} tensors were left unwritten: {listed(missing)}")

    def _refuse(self, message: str | None) -> None:
        """Make every step of the model raise `message`. None makes the steps run again."""
        model: Any = self.model
        if self._refusing is not None:
            self._refusing.remove()
            model.__dict__.pop("compute_logits", None)
            self._refusing = None
        if message is not None:

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise MixedWeightsError(message)

            self._refusing = model.register_forward_pre_hook(refuse)
            model.__dict__["compute_logits"] = refuse  # also raises if a captured graph runs instead of the forward


# The trainer's side


@dataclass
class SharedMemoryTrainerInit(TrainerInitInfo):
    """Options of this library's backend for `WeightTransferTrainerFactory.trainer_init`.

    Args:
        deltas, bucket_bytes: See `Sender`.
    """

    backend: ClassVar[str] = NAME

    deltas: bool = True
    bucket_bytes: int = BUCKET_BYTES


class SharedMemoryTrainer(TrainerWeightTransferEngine[SharedMemoryTrainerInit]):
    """vLLM's trainer interface for a `Sender`.

    Attributes:
        sent: The last update; None before the first, and on ranks other than 0.
    """

    init_info_cls = SharedMemoryTrainerInit
    sender: Sender
    sent: Update | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: SharedMemoryTrainerInit,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Initialize the trainer. Every rank calls this; rank 0 connects to the engine.

        Raises:
            EngineError: If there is no source, or the engine has another backend or cannot be reached.
        """
        if source is None:
            raise EngineError("a source of weights is needed: AdapterSource(model)")
        trainer = cls(client=client, source=source, is_sender=init_info.is_sender)
        trainer.sender = Sender(client, deltas=init_info.deltas, bucket_bytes=init_info.bucket_bytes)
        if trainer.is_sender:
            trainer.sender.prepare()
        return trainer

    def send_weights(self) -> None:
        """Send one update to the engine, see `Sender.send`. Every rank has to call this."""
        assert self.source is not None
        if self.is_sender:
            self.sent, _ = self.sender.send(finite(self.source))
        else:
            for _ in self.source:  # gathering involves all ranks
                pass
