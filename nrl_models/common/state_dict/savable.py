"""Check that weights can be saved or merged, so that the result can be loaded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.modules import class_name, input_embeddings, is_flattened, peft_modules, without_wrappers
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import is_wide_float
from nrl_models.common.state_dict.mtp import MTP_COPIES, MTPNames
from nrl_models.common.state_dict.own_tensors import (
    COMPUTED,
    STORE_COMPUTED,
    as_built,
    require_real,
    require_unquantized,
    stored_formats,
)
from nrl_models.common.state_dict.ties import are_one_memory, declared_ties, have_same_values, tying_keys
from nrl_models.errors import CheckpointError, Problem, ProblemKind, StateDictError

_ADVICE = (
    "save before quantizing; to save quantized weights, load the saved checkpoint with "
    "from_pretrained(quantization_config=...), whose save_pretrained writes them"
)


def require_savable(model: nn.Module) -> None:
    """Raise if weights were quantized in place by torch or torchao, whose format no checkpoint describes.

    Raises:
        StateDictError: If there are any. Lists all weights.
    """
    require_unquantized(stored_formats(model).opaque, "saved", _ADVICE)


def require_wide_weights(
    model: PreTrainedModel, adapter: StateDictAdapter, tensors: Mapping[str, torch.Tensor | TensorSpec]
) -> None:
    """Raise if floating-point weights would be saved in another kind of dtype, such as int8, float8 or complex64.

    Modules that store scales next to their quantized weights are allowed (bitsandbytes and HQQ in place).

    Args:
        model: The model, without PEFT.
        adapter: The model's adapter.
        tensors: Own tensors to save, all or some.

    Raises:
        StateDictError: If there are any. Lists all weights.
    """
    require_real(model, tensors, "saved")
    narrow = {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if not is_wide_float(tensor.dtype) and (is_wide_float(adapter.specs[name].dtype) or name in adapter.quantized)
    }
    if narrow:
        packed, names = stored_formats(model).packed, as_built(model).state_dict().keys()
        has_scales = {name.rpartition(".")[0] for name in adapter.specs.keys() - names}
        narrow = {
            name: dtype
            for name, dtype in narrow.items()
            if name not in packed and name.rpartition(".")[0] not in has_scales
        }
    if problems := [
        Problem(ProblemKind.DTYPE, name, f"is {dtype_name(dtype)}, expected a floating-point dtype of at least 16 bits")
        for name, dtype in narrow.items()
    ]:
        raise StateDictError("quantized weights cannot be saved, because files would lack scales", problems, [_ADVICE])


def require_unsharded_adapters(model: nn.Module) -> None:
    """Check that no weight under an adapter is sharded. The error has one problem for all of them.

    Raises:
        StateDictError: If one is.
    """
    sharded = [
        f"{name}.{parameter_name}"
        for name, wrapper in peft_modules(model)
        for parameter_name, parameter in wrapper.named_parameters()
        if isinstance(parameter, DTensor)
    ]
    if not sharded:
        return
    more = f", with {len(sharded) - 1} more under adapters" if len(sharded) > 1 else ", under an adapter"
    problem = Problem(ProblemKind.PLAN, sharded[0], f"is sharded{more}: expected complete weights")
    raise StateDictError(
        "adapters of a sharded model cannot be merged into what is exported",
        [problem],
        [
            "gather the adapter with torch.distributed.checkpoint.state_dict.get_model_state_dict on all ranks, and "
            "save it with peft_model.save_pretrained(folder, state_dict=...) on the first",
            "then load it with VLLMEngine.use_adapter(folder), or into a model without shards, and export that model",
        ],
    )


def check_shapes(model: PreTrainedModel, adapter: StateDictAdapter) -> None:
    """Check that a model has the tensors and shapes of its configuration, so that the saved model can be loaded.

    They differ if only one of the two was changed: by `resize_token_embeddings` of a model with more sizes than
    `vocab_size`, by hand (dropped or added layers), or by pruning and parametrizations. Additional modules are allowed.
    Weights of multi-token prediction (MTP) have numbers after the last layer and copies of the embeddings.

    Args:
        model: The model.
        adapter: The model's adapter.

    Raises:
        CheckpointError: If they differ.
    """
    if getattr(model, "stages", None) is not None or is_flattened(model):
        return
    problems = _mtp_problems(model)
    state = model.config.to_json_string(use_diff=False), adapter.specs
    if _consistent.get(model) != state:
        problems = _differences(model, adapter) + problems
    if problems:
        advice = ["change the configuration or these tensors, so that both describe the same model"]
        advice += [STORE_COMPUTED] if adapter.computed else []
        raise CheckpointError(f"{class_name(model)} and its configuration describe different models", problems, advice)
    _consistent[model] = state


_consistent: WeakKeyDictionary[PreTrainedModel, tuple[str, Mapping[str, TensorSpec]]] = WeakKeyDictionary()
"""The configuration and the own tensors of each model when they last agreed. Building a large model takes seconds."""


def _differences(model: PreTrainedModel, adapter: StateDictAdapter) -> list[Problem]:
    """Return differences between a model's tensors and those of a new model with the same configuration."""
    plain = without_wrappers(model, peft=True)
    _, *others = inspect.signature(type(plain)).parameters.values()
    if any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in others):
        return []  # a subclass that cannot be built from a configuration alone
    built = as_built(plain, torch.get_default_dtype())
    shapes = dict(chain(built.named_parameters(), built.named_buffers()))
    packed = stored_formats(plain).packed
    quantized = {name.rpartition(".")[0] for name in adapter.quantized}  # modules with other names for their tensors
    written = built.state_dict().keys() - declared_ties(built).keys() - set(plain._keys_to_ignore_on_save or ())
    problems = [Problem(ProblemKind.UNEXPECTED, name, COMPUTED) for name in adapter.computed]
    problems += [
        Problem(ProblemKind.MISSING, name, "is not in the model, its configuration has it")
        for name in sorted(written - adapter.specs.keys() - set(adapter.computed))
        if name.rpartition(".")[0] not in quantized
    ]
    problems += [
        Problem(ProblemKind.UNEXPECTED, name, "is in a layer that the configuration does not have")
        for name in adapter.specs
        if name not in shapes and any(first in shapes for first in _in_first_layer(name))
    ]
    return problems + [
        Problem(ProblemKind.SHAPE, name, f"has {tuple(spec.shape)}, its configuration gives {tuple(shape)}")
        for name, spec in adapter.specs.items()
        if name in shapes
        and name not in packed
        and (shape := shapes[name].shape) != spec.shape
        and shapes[name].is_floating_point() == spec.dtype.is_floating_point  # else quantized
    ]


