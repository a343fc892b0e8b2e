"""Layouts: names and shapes of a model's tensors, as views of its parameters.

A tensor has up to two names: transformers' name in memory, which is the model's own (`mlp.experts.gate_up_proj`), and
the hub's (`experts.0.w1.weight`). transformers defines conversions between them, which are designed to run on tensors.
Here they run once on shapes that record the operations, which results in views. So conversions are neither copied nor
written by families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from nrl_models.common.modules import own_modules, without_wrappers
from nrl_models.common.process_state import no_collections
from nrl_models.common.state_dict.layer_patterns import convert_by_layer, ignore_indices
from nrl_models.common.upstream_conversions import (
    PrefixChange,
    Renaming,
    WeightRenaming,
    describe_conversion,
    dot_natural_key,
    get_model_conversion_mapping,
    loaded_conversions,
    revert_weight_conversion,
    set_loaded_conversions,
)
from nrl_models.common.views.traced_tensor import TracedTensor
from nrl_models.common.views.view import HFTensor, Piece, View
from nrl_models.errors import ConfigurationError, NRLModelsError, Problem, ProblemKind


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def own_tensors(model: nn.Module) -> dict[str, TensorSpec]:
    """Return every tensor of `model.state_dict()` without wrappers, by the model's names.

    These are parameters, persistent buffers, and tensors that modules add, such as the scales of bitsandbytes and HQQ.
    """
    return {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype)
        for name, tensor in without_wrappers(model).state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }


def has_own_tensors(model: nn.Module, specs: Mapping[str, TensorSpec]) -> bool:
    """Return True if `own_tensors(model)` is `specs`. Faster, because it creates no specs."""
    state_dict = without_wrappers(model).state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, torch.Tensor)}
    return tensors.keys() == specs.keys() and all(
        tensor.shape == (spec := specs[name]).shape and tensor.dtype == spec.dtype for name, tensor in tensors.items()
    )


def computed_weights(model: nn.Module) -> list[str]:
    """Return names of weights that `torch.nn.utils` computes from other tensors of their module.

    These are parametrizations, pruning, and weight and spectral norm, as parametrizations or hooks.
    """
    names = []
    for prefix, module in own_modules(model):
        weight_names = [*getattr(module, "parametrizations", {})] if parametrize.is_parametrized(module) else []
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                weight_names.append(getattr(hook, "name", None) or getattr(hook, "_tensor_name", "weight"))
        names += [f"{prefix}.{name}" if prefix else name for name in weight_names]
    return names


def transformers_views(model: nn.Module) -> Iterator[tuple[str, View]]:
    """Yield transformers' name and the view of every tensor, in the order of transformers' `state_dict()`."""
    return ((name, View(name)) for name in own_tensors(model))


def hub_conversions(model: PreTrainedModel) -> list[Any] | None:
    """Return transformers' conversions between hub and model, as `save_pretrained` applies them; None without any.

    Some prefixes are only in some checkpoints (`PrefixChange`). As in transformers, such a prefix is kept only if the
    model was loaded from a checkpoint that has it.
    """
    loaded_with = loaded_conversions(model) or ()
    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, PrefixChange) or any(are_alike([conversion], [other]) for other in loaded_with)
    ]
    return conversions or None


def renamed_keys(keys: Iterable[str], conversions: Iterable[Any], rename: Renaming) -> dict[str, str]:
    """Return the name of each key after transformers' renamings, in transformers' order if that matters."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    names: dict[str, str] = {}
    for key in keys if ignore_indices(renamings) else sorted(keys, key=dot_natural_key):
        names[key] = key
        for renaming in renamings:
            names[key], _ = rename(renaming, names[key])
    return names


