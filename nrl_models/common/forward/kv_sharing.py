"""Models whose later layers attend to keys and values of earlier layers (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from nrl_models.common.switches import is_off
from nrl_models.common.upstream import CHECKPOINT_FUNCTIONS, ENABLE_CHECKPOINTING
from nrl_models.errors import UnknownArgumentError


class SharedKeyValues:
    """Mixin for a family, before `FamilyModel`: loading, saving and training of layers that share keys and values.

    Layers that share have no key and value projections. Checkpoints still have some for them, which were never trained,
    and engines may read them. The model keeps them unchanged and saves them again (transformers drops them).

    Attributes:
        keeps_unused: See `FamilyModel`.
    """

    keeps_unused: ClassVar[tuple[str, ...]] = (r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        decoder: nn.Module = self.get_decoder()  # type: ignore[attr-defined]
        if _sharing_layers(config):
            decoder.register_forward_pre_hook(_refuse_reentrant_wrappers)

    def _enable_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Enable activation checkpointing as transformers does, but without the reentrant variant.

        Keys and values pass between layers separately from the checkpointed outputs. The reentrant variant computes
        them without a graph, so the layers that produce them would silently receive no gradient.

        Raises:
            UnknownArgumentError: If `use_reentrant=True`.
        """
        _refuse_reentrant(self, args, kwargs)
        getattr(super(), ENABLE_CHECKPOINTING)(*args, **kwargs)


# Only this name: in 5.24 the older one calls it, and overriding the older one would log a deprecation.
setattr(SharedKeyValues, ENABLE_CHECKPOINTING, SharedKeyValues._enable_checkpointing)


def _sharing_layers(config: Any) -> int:
    return getattr(config.get_text_config(), "num_kv_shared_layers", 0) or 0


def _refuse_reentrant(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = [options for options in (*args, *kwargs.values()) if isinstance(options, Mapping)]
    if any(options.get("use_reentrant") for options in given):
        _refuse(model.config, "use_reentrant=True")


def _refuse_reentrant_wrappers(decoder: nn.Module, inputs: Any) -> None:
    """Check the decoder before a forward with gradients: torch's `checkpoint_wrapper` does not ask the model.

    Raises:
        UnknownArgumentError: A layer is checkpointed with the reentrant variant.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for name, module in decoder.named_modules():
        own = module.__dict__  # torch's wrapper passes other names on to the module in it
        checkpoints = (own.get(attribute) for attribute in CHECKPOINT_FUNCTIONS)
        if own.get("gradient_checkpointing", True) and any(map(_is_reentrant, checkpoints)):
            _refuse(decoder.config, f"{type(module).__name__} around {name} with CheckpointImpl.REENTRANT")


def _is_reentrant(checkpoint: Any) -> bool:
    """Return True for a `partial` of torch's checkpoint, or of a function around it, with `use_reentrant=True`."""
    while isinstance(checkpoint, partial):
        if checkpoint.keywords.get("use_reentrant"):
            return True
        checkpoint = next((value for value in checkpoint.args if callable(value)), None)
    return False


def _refuse(config: Any, what: str) -> None:
    shares = _sharing_layers(config)
    if shares and not is_off("shared-kv-reentrant-checkpointing"):
        raise UnknownArgumentError(
            f"{what}: {shares} layers of this model attend to earlier ones' keys and values, through which "
            "reentrant checkpointing passes no gradient. Leave it out, or pass use_reentrant=False "
            "(CheckpointImpl.NO_REENTRANT)."
        )
