"""Map the tensors of a refit to the parameters of a transformers model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedModel

from nrl_models.common.dtypes import same_kind, wrong_kind
from nrl_models.common.state_dict.adapter import adapter_of
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.views.view import HFTensor
from nrl_models.engines.digests import tensor_digest, tied_apart
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer.sent_tensors import require_range
from nrl_models.errors import EngineError, did_you_mean

SENT_NAMES = (
    "Send the tensors of nrl_models.export_adapter(model).iter_export(model), and leave out modules that the engine's "
    "checkpoint does not have"
)
"""Advice for tensors that a model does not have."""


class RefitTargets:
    """Map refit tensors to the parameters of a transformers model, and check that they fit.

    Args:
        model: The engine's model.
        engine: Name of the engine, for errors.

    Attributes:
        held: Tensors of the model by parameter name. They share its memory.
    """

    def __init__(self, model: PreTrainedModel, engine: str) -> None:
        self._adapter, self._engine, self._mtp = adapter_of(model), engine, MTPNames(model)
        self.held = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        self._tied: dict[str, tuple[HFTensor, str]] = {}
        self._sent: dict[str, str] = {}
        self._storages = {tensor.untyped_storage()._cdata for tensor in self.held.values()}
        self._found: set[int] = set()

    def without_aliases(self, bucket: list[NamedTensor]) -> list[NamedTensor]:
        """Copy the tensors of a bucket that share memory with another tensor of the model, and return the bucket.

        Writing the tensors before them could overwrite their values, for example if two experts are swapped.

        Raises:
            EngineError: If an earlier bucket may have overwritten the values.
        """
        for index, (name, tensor) in enumerate(bucket):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._storages or self._is_held_as(name, tensor):
                continue
            if storage in self._found:
                raise EngineError(
                    f"{name} shares memory with weights of {self._engine} that this refit has already changed: send a "
                    "copy of it (tensor.clone())"
                )
            bucket[index] = name, tensor.clone()
        return bucket

    def _is_held_as(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is the model's own under this name, so that writing it changes nothing."""
        target = self._adapter.find(name)
        if target is None or target.view is None:
            return False
        held = target.view.of(self.held[target.view.parameter])
        return tensor.is_set_to(held)

    def find(self, name: str, tensor: torch.Tensor) -> HFTensor | None:
        """Return the target of a tensor by its hub name.

        None if it is not written: an MTP weight (this engine does no speculative decoding), or a tensor that the model
        ties to another, see `require_tied`.

        Raises:
            EngineError: If the model has no such tensor, got it under another name, its shape or kind of dtype differs,
                or values are infinite in the model's dtype.
        """
        target = self._adapter.find(name)
        if target is None and self._mtp.may_be(name):
            return None
        if target is None:
            raise EngineError(
                f"{name} of shape {tuple(tensor.shape)}: the model of {self._engine} has no such tensor"
                f"{did_you_mean(name, self._adapter.hub)}. {SENT_NAMES}"
            )
        if tuple(tensor.shape) != target.shape:
            raise EngineError(
                f"{self._engine} cannot load {name} of shape {tuple(tensor.shape)}: expected shape {target.shape}"
            )
        held = self.held[target.parameters[0]]
        if not same_kind(tensor.dtype, held.dtype):
            raise EngineError(wrong_kind(name, tensor.dtype, held.dtype))
        require_range(name, tensor, held.dtype)
        if tensor.numel() == 1 and bool(tensor.isinf()) and not (held.is_meta or bool(held.isinf().any())):
            raise EngineError(
                f"{name} is {float(tensor)}, and {self._engine} holds a finite value there: restore the trainer from a "
                "checkpoint with finite weights"
            )
        if (other := self._sent.setdefault(target.name, name)) != name:
            raise EngineError(f"{name} and {other} are two names of one tensor: send it once")
        if target.parameters[0] in self._adapter.tied:
            self._tied[name] = target, tensor_digest(tensor.to(held.dtype))
            return None
        self._found.update(self.held[parameter].untyped_storage()._cdata for parameter in target.parameters)
        return target

    def require_tied(self, new: Mapping[str, torch.Tensor]) -> None:
        """Check that tied tensors in a refit are equal.

        Args:
            new: New weights by parameter name.

        Raises:
            EngineError: If tied tensors differ.
        """
        tied = self._adapter.tied
        sources = {**new, **{parameter: new[source] for parameter, source in tied.items() if source in new}}
        for name, (target, digest) in self._tied.items():
            if tensor_digest(target.read(sources)) != digest:
                raise EngineError(tied_apart(name, tied[target.parameters[0]]))

    def missing(self, written: Collection[str]) -> dict[str, str]:
        """Return the first parameter of each hub tensor that is not in `written`. Leaves out tied tensors."""
        return {
            name: target.parameters[0]
            for name, target in self._adapter.hub.items()
            if name not in written and self._adapter.tied.keys().isdisjoint(target.parameters)
        }
