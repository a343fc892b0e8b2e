"""A live model under Hugging Face names: what `load_state_dict` accepts and `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate.utils import has_offloaded_params
from accelerate.utils.modeling import get_state_dict_offloaded_model
from transformers import PreTrainedModel

from nrl_models.common.layouts import convert_layout
from nrl_models.common.matching import Given, match
from nrl_models.common.saving import separate_storages
from nrl_models.common.state_dict_adapter import StateDictAdapter, widest
from nrl_models.errors import CheckpointError, Problem, StateDictError


def to_checkpoint(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors transformers would save for `model`, by the names of the checkpoint it came from.

    Args:
        model: the model.
        state_dict: own tensors to use in place of the model's; all or some.

    Raises:
        CheckpointError: what the configuration says of tied weights is not so, or tensors have no values.
        StateDictError: `state_dict` is not this model's.
    """
    adapter = StateDictAdapter(model)
    if state_dict is None:
        state_dict = _values(model)
        _check_ties(model, adapter, state_dict)
    left_out = set(model._keys_to_ignore_on_save or ()) | adapter.tied.keys()
    kept = {name: tensor for name, tensor in state_dict.items() if name not in left_out}
    loaded_with = getattr(model, "_weight_conversions", None)
    if loaded_with is None:
        return separate_storages(adapter.to_hf(kept))
    # transformers saves a model in the layout it was loaded from, whatever the hub's is.
    in_memory = {name: tensor for name, tensor in adapter.transformers.items() if name not in adapter.tied}
    layout = convert_layout(model, in_memory, adapter.own, loaded_with)
    adapter.to_hf(kept)  # checks names and shapes
    available = {name: tensor for name, tensor in layout.items() if all(one in kept for one in tensor.parameters)}
    return separate_storages({name: tensor.read(kept) for name, tensor in available.items()})


def _values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's own tensors; those that accelerate keeps elsewhere (in memory, on disk) are fetched."""
    own = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    if any(has_offloaded_params(module) for module in model.modules()):
        fetched = get_state_dict_offloaded_model(model)
        own = {name: fetched.get(name, tensor) if tensor.is_meta else tensor for name, tensor in own.items()}
    if problems := [Problem("missing", name, "is on meta") for name, tensor in own.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{type(model).__name__} has tensors without values",
            problems,
            ["load a checkpoint into it: from_config(device='meta') gives shapes only"],
        )
    return own


def _check_ties(model: PreTrainedModel, adapter: StateDictAdapter, values: Mapping[str, torch.Tensor]) -> None:
    """The configuration and the storage must agree on what is tied, or reloading would not give this model.

    Of what accelerate keeps elsewhere only `values` can be compared.
    """
    own = model.state_dict(keep_vars=True)
    problems = [
        Problem("tied", name, f"is not the same tensor as {kept}, but the configuration ties them")
        for name, kept in adapter.tied.items()
        if name in own and kept in own and not _same_storage(own[name], own[kept])
        if not (own[name].is_meta and torch.equal(values[name], values[kept]))
    ]
    head = getattr(model.get_output_embeddings(), "weight", None)
    if not adapter.tied and head is not None and _same_storage(head, model.get_input_embeddings().weight):
        problems.append(Problem("tied", "the output embeddings", "share the input embeddings' storage, untied"))
    if problems:
        raise CheckpointError(
            f"{type(model).__name__} and its configuration disagree on tied weights",
            problems,
            ["call model.tie_weights(), or set model.config.tie_word_embeddings to what the model is"],
        )


def _same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.device.type == "meta":
        return first is second
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


def fill_from_hf_names(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], prefix: str = "") -> list[str]:
    """Replace, in `state_dict`, tensors under Hugging Face names by the model's own.

    A combined tensor of which only some parts are given keeps the model's rows for the others, as a
    state dict without them would in the Hugging Face model.

    Args:
        model: the model that will load `state_dict`.
        state_dict: changed in place. Names that are neither the model's nor Hugging Face's stay.
        prefix: what stands before every name of this model.

    Returns:
        The Hugging Face names of parts that are not given.

    Raises:
        StateDictError: shapes or dtypes that do not fit, a tensor given twice (combined and in parts, say), or
            in part to a model on meta, which has no rows to keep.
    """
    own = model.state_dict(keep_vars=True)
    foreign = [key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix) not in own]
    if not foreign:
        return []
    adapter = StateDictAdapter(model)
    table = adapter.hub | adapter.transformers
    found = match(
        {key: Given(tuple(state_dict[key].shape), state_dict[key].dtype) for key in foreign},
        lambda key: table.get(key.removeprefix(prefix)),
        adapter.own,
        adapter.absent,
        tied={},
        may_miss=lambda name: True,
        why_unexpected=lambda key: None,
    )
    absent = {name: adapter.absent(name, [target for _, target in given]) for name, given in found.sources.items()}
    problems = [problem for problem in found.problems if problem.kind != "partial"]
    for name, given in found.sources.items():
        if prefix + name in state_dict:
            detail = f"is a part of {prefix + name}, which is given too"
            problems += [Problem("duplicated", key, detail) for key, _ in given]
        elif absent[name] and own[name].is_meta and not all(state_dict[key].is_meta for key, _ in given):
            detail = f"has no weights yet that {', '.join(absent[name])} could keep"
            problems.append(Problem("partial", prefix + name, detail))
    if problems:
        raise StateDictError(f"state dict does not fit {type(model).__name__}", problems)
    for name, given in found.sources.items():
        first = state_dict[given[0][0]]
        dtypes = [state_dict[key].dtype for key, _ in given]
        if absent[name]:
            whole = own[name].detach().to(widest([own[name].dtype, *dtypes]), copy=True)
        else:
            whole = first.new_empty(own[name].shape, dtype=widest(dtypes))
        for key, target in given:
            target.write_into(name, whole, state_dict[key])
        state_dict[prefix + name] = whole
    for key in {key for given in found.sources.values() for key, _ in given}:
        del state_dict[key]
    return [prefix + name for names in absent.values() for name in names]
