"""Layouts: the names and shapes of a model's tensors, as views of its parameters.

A tensor has up to two names: transformers' in memory, which is the model's own (`mlp.experts.gate_up_proj`), and the
hub's (`experts.0.w1.weight`). transformers defines the translation between them by conversion mappings, made to
be run on tensors; here they are run once on shapes that record what happens to them, which yields views. No mapping is
copied, and no family writes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.garbage import no_collections
from nrl_models.common.modules import named_tensors, without_wrappers
from nrl_models.common.state_dict.layer_patterns import convert_by_layer, ignore_indices
from nrl_models.common.upstream import (
    PrefixChange,
    Renaming,
    WeightRenaming,
    describe_conversion,
    dot_natural_key,
    get_model_conversion_mapping,
    loaded_conversions,
    revert_weight_conversion,
)
from nrl_models.common.views.traced_tensor import TracedTensor
from nrl_models.common.views.view import HFTensor, View


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def own_tensors(model: nn.Module) -> dict[str, TensorSpec]:
    """Every entry of `model.state_dict()` without wrappers: parameters and persistent buffers by the model's names."""
    return {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype)
        for name, tensor in without_wrappers(model).state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }


def transformers_views(model: nn.Module) -> Iterator[tuple[str, View]]:
    """transformers' name and the view of every tensor, in the order of transformers' own `state_dict()`."""
    return ((own_name, View(own_name)) for own_name, _, _, _ in named_tensors(model))


def hub_conversions(model: PreTrainedModel) -> list[Any] | None:
    """transformers' conversions between the hub's layout and the model's, as it would save them; None if none.

    A prefix that only some checkpoints carry (`PrefixChange`) is kept only if the checkpoint this
    model came from carried it, which is transformers' rule.
    """
    loaded_with = loaded_conversions(model) or ()
    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, PrefixChange) or any(are_alike([conversion], [other]) for other in loaded_with)
    ]
    return conversions or None


def renamed_keys(keys: Iterable[str], conversions: Iterable[Any], rename: Renaming) -> dict[str, str]:
    """The name that transformers' renamings give each key: in transformers' order, where that matters."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    names: dict[str, str] = {}
    for key in keys if ignore_indices(renamings) else sorted(keys, key=dot_natural_key):
        names[key] = key
        for renaming in renamings:
            names[key], _ = rename(renaming, names[key])
    return names


def note_published_names(model: nn.Module, names: Sequence[str]) -> None:
    """Note names of the checkpoint that a model was loaded from, in place of which transformers saves others.

    transformers undoes a renaming for every name that it fits, also where loading had nothing to rename: it reads
    Kimi-K2.5's text layers as `layers`, as published, and saves them as `blocks`, as the vision tower's. It reads
    either; engines read what is published.
    """
    cast(Any, model)._published_names = tuple(names)


def published_names(model: nn.Module) -> tuple[str, ...]:
    """What `note_published_names` noted; nothing of a new model."""
    return getattr(model, "_published_names", ())


def under_published_names(model: PreTrainedModel, table: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
    """The tensors of a layout that transformers saves, under the names that the model's checkpoint had for them."""
    published = published_names(model)
    if not published:
        return dict(table)
    renamed = renamed_keys([*table, *published], hub_conversions(model) or (), Renaming())
    bare = {name: new.removeprefix(base_prefix(model)) for name, new in renamed.items()}
    names = {bare[name]: name for name in published}
    return {(new := names.get(bare[name], name)): replace(tensor, name=new) for name, tensor in table.items()}


def base_prefix(model: PreTrainedModel) -> str:
    """Of names in a model's base model, which checkpoints may leave out; empty if it has none."""
    return f"{model.base_model_prefix}." if model.base_model_prefix else ""


def are_alike(some: list[Any] | None, others: list[Any] | None) -> bool:
    """Whether two lists of conversions do the same, one after the other; False if either is None or empty."""
    return bool(some and others and list(map(describe_conversion, some)) == list(map(describe_conversion, others)))


@no_collections()
def convert_layout(
    model: PreTrainedModel,
    tensors: Mapping[str, HFTensor],
    specs: Mapping[str, TensorSpec],
    conversions: list[Any] | None,
) -> dict[str, HFTensor]:
    """The layout that transformers' `conversions`, reverted as when saving, make of `tensors`.

    Args:
        model: whose configuration the conversions may read.
        tensors: transformers' in-memory layout, by name.
        specs: the model's own tensors.
        conversions: `WeightRenaming`s and `WeightConverter`s in loading order. An empty list sorts the
            tensors, as transformers does then; None leaves them as they are.

    Raises:
        NotAViewError: a conversion computes something, so that its result is not a view.
    """
    if conversions is None:
        return dict(tensors)

    def dtype_of(name: str) -> torch.dtype:
        return specs[name].dtype

    def convert(table: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
        return _traced(model, table, dtype_of, conversions)

    if ignore_indices(conversions):
        return convert_by_layer(tensors, dtype_of, convert)
    return convert(tensors)


def _traced(
    model: PreTrainedModel,
    tensors: Mapping[str, HFTensor],
    dtype_of: Callable[[str], torch.dtype],
    conversions: list[Any],
) -> dict[str, HFTensor]:
    """What transformers' code makes of `tensors`, run on shapes."""
    traced: dict[str, Any] = {
        name: TracedTensor.of_pieces(tensor.shape, dtype_of(tensor.parameters[0]), tensor.pieces)
        for name, tensor in tensors.items()
    }
    # `revert_weight_conversion` reads these of its model and nothing else.
    stand_in: Any = SimpleNamespace(
        _weight_conversions=conversions, config=model.config, get_parameter=traced.__getitem__, name_or_path=""
    )
    return {
        name: HFTensor(name, tuple(tensor.shape), tensor.pieces)
        for name, tensor in revert_weight_conversion(stand_in, traced).items()
    }
