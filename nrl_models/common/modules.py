"""What a model is, and putting tensors into its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.upstream import mark_initialised


def class_name(model: nn.Module) -> str:
    """The name of a model's class, without the prefix that FSDP adds."""
    return type(model).__name__.removeprefix("FSDP")


def is_base_model(model: nn.Module) -> bool:
    """Whether a model has no head: it gives hidden states, and has no loss.

    Some models with a head have no module for the rest, and are their own `base_model`: those take labels.
    """
    return getattr(model, "base_model", None) is model and "labels" not in signature(type(model).forward).parameters


def predicts_words(model: nn.Module) -> bool:
    """Whether a model, or one in it, has output embeddings: base models, classifiers and reward models have none."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return any(part.get_output_embeddings() is not None for part in parts)


def peft_types() -> tuple[type, ...]:
    """PEFT's modules that stand in place of a model's; none where PEFT is not imported, so that there are none."""
    if "peft" not in sys.modules:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


def peft_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost of PEFT's modules in a model, by name."""
    types = peft_types()
    for own, child in model.named_children() if types else ():
        place = f"{name}.{own}" if name else own
        if isinstance(child, types):
            yield place, child
        else:
            yield from peft_modules(child, place)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a parameter or buffer is in, and its name there."""
    owner, _, attribute = name.rpartition(".")
    return model.get_submodule(owner), attribute


def install(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer `name` by `tensor`; what the class freezes stays frozen."""
    module, attribute = owner_of(model, name)
    tensors: dict[str, Any] = module._buffers if attribute in module._buffers else module._parameters
    if tensors is not module._buffers:
        learns = tensor.is_floating_point() and tensors[attribute].requires_grad
        tensor = nn.Parameter(tensor, requires_grad=learns)
    tensors[attribute] = tensor
    mark_initialised(tensors[attribute])


def share_copies(model: nn.Module, copies: Mapping[str, str]) -> None:
    """Tie parameters: each key of `copies` becomes the parameter that its value names."""
    for name, given in copies.items():
        module, attribute = owner_of(model, name)
        module._parameters[attribute] = model.get_parameter(given)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put a model's real buffers on a device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)
