"""Classes of the table's families, created from their rows on first use.

`AfmoeForCausalLM` is an attribute of this module. Its rewritten layers are attributes of the package's name, such as
`nrl_models.families.table.classes.afmoe.AfmoeAttention`. Pickle finds both there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.cached import cached
from nrl_models.common.forward.image_outputs import with_image_outputs
from nrl_models.common.forward.rewriting import MIXINS, rewritten
from nrl_models.common.forward.token_types import with_multimodal_types, with_required_types
from nrl_models.common.projections import combine_groups
from nrl_models.common.views.hub_parts import register_part_sizes
from nrl_models.families import folders, module_of
from nrl_models.families.table import TABLE
from nrl_models.family import FamilyModel

REPAIRS: Mapping[str, Callable[[type[PreTrainedModel]], type[PreTrainedModel]]] = {
    "image outputs": with_image_outputs,
    "token types": with_multimodal_types,
    "token types required": with_required_types,
}
"""Functions for `Row.repairs`. Each returns a fixed subclass, or its argument if the installed version needs no fix."""


class TableModel(FamilyModel):
    """A transformers model whose layers are rewritten as declared by any family.

    The declarations of all families apply, because a vision-language model may have a decoder and a tower from the
    packages of other families.
    """

    @classmethod
    def rewrite_of(cls, layer: type[nn.Module]) -> type[nn.Module] | None:
        """Return the class that replaces a layer class, from any family."""
        return rewritten_layer(layer)


@cached
def rewritten_layer(layer: type[nn.Module]) -> type[nn.Module] | None:
    """Return the rewritten class for a layer class of transformers, or None if no family declares one."""
    package = _package_of(layer)
    if package in folders():
        return _declared_layers(package).get(layer)
    row = TABLE.get(package)
    if row is None:
        return None
    names = {**row.mixins, **row.layers}
    name = next((name for name in names if layer is row.layer(package, name)), None)
    if name is None:
        return None
    mixins = [mixin for mixin in MIXINS if mixin.__name__ == row.mixins.get(name)]
    if name in row.layers:
        mixins.append(combine_groups(*row.layers[name].split(", ")))
    by = mixins[0] if len(mixins) == 1 else type(name, tuple(mixins), {})
    return rewritten(layer, by, __name__, within=package)


@cache
def _declared_layers(family: str) -> Mapping[type[nn.Module], type[nn.Module]]:
    """Return the rewritten layers by layer class, for a family with a separate folder."""
    rewrites: dict[type[nn.Module], type[nn.Module]] = {}
    for value in vars(import_module(module_of(family))).values():
        if isinstance(value, type) and issubclass(value, FamilyModel):
            rewrites |= value.rewrites
    return rewrites


def _package_of(layer: type[nn.Module]) -> str:
    parts = layer.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""


def __getattr__(name: str) -> Any:
    if name in TABLE:
        # This is a class, because older pickle protocols only find attributes of modules and classes.
        layers = {layer.__name__: layer for layer in _layers_of(name)}
        made: Any = type(name, (), {"__module__": __name__, "__doc__": f"The rewritten layers of {name}."} | layers)
    else:
        package = next((package for package, row in TABLE.items() if name in row.architectures), None)
        if package is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        row = TABLE[package]
        upstream = getattr(import_module(row.module(package)), name)
        repair = row.repairs.get(name)
        has_corrected_parts = register_part_sizes(row.part_sizes)
        made = TableModel.head(
            REPAIRS[repair](upstream) if repair else upstream,
            tiny=row.tiny,
            limits=row.limits_of(name),
            config_values=row.config_values,
            ignored_config_keys=row.ignored,
            tensor_parallel=row.tensor_parallel,
            mtp_form=row.mtp_form,
            handles_quirks=("unequal-parts",) if has_corrected_parts else (),
            published=row.published if name == row.architectures[0] else {},
        )
    globals()[name] = made
    return made


def _layers_of(package: str) -> Iterator[type[nn.Module]]:
    """Yield the rewritten layers of a row, without those whose classes the installed transformers lacks."""
    row = TABLE[package]
    for name in {**row.mixins, **row.layers}:
        layer = row.layer(package, name)
        if layer is not None and (made := rewritten_layer(layer)) is not None:
            yield made
