"""The tensors that `save_pretrained` writes for a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from accelerate.utils.modeling import get_state_dict_offloaded_model
from transformers import PreTrainedModel

from nrl_models.common.modules import (
    class_name,
    own_name,
    peft_modules,
    without_wrappers,
)
from nrl_models.common.process_state import no_collections
from nrl_models.common.projections import own_storage
from nrl_models.common.state_dict.adapter import StateDictAdapter, adapter_of
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.common.state_dict.layouts import (
    are_alike,
    convert_layout,
    hub_conversions,
    loaded_names,
)
from nrl_models.common.state_dict.own_tensors import (
    TO_FILES,
    Gathered,
    read_all,
    require_in_memory,
)
from nrl_models.common.state_dict.savable import (
    check_given_ties,
    check_shapes,
    check_ties,
    require_savable,
    require_wide_weights,
)
from nrl_models.common.state_dict.ties import (
    with_separate_ties,
)
from nrl_models.common.upstream_conversions import (
    conversions_to_revert,
    loaded_conversions,
    remove_tied_weights_from_state_dict,
    revert_weight_conversion,
    set_loaded_conversions,
)
from nrl_models.common.views.view import HFTensor
from nrl_models.errors import CheckpointError, Problem, ProblemKind, StateDictError


@no_collections()
def to_checkpoint(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None = None, *, original_format: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers would save for `model`, see `checkpoint_layout`.

    Also returns checkpoint tensors that the model keeps (`FamilyModel.keeps_unused`, weights of multi-token
    prediction), under the checkpoint's names in any format. Returns nothing for a model that stays quantized, whose
    quantizer returns the tensors, see `quantizer_returns`.

    Args:
        model: The model.
        state_dict: Own tensors that replace the model's; all or some. For a model with PEFT adapters, under the base
            model's names: merged weights.
        original_format: See `checkpoint_layout`.

    Raises:
        CheckpointError: If configuration and model disagree on shapes or tied weights, or tensors have no values.
        StateDictError: If `state_dict` is not this model's, or weights are quantized (also by a cast to an integer or
            8-bit dtype) but transformers did not load them quantized. With a `state_dict` also if the model stays
            quantized.
    """
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    if is_quantized and state_dict is not None:
        problem = Problem(ProblemKind.UNEXPECTED, "state_dict", "was passed, and the quantizer reads the model's")
        advice = "leave out state_dict; to save other values, load them into the model first (load_state_dict)"
        raise StateDictError(f"{class_name(model)} stays quantized and saves its own tensors", [problem], [advice])
    has_peft = state_dict is not None and any(peft_modules(model))
    if has_peft:
        model = without_wrappers(model, peft=True)
    adapter = adapter_of(model)
    check_shapes(model, adapter)
    if is_quantized:
        check_ties(model, adapter)
        return {}
    if state_dict is None:
        require_savable(model)
        state_dict = _values(model, adapter)
        check_ties(model, adapter, state_dict)
    else:
        state_dict = dict(Gathered({own_name(name): tensor for name, tensor in state_dict.items()}))
        adapter.check_own(state_dict, TO_FILES if has_peft else ())
        require_in_memory(state_dict)
        check_given_ties(model, state_dict)
        # For a tied tensor, either name is sufficient.
        tied = {saved_name: state_dict[name] for name, saved_name in adapter.tied.items() if name in state_dict}
        state_dict = {**tied, **state_dict}
    require_wide_weights(model, adapter, state_dict)
    table = checkpoint_layout(model, adapter, original_format=original_format)
    tensors = read_all(table, state_dict) | {name: kept_tensor.read() for name, kept_tensor in kept_by(model).items()}
    # transformers and safetensors treat tensors that share a storage as tied; experts of one stack are not tied.
    tensors = {name: own_storage(tensor) for name, tensor in tensors.items()}
    return with_separate_ties(model, tensors)