def _in_first_layer(name: str) -> Iterator[str]:
    """Yield the name with each of its numbers replaced by 0: the same tensor in the first layer of a stack."""
    for number in re.finditer(r"(?<=\.)[1-9]\d*(?=\.)", name):
        yield f"{name[: number.start()]}0{name[number.end() :]}"


def _mtp_problems(model: PreTrainedModel) -> list[Problem]:
    """Return problems of kept MTP weights that do not belong to the model's layers and embeddings."""
    mtp_tensors = kept_by(model, mtp_only=True)
    if not mtp_tensors:
        return []
    names = MTPNames(model)
    recognized = set(names.among(mtp_tensors))
    problems = [
        Problem(ProblemKind.UNEXPECTED, name, f"is not of MTP layer {names.first} or one of those after it")
        for name in mtp_tensors
        if name not in recognized
    ]
    embeddings = input_embeddings(without_wrappers(model)).weight.shape
    return problems + [
        Problem(ProblemKind.SHAPE, name, f"has {tuple(shape)}, and the embeddings that it copies {tuple(embeddings)}")
        for name, tensor in mtp_tensors.items()
        if name.endswith(MTP_COPIES) and (shape := tensor.spec.shape) != embeddings
    ]


def check_ties(
    model: PreTrainedModel, adapter: StateDictAdapter, values: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> None:
    """Check that a model's memory and configuration agree on ties, so that reloading results in the same model.

    Args:
        model: The model.
        adapter: The model's adapter with its current ties.
        values: Values of offloaded tensors (on meta), which are compared by value.

    Raises:
        CheckpointError: If they disagree.
    """
    if getattr(model, "stages", None) is not None or is_flattened(model):
        return  # shared parameters of stages are kept equal, in the memory of several ranks
    declared = declared_ties(model)
    apart = {name: saved_name for name, saved_name in declared.items() if name not in adapter.tied}
    apart |= {
        name: saved_name
        for name, saved_name in adapter.tied.items()
        if name in values and not have_same_values(values[name], values[saved_name])
    }
    problems = _apart(apart)
    plain = without_wrappers(model)
    head = getattr(plain.get_output_embeddings(), "weight", None)
    embeddings = getattr(input_embeddings(plain), "weight", None)
    if not declared and head is not None and embeddings is not None and are_one_memory(head, embeddings):
        detail = "share the input embeddings' storage, untied"
        problems.append(Problem(ProblemKind.TIED, "the output embeddings", detail))
    if problems:
        _refuse(model, problems, apart)


def check_given_ties(model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Check that passed tensors have equal values if the configuration ties them."""
    ties = {
        name: saved_name for name, saved_name in declared_ties(model).items() if {name, saved_name} <= state_dict.keys()
    }
    if apart := {
        name: saved_name
        for name, saved_name in ties.items()
        if not have_same_values(state_dict[name], state_dict[saved_name])
    }:
        _refuse(model, _apart(apart), apart)


def _apart(ties: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(ProblemKind.TIED, name, f"is not the same tensor as {saved_name}, but the configuration ties them")
        for name, saved_name in ties.items()
    ]


def _refuse(model: PreTrainedModel, problems: list[Problem], apart: Mapping[str, str]) -> NoReturn:
    keys = [f"model.config.{key}" for key in tying_keys(model, apart)] or ["model.config.tie_word_embeddings"]
    advice = f"call model.tie_weights(), or set {' and '.join(keys)} to match the model"
    raise CheckpointError(f"{class_name(model)} and its configuration disagree on tied weights", problems, [advice])
