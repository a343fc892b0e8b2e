"""The classes of standard families, made from the table when they are asked for.

They stand here as if each were written out: `nrl_models.families.table.classes.AfmoeForCausalLM`, and its rewritten
layers under the name of their package, `nrl_models.families.table.classes.afmoe.AfmoeAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from nrl_models.common.cached import cached
from nrl_models.common.forward import mrope
from nrl_models.common.projections import combine_groups
from nrl_models.families import FAMILIES, module_of
from nrl_models.families.table.rows import STANDARD, Standard
from nrl_models.family import FamilyModel, rewritten


class StandardModel(FamilyModel):
    """A model of transformers in which every layer is rewritten that some family's declaration names.

    A vision-language model takes its decoder and its tower from others' packages, as its configuration says.
    """

    @classmethod
    def rewrite_of(cls, layer: type[nn.Module]) -> type[nn.Module] | None:
        """What becomes of a layer class, of whichever family."""
        return rewritten_layer(layer)


@cached
def rewritten_layer(layer: type[nn.Module]) -> type[nn.Module] | None:
    """The rewritten class for a layer class of transformers; None if no family declares one."""
    package = _package_of(layer)
    if package in FAMILIES:
        return _declared_layers(package).get(layer)
    entry = STANDARD.get(package)
    if entry is None:
        return None
    names = (*entry.mixins, *entry.layers)
    name = next((name for name in names if layer is entry.layer(package, name)), None)
    if name is None:
        return None
    by = getattr(mrope, entry.mixins[name]) if name in entry.mixins else combine_groups(*entry.layers[name].split(", "))
    return rewritten(layer, by, __name__, within=package)


@cache
def _declared_layers(family: str) -> Mapping[type[nn.Module], type[nn.Module]]:
    """What the classes of a family with a folder of its own rewrite."""
    found: dict[type[nn.Module], type[nn.Module]] = {}
    for value in vars(import_module(module_of(family))).values():
        if isinstance(value, type) and issubclass(value, FamilyModel):
            found |= value.rewrites
    return found


def _package_of(layer: type[nn.Module]) -> str:
    parts = layer.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""


class _Layers(type):
    """A family's name in this module: its rewritten layers are its attributes, so that pickle finds them."""

    def __getattr__(cls, name: str) -> type[nn.Module]:
        entry: Standard = STANDARD[cls.__name__]
        for own in (*entry.layers, *entry.mixins):
            layer = entry.layer(cls.__name__, own) if entry.prefix + own.rpartition(".")[2] == name else None
            if layer is not None and (made := rewritten_layer(layer)) is not None:
                return made
        raise AttributeError(f"{cls.__name__} rewrites no {name}")


def __getattr__(name: str) -> Any:
    if name in STANDARD:
        made: Any = _Layers(name, (), {"__doc__": f"The rewritten layers of {name}."})
    else:
        package = next((package for package, entry in STANDARD.items() if name in entry.architectures), None)
        if package is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        entry = STANDARD[package]
        made = StandardModel.head(
            getattr(import_module(entry.module(package)), name),
            tiny=entry.tiny,
            limits=entry.limits_of(name),
            config_values=entry.config_values,
            ignored_config_keys=entry.ignored,
            tensor_parallel=entry.tensor_parallel,
            published=entry.published if name == entry.architectures[0] else {},
        )
    globals()[name] = made
    return made
