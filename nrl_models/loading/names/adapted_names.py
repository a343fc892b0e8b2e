"""Names of a base model's tensors in a model with PEFT adapters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from nrl_models.common.modules import inner_of, named_tensors, peft_modules, peft_types

_BASE_MODULES = ("base_layer", "original_module", "token_adapter")
"""Attributes of PEFT's modules that lead to the module that they replaced."""


def names_under_adapters(model: nn.Module) -> dict[str, str]:
    """Map names in the base model to own names, for tensors of modules that PEFT replaced.

    `q_proj.weight` is in `q_proj.base_layer.weight`. For modules that PEFT trains as a copy (`modules_to_save`), the
    tensors are those of the original.
    """
    return {
        f"{name}.{tensor}": f"{own_name}.{tensor}"
        for name, own_name, module in _replaced_modules(model)
        for tensor, *_ in named_tensors(module)
    }


def modules_under_adapters(model: nn.Module) -> dict[str, str]:
    """Map names in the base model to own names, for modules that PEFT replaced, see `names_under_adapters`."""
    return {name: own_name for name, own_name, _ in _replaced_modules(model)}


def _replaced_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    for name, wrapper in peft_modules(model):
        yield from _base_modules(wrapper, name, name)


def _base_modules(module: nn.Module, name: str, own_name: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield modules without PEFT modules inside: name in the base model, own name, and the module."""
    while (inner := inner_of(module, peft=False)) is not None:
        module = inner
    if isinstance(module, peft_types()):
        attribute = next((each for each in _BASE_MODULES if module._modules.get(each) is not None), None)
        if attribute is not None:
            yield from _base_modules(module.get_submodule(attribute), name, f"{own_name}.{attribute}")
    elif not any(peft_modules(module)):
        yield name, own_name, module
    else:
        for attribute, child in module.named_children():
            yield from _base_modules(child, f"{name}.{attribute}", f"{own_name}.{attribute}")


def merged_modules(model: nn.Module) -> list[str]:
    """Return the names of PEFT's modules whose adapters are merged into the base model's weights."""
    types = peft_types()
    return [name for name, module in model.named_modules() if types and getattr(module, "merged_adapters", None)]
