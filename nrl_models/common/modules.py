"""Structure of a model, and assignment of tensors to its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from nrl_models.common.cached import cached
from nrl_models.common.upstream import mark_initialized
from nrl_models.common.upstream_torch import FLATTENED, WRAPPED_NAMES, name_inside, prefix_in_state_dict


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class, without the prefix that FSDP adds."""
    return type(model).__name__.removeprefix("FSDP")


def is_base_model(model: nn.Module) -> bool:
    """Return True if a model has no head: it returns hidden states, and has no loss.

    Some models with a head have no separate base model (`base_model` is the model). They accept labels. transformers'
    `AutoModel` also has base models that accept labels, and compute no loss.
    """
    if getattr(model, "base_model", None) is not model:
        return False
    if "labels" not in signature(type(model).forward).parameters:
        return True
    names = MODEL_MAPPING_NAMES.get(cast(PreTrainedModel, model).config.model_type, ())
    return class_name(model) in ((names,) if isinstance(names, str) else names) and not predicts_words(model)


def predicts_words(model: nn.Module) -> bool:
    """Return True if a model or submodel has output embeddings, unlike base models, classifiers and reward models."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return any(part.get_output_embeddings() is not None for part in parts)


def input_embeddings(model: nn.Module) -> Any:
    """Return a model's input embeddings; None if it has none, or several (CLIP)."""
    try:
        return getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None


def device_of(model: nn.Module) -> torch.device:
    """Return the device for a model's inputs: the first parameter's, or where offloaded weights are computed.

    Between calls, weights that accelerate offloads are on the meta device.
    """
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    hooks = (vars(module).get("_hf_hook") for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((hook_device for hook_device in devices if hook_device is not None), device))


# Wrappers


def peft_types() -> tuple[type, ...]:
    """Return PEFT's module classes that replace modules; empty if PEFT is not imported."""
    if "peft" not in sys.modules:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


def is_disabled(wrapper: Any) -> bool:
    """Return True if a PEFT module has no effect, because its adapters are disabled or none is active."""
    return bool(wrapper.disable_adapters or not wrapper.active_adapters)


def inner_of(module: Any, *, peft: bool = True) -> nn.Module | None:
    """Return the module inside a wrapper; None if `module` is not a wrapper.

    Wrappers are those of `torch.compile`, activation checkpointing and offloading, DDP, FSDP1 and PEFT. For a module
    that PEFT trains as a copy (`modules_to_save`), returns the copy that the forward uses.

    Args:
        module: Any module.
        peft: Whether PEFT's modules count as wrappers.
    """
    kind, wrapper = type(module), module
    inner: Any = None
    if peft and _is_peft_module(kind):
        if hasattr(module, "modules_to_save") and not is_disabled(module):
            inner = wrapper.modules_to_save[wrapper.active_adapters[0]]
        else:
            inner = wrapper.get_base_layer() if hasattr(module, "get_base_layer") else wrapper.original_module
    elif peft and hasattr(kind, "get_base_model"):
        inner = module.get_base_model()
    elif peft and (name := _name_inside_tuner(kind)):
        inner = getattr(module, name)
    elif name := name_inside(kind):
        inner = module._modules[name]
    return cast("nn.Module | None", inner)


# Cached by class: a subclass of a wrapper's class only exists once the wrapper's package is imported.


@cached
def _name_inside_tuner(kind: type) -> str:
    """Return the attribute of the module inside PEFT's tuners (`LoraModel`) and `PeftMixedModel`; empty for others."""
    if "peft" not in sys.modules:
        return ""
    from peft import PeftMixedModel
    from peft.tuners.tuners_utils import BaseTuner

    return "base_model" if issubclass(kind, PeftMixedModel) else "model" if issubclass(kind, BaseTuner) else ""


@cached
def _is_peft_module(kind: type) -> bool:
    """Return True if a class is one of `peft_types`."""
    return issubclass(kind, peft_types())


def innermost(module: Any, *, peft: bool = True) -> Any:
    """Return the module inside all wrappers, or `module` if it has none."""
    while (inner := inner_of(module, peft=peft)) is not None:
        module = inner
    return module


def _adapter_configs(module: Any) -> Iterator[Any]:
    """Yield the active configuration of each `PeftModel` around a module."""
    while module is not None:
        if hasattr(type(module), "active_peft_config"):
            yield module.active_peft_config
        module = inner_of(module)


def virtual_tokens(model: nn.Module) -> int:
    """Return the number of tokens that PEFT's prompt learning puts before each row; 0 without it."""
    return sum(config.num_virtual_tokens for config in _adapter_configs(model) if config.is_prompt_learning)


def reads_complete_rows(model: nn.Module) -> bool:
    """Return True if a PEFT adapter around a model treats a row as one sequence, even if positions start again.

    Prompt learning puts virtual tokens before a row, and activated LoRA (`alora_invocation_tokens`) starts at the last
    invocation tokens of a row.
    """
    return any(
        config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None)
        for config in _adapter_configs(model)
    )


