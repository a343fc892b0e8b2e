"""A live model under Hugging Face names: what `load_state_dict` accepts and `save_pretrained` writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from nrl_models.common.layouts import convert_layout
from nrl_models.common.saving import separate_storages
from nrl_models.common.state_dict_adapter import StateDictAdapter, widest
from nrl_models.common.views import HFTensor
from nrl_models.errors import CheckpointError, Problem, StateDictError


def to_checkpoint(
    model: PreTrainedModel, state_dict: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors transformers would save for `model`, by the names of the checkpoint it came from.

    With them those the checkpoint held and the model keeps unused (`FamilyModel.keeps_unused`).

    Args:
        model: the model.
        state_dict: own tensors to use in place of the model's; all or some.

    Raises:
        CheckpointError: what the configuration says of tied weights is not so.
        StateDictError: `state_dict` is not this model's.
    """
    adapter = StateDictAdapter(model)
    if state_dict is None:
        _check_ties(model, adapter)
        state_dict = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    adapter.to_hf(state_dict)  # checks names and shapes
    table = checkpoint_layout(model, adapter)
    available = {name: tensor for name, tensor in table.items() if all(one in state_dict for one in tensor.parameters)}
    unused = getattr(model, "_unused_tensors", {})
    return separate_storages({name: tensor.read(state_dict) for name, tensor in available.items()} | unused)


def checkpoint_layout(model: PreTrainedModel, adapter: StateDictAdapter) -> dict[str, HFTensor]:
    """The tensors transformers would save for `model`, by the names of the checkpoint it came from.

    transformers saves a model in the layout it was loaded from, whatever the hub's is; a new model in the hub's.
    """
    left_out = set(model._keys_to_ignore_on_save or ()) | adapter.tied.keys()
    loaded_with = getattr(model, "_weight_conversions", None)
    if loaded_with is None:
        table = adapter.hub
    else:
        in_memory = {name: tensor for name, tensor in adapter.transformers.items() if name not in adapter.tied}
        table = convert_layout(model, in_memory, adapter.own, loaded_with)
    return {name: tensor for name, tensor in table.items() if not left_out.intersection(tensor.parameters)}


def _check_ties(model: PreTrainedModel, adapter: StateDictAdapter) -> None:
    """The configuration and the storage must agree on what is tied, or reloading would not give this model."""
    own = model.state_dict(keep_vars=True)
    problems = [
        Problem("tied", name, f"is not the same tensor as {kept}, but the configuration ties them")
        for name, kept in adapter.tied.items()
        if name in own and kept in own and not _same_storage(own[name], own[kept])
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
        StateDictError: shapes that do not fit, or a tensor given both combined and in parts.
    """
    if (sharding := getattr(model, "sharding", None)) is not None:
        return sharding.local_state_dict(model, state_dict, prefix)
    own = model.state_dict(keep_vars=True)
    foreign = [key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix) not in own]
    if not foreign:
        return []
    adapter = StateDictAdapter(model)
    table = adapter.hub | adapter.transformers
    sources: dict[str, list[tuple[str, HFTensor]]] = defaultdict(list)
    problems = []
    for key in foreign:
        target = table.get(key.removeprefix(prefix))
        if target is None:
            continue
        if tuple(state_dict[key].shape) != target.shape:
            detail = f"has shape {tuple(state_dict[key].shape)}, the model expects {target.shape}"
            problems.append(Problem("shape", key, detail))
        for name in target.parameters:
            sources[name].append((key, target))
            if prefix + name in state_dict:
                problems.append(Problem("duplicated", key, f"is a part of {prefix + name}, which is given too"))
    if problems:
        raise StateDictError(f"state dict does not fit {type(model).__name__}", problems)
    missing = []
    for name, given in sources.items():
        names = {target.name for _, target in given}
        layout = "transformers" if given[0][1].name in adapter.transformers else "hub"
        absent = [target for target in adapter.tensors_in(name, layout) if target.name not in names]
        missing += [prefix + target.name for target in absent]
        first = state_dict[given[0][0]]
        dtype = widest(state_dict[key].dtype for key, _ in given)
        shape = own[name].shape
        whole = own[name].detach().to(dtype, copy=True) if absent else first.new_empty(shape, dtype=dtype)
        for key, target in given:
            target.write_into(name, whole, state_dict[key])
        state_dict[prefix + name] = whole
    for key in {key for given in sources.values() for key, _ in given}:
        del state_dict[key]
    return missing
