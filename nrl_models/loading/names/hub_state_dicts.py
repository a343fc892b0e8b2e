"""Accept tensors under the hub's names in `load_state_dict`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from nrl_models.common.modules import (
    is_flattened,
    names_in_state_dict,
    peft_modules,
    without_wrappers,
)
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.kept_tensors import KeptTensor, keep, kept_by
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import match
from nrl_models.common.state_dict.own_tensors import assemble
from nrl_models.common.state_dict.ties import have_same_values
from nrl_models.errors import Problem, ProblemKind, StateDictError, listed
from nrl_models.loading.names.adapted_names import (
    merged_modules,
    modules_under_adapters,
    names_under_adapters,
)
from nrl_models.loading.names.checkpoint_names import CheckpointNames
from nrl_models.loading.names.tied_state_dicts import keep_ties

_ONE_NAME_IS_ENOUGH = "nrl_models.one_name_is_enough"
"""Key in torch's metadata of a state dict, see `accepting_one_name`."""


def accepting_one_name(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of a state dict from which a model loads tied tensors without reporting absent names as missing."""
    if not isinstance(state_dict, Mapping):
        return state_dict  # torch raises
    metadata = dict(getattr(state_dict, "_metadata", None) or {})
    metadata[""] = {**metadata.get("", {}), _ONE_NAME_IS_ENOUGH: True}
    accepting: Any = OrderedDict(state_dict)
    accepting._metadata = metadata
    return cast(Mapping[str, Any], accepting)


def convert_names(
    model: Any, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], errors: list[str]
) -> list[str]:
    """Give a state dict that is about to be loaded the model's own names, see `accept_hub_names` and `keep_ties`.

    Args:
        model, state_dict, prefix, errors: See `accept_hub_names`.
        metadata: torch's metadata of the model in the state dict.

    Returns:
        Missing keys that torch does not find. If a tied tensor has only some of its names, these include the others, as
        in torch and transformers: `safetensors.torch.load_model` and accelerate expect the names that were not saved.
    """
    missing: list[str] = []
    accept_hub_names(model, state_dict, prefix, missing, errors)
    added = keep_ties(model, state_dict, prefix, assign=metadata.get("assign_to_params_buffers", False))
    return [f"{prefix}{name}" for name in missing] + ([] if metadata.get(_ONE_NAME_IS_ENOUGH) else added)


def accept_hub_names(
    model: Any,
    state_dict: dict[str, Any],
    prefix: str,
    missing: list[str],
    errors: list[str],
) -> None:
    """Convert tensors under the hub's names to the model's own, in a state dict that is about to be loaded.

    Names are interpreted as in a checkpoint's files. A dict of own names only is unchanged. Unknown names also stay,
    and torch reports them.

    Args:
        model: A model of this library.
        state_dict: The state dict that torch loads; modified in place.
        prefix: Prefix of the model's tensor names in `state_dict`.
        missing: Receives the names of missing parts of tensors that are only partly present. A checkpoint shard may
            have some experts of a stack; the other experts then keep their values.
        errors: Receives messages that torch raises after loading. An exception before would leave FSDP1 in a context.

    Raises:
        StateDictError: If tensors are duplicated, have another shape or dtype, or are tied but differ.
        ShardingError: If sharded tensors would have to be concatenated.
    """
    if is_flattened(model):
        try:
            _convert_complete(model.state_dict_adapter, state_dict, prefix)
            _rename_adapted(model, state_dict, prefix)
        except StateDictError as error:
            errors.append(str(error))
        return
    stored_names = names_in_state_dict(model)
    _convert_adapted(model, state_dict, prefix, stored_names, missing)
    _convert(model, state_dict, prefix, stored_names, missing)


def _convert_complete(adapter: StateDictAdapter, state_dict: dict[str, Any], prefix: str) -> None:
    """Implement `accept_hub_names` for a model that FSDP1 has flattened, which only accepts complete own tensors.

    Raises:
        StateDictError: As `accept_hub_names`, and if tensors are incomplete.
    """
    inside = {key: key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
    converted = {key: name for key, name in inside.items() if name not in adapter.specs and adapter.find(name)}
    loaded = adapter.from_hf({name: state_dict[key] for key, name in converted.items()}, strict=False)
    twice = [name for name in loaded if f"{prefix}{name}" in state_dict]
    if problems := [Problem(ProblemKind.DUPLICATED, name, "is there in two layouts") for name in twice]:
        raise StateDictError("state dict does not fit the model", problems)
    for key in converted:
        del state_dict[key]
    state_dict.update({f"{prefix}{name}": tensor for name, tensor in loaded.items()})


def _convert_adapted(
    model: Any, state_dict: dict[str, Any], prefix: str, stored_names: Mapping[str, str], missing: list[str]
) -> None:
    """Implement `accept_hub_names` for the base model's tensors in a model with PEFT adapters.

    Names are those of the base model, in which a module has the name that it had without adapters. Adapters keep their
    values, and also copies that PEFT trains (`modules_to_save`).

    Args:
        model, state_dict, prefix, missing: See `accept_hub_names`.
        stored_names: See `names_in_state_dict`.
    """
    own_names = {name: own_name for name, own_name in names_under_adapters(model).items() if own_name in stored_names}
    inside = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
    tensors = {name: tensor for name, key in inside.items() if isinstance(tensor := state_dict[key], torch.Tensor)}
    if not own_names or set(stored_names.values()) >= tensors.keys():
        return
    adapted = set(own_names)
    if getattr(model, "sharding", None) is None:  # conversions may not apply to names of adapters
        own_names |= {name: name for name in stored_names.keys() - own_names.values()}
    plain = without_wrappers(model, peft=True)
    adapter = StateDictAdapter(plain)
    targets = CheckpointNames(plain, adapter, tensors).targets
    parameter_names = {name: tensor.parameters for name, tensor in targets.items() if tensor is not None}
    names = {name for name, parameters in parameter_names.items() if own_names.keys() >= set(parameters)}
    tensors = {name: tensors[name] for name in names - set(stored_names.values())}
    if not tensors:
        return
    if any(not adapted.isdisjoint(parameter_names[name]) for name in tensors):
        _require_unmerged(model)

    def own_tensors() -> dict[str, torch.Tensor]:
        values = model.state_dict()
        return {name: values[stored_names[own_name]] for name, own_name in own_names.items()}

    loaded = _as_own_tensors(plain, adapter, own_tensors, tensors, missing)
    for name in tensors:
        del state_dict[inside[name]]
    state_dict.update({f"{prefix}{stored_names[own_names[name]]}": value for name, value in loaded.items()})


def _rename_adapted(model: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Give the base model's tensors in modules that PEFT replaced their own names, in a model that FSDP1 flattened."""
    of_adapters = _adapter_parts(model)
    for name, own_name in modules_under_adapters(model).items():
        old, new = f"{prefix}{name}.", f"{prefix}{own_name}."
        inside = [key for key in state_dict if key.startswith(old) and not key.startswith(new)]
        if base := [key for key in inside if of_adapters.isdisjoint(key.split("."))]:
            _require_unmerged(model)
            state_dict.update({new + key.removeprefix(old): state_dict.pop(key) for key in base})


def _require_unmerged(model: Any) -> None:
    """Raise if adapters are merged into weights, because PEFT later subtracts them from the weights again.

    Raises:
        StateDictError: If there are any. Lists all modules.
    """
    if merged := merged_modules(model):
        problems = [Problem(ProblemKind.UNEXPECTED, name, "has adapters merged into its weights") for name in merged]
        advice = ["call unmerge_adapter() of the PeftModel before loading weights of the base model"]
        raise StateDictError("state dict does not fit the model", problems, advice)


def _convert(
    model: Any, state_dict: dict[str, Any], prefix: str, stored_names: Mapping[str, str], missing: list[str]
) -> None:
    """Implement `accept_hub_names`.

    Args:
        model, state_dict, prefix, missing: See `accept_hub_names`.
        stored_names: See `names_in_state_dict`.
    """
    own_names = {stored: name for name, stored in stored_names.items()}
    inside = {key: key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
    of_adapters = _adapter_parts(model)
    inside = {key: inner for key, inner in inside.items() if of_adapters.isdisjoint(inner.split("."))}
    if own_names.keys() >= set(inside.values()):
        return
    tensors = {own_names.get(inner, inner): state_dict[key] for key, inner in inside.items()}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    kept_tensors = {name: tensor for name, tensor in kept_by(model).items() if name in tensors}
    problems = list(_kept_problems(kept_tensors, tensors))
    loaded = {name: value for name, value in tensors.items() if name not in kept_tensors}
    if not stored_names.keys() >= loaded.keys():
        plain = without_wrappers(model)
        adapter, sharding = model.state_dict_adapter, getattr(model, "sharding", None)
        loaded = _as_own_tensors(plain, adapter, plain.state_dict, loaded, missing, problems, sharding)
    elif problems:
        raise StateDictError("state dict does not fit the model", problems)
    copies = {
        name: tensors[name].detach().to("cpu", tensor.spec.dtype, copy=True) for name, tensor in kept_tensors.items()
    }
    keep(model, {name: replace(tensor, stored=(copies[name],), compute=None) for name, tensor in kept_tensors.items()})
    for key, inner in inside.items():
        if own_names.get(inner, inner) in tensors:
            del state_dict[key]
    state_dict.update({f"{prefix}{stored_names.get(name, name)}": value for name, value in loaded.items()})


def _kept_problems(kept_tensors: Mapping[str, KeptTensor], tensors: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    """Yield a problem for each tensor that cannot replace the kept tensor of its name."""
    for name, tensor in kept_tensors.items():
        if (shape := tuple(tensors[name].shape)) != tensor.spec.shape:
            detail = f"has shape {shape}, the model expects {tensor.spec.shape}"
            yield Problem(ProblemKind.SHAPE, name, detail)
        elif tensors[name].is_meta:
            yield Problem(ProblemKind.MISSING, name, "is on meta, without values")


def _adapter_parts(model: Any) -> set[str]:
    """Return the parts of names (`lora_A`) that only tensors of PEFT's adapters in a model have."""
    return {
        part
        for _, wrapper in peft_modules(model)
        for part in (*getattr(wrapper, "adapter_layer_names", ()), *getattr(wrapper, "other_param_names", ()))
    }


def _as_own_tensors(
    model: Any,
    adapter: StateDictAdapter,
    own_tensors: Callable[[], Mapping[str, torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    missing: list[str],
    problems: Sequence[Problem] = (),
    sharding: Any = None,
) -> dict[str, torch.Tensor]:
    """Convert tensors under checkpoint names to a model's own. Tensors without a target are returned unchanged.

    Args:
        model: The model without wrappers.
        adapter: The model's adapter.
        own_tensors: Returns the model's own tensors, all or those of the modules that can be loaded.
        missing: See `accept_hub_names`.
        tensors: Tensors by name.
        problems: Problems of other tensors, which are raised together with those of `tensors`.
        sharding: Sharding state of the model, if `adapter` is its adapter.
    """
    find = CheckpointNames(model, adapter, tensors).targets
    if not problems and all(find[key] is None for key in tensors if key not in adapter.specs):
        return dict(tensors)
    matches = match(
        {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()},
        find.get,
        adapter.specs,
        adapter.absent,
        adapter.tied,
        may_miss=lambda name: True,
        why_unexpected=lambda key: None,
    )
    problems = [*problems, *(problem for problem in matches.problems if problem.kind is not ProblemKind.PARTIAL)]
    if problems:
        raise StateDictError("state dict does not fit the model", problems)
    result = {key: tensor for key, tensor in tensors.items() if find[key] is None}
    model_state = own_tensors()
    for name, sources in matches.sources.items():
        if name not in model_state:
            if sharding is None or name in sharding.names:  # otherwise it belongs to another pipeline stage
                result |= {key: tensors[key] for key, _ in sources}
            continue
        if lacking := adapter.absent(name, [target for _, target in sources]):
            if isinstance(model_state[name], DTensor):
                detail = f"is sharded, but {listed(lacking, limit=8)} is missing"
                raise StateDictError("state dict does not fit the model", [Problem(ProblemKind.PARTIAL, name, detail)])
            missing += lacking
            result[name] = model_state[name].clone()
            for key, target in sources:
                target.write_into(name, result[name], tensors[key])
        else:
            result[name] = assemble(name, adapter.specs[name].shape, sources, tensors)
            if sharding is not None:
                # Sharded tensors may be ordered by rank. The state dict has transformers' order.
                result |= adapter.to_hf({name: result[name]}, layout="transformers")
    for name, source_name in adapter.tied.items():
        if {name, source_name} <= result.keys() and not have_same_values(result[name], result[source_name]):
            detail = f"differs from {source_name}, but the configuration ties them"
            raise StateDictError("state dict does not fit the model", [Problem(ProblemKind.TIED, name, detail)])
    return result