def own_modules(model: nn.Module, *, duplicates: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's modules without torch's wrappers, under their names without wrappers.

    Args:
        model: A module, which may be wrapped.
        duplicates: Whether to yield a module under each of its names.
    """
    return ((name, module) for name, _, module in _own_modules(model, None if duplicates else set()))


def _own_modules(model: nn.Module, seen: set[int] | None) -> list[tuple[str, str, nn.Module]]:
    """Return each module's name, the prefix of its tensors' names in `state_dict()`, and the module."""
    result: list[tuple[str, str, nn.Module]] = []
    remaining: list[tuple[str, str, Any]] = [("", "", model)]
    while remaining:
        name, stored, module = remaining.pop()
        while inside := name_inside(type(module)):
            stored += prefix_in_state_dict(module)
            module = module._modules[inside]
        if seen is not None:
            if id(module) in seen:
                continue
            seen.add(id(module))
        result.append((name, stored, module))
        if module._modules:
            dot = f"{name}." if name else ""
            children = [
                (f"{dot}{key}", f"{stored}{key}.", child) for key, child in module._modules.items() if child is not None
            ]
            remaining += reversed(children)
    return result


def named_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield all parameters and persistent buffers of a model, in the order of its `state_dict()`.

    All layouts, files and exports use these names.

    Yields:
        The name without torch's wrappers, the module with the tensor, its name there, and the tensor.
    """
    for prefix, _, module in _own_modules(model, None):
        if module._parameters or module._buffers:
            dot = f"{prefix}." if prefix else ""
            for name, tensor in _tensors_of(module):
                yield f"{dot}{name}", module, name, tensor


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    left_out = module._non_persistent_buffers_set
    return [(name, tensor) for name, tensor in tensors if tensor is not None and name not in left_out]


def own_parameters(model: nn.Module, *, duplicates: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's parameters by their own names, tied ones once.

    Args:
        model: A module, which may be wrapped.
        duplicates: Also yield tied parameters under their other names.
    """
    seen: set[int] = set()
    for name, _, _, tensor in named_tensors(model):
        if isinstance(tensor, nn.Parameter) and (duplicates or id(tensor) not in seen):
            seen.add(id(tensor))
            yield name, tensor


def names_in_state_dict(model: nn.Module) -> dict[str, str]:
    """Map each tensor's own name to its name in `model.state_dict()`, which differs in compiled modules."""
    return {
        f"{prefix}.{name}" if prefix else name: f"{stored}{name}"
        for prefix, stored, module in _own_modules(model, None)
        for name, _ in _tensors_of(module)
    }


def own_name(name: str) -> str:
    """Remove the parts that torch's wrappers add to a tensor's name (`_orig_mod`)."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_NAMES)


def is_flattened(model: nn.Module) -> bool:
    """Return True if FSDP1 has flattened parameters of a model, which then have other names or shapes."""
    return any(
        getattr(parameter, FLATTENED, False)
        for module in _all_modules(model)
        for parameter in module._parameters.values()
    )


def without_wrappers(model: nn.Module, *, peft: bool = False) -> Any:
    """Return a shallow copy of a model without wrappers: the same parameters, under the model's own names.

    Args:
        model: A model, which may be wrapped.
        peft: Whether to also remove PEFT's modules, including the adapters.

    Returns:
        The copy, or `model` itself if it has no wrappers.
    """
    return _without_wrappers(model, {}, peft) if _has_wrappers(model, peft) else model


def _has_wrappers(model: nn.Module, peft: bool) -> bool:
    return any(
        name_inside(kind)
        or (peft and (_is_peft_module(kind) or hasattr(kind, "get_base_model") or _name_inside_tuner(kind)))
        for kind in {type(module) for module in _all_modules(model)}
    )


def _all_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model.modules()` in any order, in a third of the time."""
    modules: dict[nn.Module | None, None] = {None: None}
    remaining: list[nn.Module | None] = [model]
    for module in remaining:  # grows
        if module not in modules:
            modules[module] = None
            if children := module._modules:  # type: ignore[union-attr]
                remaining += children.values()
    del modules[None]
    return cast("list[nn.Module]", list(modules))


def _without_wrappers(module: Any, seen: dict[int, nn.Module], peft: bool) -> Any:
    module = innermost(module, peft=peft)
    if id(module) not in seen:
        twin = seen[id(module)] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_modules"] = {
            name: None if child is None else _without_wrappers(child, seen, peft)
            for name, child in module._modules.items()
        }
    return seen[id(module)]


def peft_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost PEFT modules of a model, with the names of the modules that they replace."""
    yield from _peft_modules(model, "")


def _peft_modules(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    types = peft_types()
    while (inner := inner_of(module, peft=False)) is not None:
        module = inner
    if isinstance(module, types):
        yield name, module
        return
    for child_name, child in module.named_children() if types else ():
        yield from _peft_modules(child, f"{name}.{child_name}" if name else child_name)


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module of a parameter or buffer, and its name there."""
    owner, _, attribute = name.rpartition(".")
    return model.get_submodule(owner), attribute


def install(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer `name` with `tensor`. Keeps parameters frozen that the class freezes."""
    module, attribute = owner_of(model, name)
    tensors: dict[str, Any] = module._buffers if attribute in module._buffers else module._parameters
    if tensors is not module._buffers:
        learns = tensor.is_floating_point() and tensors[attribute].requires_grad
        tensor = nn.Parameter(tensor, requires_grad=learns)
    tensors[attribute] = tensor
    mark_initialized(tensors[attribute])


def is_at(name: str, location: str) -> bool:
    """Return True if a module's dotted name contains the components of `location` consecutively."""
    return f".{location}." in f".{name}."


def subclass_of_same_name(
    upstream: type[PreTrainedModel], *mixins: type[nn.Module], **attributes: Any
) -> type[PreTrainedModel]:
    """Return a subclass with the name, module and docstring of `upstream`.

    Args:
        upstream: A Hugging Face class.
        mixins: Bases that precede it.
        attributes: Attributes to replace, such as `forward`.
    """
    metaclass: Any = type(upstream)
    metadata = {"__module__": upstream.__module__, "__doc__": upstream.__doc__}
    return metaclass(upstream.__name__, (*mixins, upstream), metadata | attributes)
