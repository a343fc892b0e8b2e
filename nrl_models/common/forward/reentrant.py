"""Reentrant activation checkpointing of models whose layers attend to keys and values of earlier layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from nrl_models.common.switches import is_off
from nrl_models.common.upstream import CHECKPOINT_FUNCTIONS, ENABLE_CHECKPOINTING
from nrl_models.errors import UnknownArgumentError


class RefusesReentrantCheckpointing:
    """Mixin for a model: reentrant checkpointing raises an error if layers share keys and values.

    Keys and values pass between layers separately from the checkpointed outputs. The reentrant variant computes them
    without a graph, so the layers that produce them would silently receive no gradient.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self, nn.Module)
        if any(layers_of_shared_keys(self)):
            self.get_decoder().register_forward_pre_hook(_refuse_wrappers)  # type: ignore[operator]

    def _enable_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Enable activation checkpointing as transformers does, but without the reentrant variant if layers share.

        Raises:
            UnknownArgumentError: If `use_reentrant=True`.
        """
        assert isinstance(self, nn.Module)
        checkpointing_kwargs = [options for options in (*args, *kwargs.values()) if isinstance(options, Mapping)]
        if any(options.get("use_reentrant") for options in checkpointing_kwargs):
            _refuse(self, "use_reentrant=True")
        getattr(super(), ENABLE_CHECKPOINTING)(*args, **kwargs)


# Only this name: in 5.24 the older one calls it, and overriding the older one would log a deprecation.
setattr(RefusesReentrantCheckpointing, ENABLE_CHECKPOINTING, RefusesReentrantCheckpointing._enable_checkpointing)


def layers_of_shared_keys(model: nn.Module) -> Iterator[bool]:
    """Yield for each attention layer of a class that can share keys and values whether it uses an earlier layer's."""
    for module in model.modules():
        if (shares := module.__dict__.get("is_kv_shared_layer")) is not None:
            yield bool(shares)


def _refuse_wrappers(decoder: nn.Module, inputs: Any) -> None:
    """Check the decoder before a forward with gradients: torch's `checkpoint_wrapper` does not ask the model.

    Raises:
        UnknownArgumentError: A layer is checkpointed with the reentrant variant.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for name, module in decoder.named_modules():
        attributes = module.__dict__  # torch's wrapper passes other names on to the module in it
        checkpoints = (attributes.get(attribute) for attribute in CHECKPOINT_FUNCTIONS)
        if attributes.get("gradient_checkpointing", True) and any(map(_is_reentrant, checkpoints)):
            _refuse(decoder, f"{type(module).__name__} around {name} with CheckpointImpl.REENTRANT")


def _is_reentrant(checkpoint: Any) -> bool:
    """Return True for a `partial` of torch's checkpoint, or of a function around it, with `use_reentrant=True`."""
    while isinstance(checkpoint, partial):
        if checkpoint.keywords.get("use_reentrant"):
            return True
        checkpoint = next((value for value in checkpoint.args if callable(value)), None)
    return False


def _refuse(model: nn.Module, setting: str) -> None:
    shares = sum(layers_of_shared_keys(model))
    if shares and not is_off("shared-kv-reentrant-checkpointing"):
        raise UnknownArgumentError(
            f"{setting}: {shares} layers of this model attend to earlier ones' keys and values, through which "
            "reentrant checkpointing passes no gradient. Leave it out, or pass use_reentrant=False "
            "(CheckpointImpl.NO_REENTRANT)."
        )
