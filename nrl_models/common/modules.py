"""What a model is, and putting tensors into its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.upstream import mark_initialised
from nrl_models.common.upstream_torch import ConvNd


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


def inside_peft(model: Any) -> Any:
    """The model inside PEFT's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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


def is_at(name: str, place: str) -> bool:
    """Whether a module's dotted name has the components of `place` in it, one after the other."""
    return f".{place}." in f".{name}."


# Experts


def routers_of(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules whose scores choose experts: those that transformers declares, and those beside a decoder's experts.

    transformers names most: their output is recorded as `router_logits`. Older versions name none for some models, and
    for others the whole block with its experts; there, a router is what stands beside the experts and scores each.
    """
    found = list(_beside_experts(decoder))
    for module in _declared_routers(model):
        inside = set(module.modules())
        if inside.isdisjoint(found) or module in found:
            found.append(module)
    chosen = set(found)
    return [module for module in model.modules() if module in chosen]


def _declared_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose output transformers records as `router_logits`."""
    recorders: list[tuple[type, str]] = []
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        declared: Any = recorded.get("router_logits", ()) if isinstance(recorded, Mapping) else ()
        for recorder in declared if isinstance(declared, Iterable) else (declared,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                recorders.append((target, (getattr(recorder, "layer_name", None) or "").strip(".")))
    for name, module in model.named_modules():
        if any(isinstance(module, of) and (not place or is_at(name, place)) for of, place in recorders):
            yield module


def _beside_experts(decoder: nn.Module) -> Iterator[nn.Module]:
    for block in decoder.modules():
        counts = {child: _numbers_of_experts(child) for child in block.children()}
        numbers = set().union(*counts.values())
        yield from (child for child, own in counts.items() if not own and numbers and _scores(child, numbers))


def _numbers_of_experts(module: nn.Module) -> set[int]:
    """How many experts a module holds, one tensor for all; with those that compute nothing, too, if it counts them."""
    if any(isinstance(owner, ConvNd) for owner in module.modules()):
        return set()
    own = list(module.parameters(recurse=False))
    tensors = own or list(module.parameters())
    if not own and any(tensor.ndim != 3 for tensor in tensors):
        return set()  # a block with more than experts
    return {tensor.shape[0] for tensor in tensors if tensor.ndim == 3}


def _scores(module: nn.Module, numbers: set[int]) -> bool:
    """Whether a module's parameters are a matrix with a row for each expert, and what goes with its scores."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    rows = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] > 1}
    if len(rows) != 1 or not rows <= numbers:
        return False
    (count,) = rows
    return all(shape in {(), (1,), (count,), (1, count)} or (len(shape) == 2 and shape[0] == count) for shape in shapes)