@contextmanager
def quantizer_returns(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None, *, has_adapter: bool, original_format: bool
) -> Iterator[None]:
    """Make transformers' `save_pretrained` write the right tensors of a model that stays quantized.

    It replaces the tensors that it gets by those of the model's quantizer, with names in memory. Inside this context,
    the quantizer returns them with the names that transformers saves, and the tensors that the model keeps. No effect
    on an unquantized model.

    Args:
        model: The model.
        state_dict: The adapter's tensors, if only an adapter is saved. None for the model's.
        has_adapter: Whether transformers only saves an adapter.
        original_format: See `checkpoint_layout`.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        yield
        return
    collect = quantizer.get_state_dict_and_metadata

    def tensors_and_metadata(*args: Any) -> tuple[Any, dict[str, Any]]:
        tensors, metadata = collect(*args)
        if has_adapter:
            return tensors if state_dict is None else state_dict, metadata
        tensors = dict(model.state_dict() if tensors is None else tensors)
        for name in model._keys_to_ignore_on_save or ():
            tensors.pop(name, None)
        tensors = _fetched(model, remove_tied_weights_from_state_dict(tensors, model))
        if original_format:
            twin = copy.copy(model)
            set_loaded_conversions(twin, conversions_to_revert(model))
            tensors = loaded_names(model).saved_quantized(revert_weight_conversion(twin, tensors))
        tensors |= {name: kept_tensor.read() for name, kept_tensor in kept_by(model).items()}
        return {name: own_storage(tensor) for name, tensor in tensors.items()}, metadata

    quantizer.get_state_dict_and_metadata = tensors_and_metadata
    try:
        yield
    finally:
        vars(quantizer).pop("get_state_dict_and_metadata", None)


def checkpoint_layout(
    model: PreTrainedModel, adapter: StateDictAdapter, *, original_format: bool = True
) -> dict[str, HFTensor]:
    """Return the tensors that transformers would save for `model`, by name.

    transformers saves a loaded model in the layout of its checkpoint, and a new model in the hub's.

    Args:
        model: The model.
        adapter: The model's adapter.
        original_format: False for the layout in memory of transformers' class (`save_original_format`).

    Raises:
        StateDictError: If transformers would give two tensors the same name, and save only one of them.
    """
    left_out = set(model._keys_to_ignore_on_save or ()) | adapter.tied.keys()
    loaded_with = loaded_conversions(model)
    if not original_format:
        table = adapter.transformers
    elif loaded_with is None or (not adapter.tied and are_alike(loaded_with, hub_conversions(model))):
        table = adapter.hub
    else:
        in_memory = {name: tensor for name, tensor in adapter.transformers.items() if name not in adapter.tied}
        converted = convert_layout(model, in_memory, adapter.specs, loaded_with)
        _require_all(in_memory, converted)
        table = loaded_names(model).saved(converted)
    return {name: tensor for name, tensor in table.items() if not left_out.intersection(tensor.parameters)}


def _require_all(tensors: Mapping[str, HFTensor], converted: Mapping[str, HFTensor]) -> None:
    """Check that a conversion keeps all tensors. transformers 5.5 loses some when it reverts a `key_mapping`."""
    converted_parameters = {parameter for tensor in converted.values() for parameter in tensor.parameters}
    detail = "transformers gives it the name of another tensor"
    if lost := [
        Problem(ProblemKind.DUPLICATED, name, detail)
        for name, tensor in tensors.items()
        if not converted_parameters.issuperset(tensor.parameters)
    ]:
        advice = "pass save_original_format=False, or upgrade transformers"
        raise StateDictError("the saved checkpoint would lack tensors", lost, [advice])


def _values(model: PreTrainedModel, adapter: StateDictAdapter) -> dict[str, torch.Tensor]:
    """Return the model's own tensors. Loads offloaded ones (accelerate), and gathers sharded ones (`fully_shard`)."""
    return _fetched(model, dict(Gathered(adapter.own_tensors(model))))


def _fetched(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with values in place of those that accelerate has offloaded."""
    if any("_hf_hook" in vars(module) and has_offloaded_params(module) for module in model.modules()):
        fetched = get_state_dict_offloaded_model(model)
        tensors = {name: fetched.get(name, tensor) if tensor.is_meta else tensor for name, tensor in tensors.items()}
    if problems := [
        Problem(ProblemKind.MISSING, name, "is on meta") for name, tensor in tensors.items() if tensor.is_meta
    ]:
        raise CheckpointError(
            f"{type(model).__name__} has tensors without values",
            problems,
            ["load a checkpoint into it: from_config(device='meta') gives shapes only"],
        )
    return tensors