@dataclass(frozen=True, slots=True)
class LoadedNames:
    """Names in the checkpoint of a loaded model for which transformers would save others. Empty for a new model.

    transformers reverts a renaming for all names that match, even if loading did not rename them. For example, it reads
    the text layers of Kimi-K2.5 as `layers`, as published, but saves them as `blocks`, the name in the vision tower. It
    reads both, but engines only read published names.

    Args:
        by_pieces: Names by the pieces of their tensors.
        in_exports: Whether exports also have these names. Names that `key_mapping` renames are only in saved files.
        quantized: For a checkpoint that stays quantized and was loaded with `key_mapping`: its names of tensors and
            modules by their names in memory.
    """

    by_pieces: Mapping[tuple[Piece, ...], str] = field(default_factory=dict)
    in_exports: bool = True
    quantized: Mapping[str, str] = field(default_factory=dict)

    def exported(self, table: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
        """Return the tensors of a layout under the names that exports have."""
        return self.saved(table) if self.in_exports else dict(table)

    def saved(self, table: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
        """Return the tensors of a layout under the names that saved files have."""
        if not self.by_pieces:
            return dict(table)
        names = self.by_pieces
        return {(new := names.get(tensor.pieces, name)): replace(tensor, name=new) for name, tensor in table.items()}

    def saved_quantized(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under the names that saved files have, also parts of quantized ones (`weight.absmax`)."""

        def key_of(name: str) -> str:
            if name in self.quantized or "." not in name:
                return self.quantized.get(name, name)
            prefix, _, part = name.rpartition(".")
            return f"{key_of(prefix)}.{part}"

        return {key_of(name): tensor for name, tensor in tensors.items()}


def note_loaded_names(model: nn.Module, names: LoadedNames) -> None:
    """Record the names in the checkpoint of a loaded model."""
    cast(Any, model)._loaded_names = names


def loaded_names(model: nn.Module) -> LoadedNames:
    """Return the names recorded by `note_loaded_names`; empty for a new model."""
    return getattr(model, "_loaded_names", LoadedNames())


def note_quantized_names(model: PreTrainedModel, keys: Iterable[str], key_mapping: Mapping[str, str]) -> None:
    """Record the keys of a checkpoint that stays quantized and was loaded with `key_mapping`.

    transformers then does not revert the expressions.
    """
    renamings = get_model_conversion_mapping(model, dict(key_mapping))[: len(key_mapping)]
    described = [describe_conversion(renaming) for renaming in renamings]
    loaded = loaded_conversions(model) or []
    set_loaded_conversions(model, [each for each in loaded if describe_conversion(each) not in described])
    names = {name: key for key, name in renamed_keys(keys, renamings, Renaming()).items()}
    parts = {name: (name.rpartition("."), key.rpartition(".")) for name, key in names.items()}
    modules = {name[0]: key[0] for name, key in parts.values() if name[2] == key[2]}
    # Modules, because some parts of quantized weights are next to them.
    note_loaded_names(model, LoadedNames(quantized=modules | names))


def base_prefix(model: PreTrainedModel) -> str:
    """Return the prefix of names in the base model, which checkpoints may leave out; empty if there is none."""
    return f"{model.base_model_prefix}." if model.base_model_prefix else ""


def are_alike(some: list[Any] | None, others: list[Any] | None) -> bool:
    """Return True if two lists of conversions are equivalent; False if either is None or empty."""
    return bool(some and others and list(map(describe_conversion, some)) == list(map(describe_conversion, others)))


@no_collections()
def convert_layout(
    model: PreTrainedModel,
    tensors: Mapping[str, HFTensor],
    specs: Mapping[str, TensorSpec],
    conversions: list[Any] | None,
) -> dict[str, HFTensor]:
    """Return the layout that results from reverting transformers' `conversions` on `tensors`, as when saving.

    Args:
        model: Model whose configuration the conversions may read.
        tensors: transformers' layout in memory, by name.
        specs: The model's own tensors.
        conversions: `WeightRenaming`s and `WeightConverter`s in loading order. An empty list sorts the tensors, as
            transformers does then; None leaves them unchanged.

    Raises:
        NotAViewError: If a conversion computes values, so that its result is not a view.
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


@torch.inference_mode(False)
def _traced(
    model: PreTrainedModel,
    tensors: Mapping[str, HFTensor],
    dtype_of: Callable[[str], torch.dtype],
    conversions: list[Any],
) -> dict[str, HFTensor]:
    """Run transformers' conversion code on shapes, also in inference mode, which does not decompose operations."""
    traced: dict[str, Any] = {
        name: TracedTensor.of_pieces(tensor.shape, dtype_of(tensor.parameters[0]), tensor.pieces)
        for name, tensor in tensors.items()
    }
    # The only attributes of the model that `revert_weight_conversion` reads.
    stand_in: Any = SimpleNamespace(
        _weight_conversions=conversions, config=model.config, get_parameter=traced.__getitem__, name_or_path=""
    )
    try:
        converted = revert_weight_conversion(stand_in, traced)
    except NRLModelsError:
        raise
    except Exception as error:  # each conversion of transformers raises a different exception for sizes that do not fit
        problem = Problem(
            ProblemKind.UNSUPPORTED,
            model.config.model_type,
            f"{type(error).__name__}: {error}",
            advice="Correct the sizes in config.json.",
        )
        raise ConfigurationError(
            "transformers cannot convert the weights of this configuration for saving", [problem]
        ) from error
    return {name: HFTensor(name, tuple(tensor.shape), tensor.pieces) for name, tensor in converted.items()}
