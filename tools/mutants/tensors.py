"""Bugs in loading, saving, exporting and tying tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models import family
from nrl_models.common.modules import install
from nrl_models.common.state_dict import buckets as buckets_module
from nrl_models.common.state_dict import layouts, to_checkpoint
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.buckets import bucket_buffers
from nrl_models.common.upstream import dtype_plan
from nrl_models.common.views.view import HFTensor, Piece
from nrl_models.loading import fit, pretrained
from nrl_models.testing.case import FamilyCase
from tools.mutants.planting import Mutant, Patch, around, in_code, wrapped

LOADING = ("test_load_from_transformers",)
SAVING = ("test_new_model_saves_as_transformers", "test_save_equals_transformers")
NAMES = ("test_state_dict_roundtrip", "test_views_partition_parameters", "test_full_size_names_and_shapes")
EXPORT = ("test_export_plan", "test_single_tensor_export")

ModelChange = Callable[[PreTrainedModel], None]


def always(case: FamilyCase) -> bool:
    """Return True: every architecture has the structure."""
    return True


def _in_hub(change: Callable[[dict[str, HFTensor]], dict[str, HFTensor]]) -> Callable[[FamilyCase], list[Patch]]:
    """Change the adapter's table of hub tensors."""
    wrong = around(layouts.convert_layout, lambda original, *args, **kwargs: change(original(*args, **kwargs)))
    return lambda case: [
        (layouts, "convert_layout", wrong),
        (to_checkpoint, "convert_layout", wrong),
        (family, "adapter_of", StateDictAdapter),  # bypass the cached adapter, which was built without the bug
        (to_checkpoint, "adapter_of", StateDictAdapter),
    ]


def _stored_one_by_one(case: FamilyCase) -> bool:
    hub = case.model().state_dict_adapter.hub
    return any(_neighbor(name) in hub for name in hub)


def _neighbor(name: str) -> str | None:
    """Return the name of expert 1 for that of expert 0."""
    return name.replace("experts.0.", "experts.1.", 1) if "experts.0." in name else None


def _experts_exchanged(table: dict[str, HFTensor]) -> dict[str, HFTensor]:
    result = dict(table)
    for name, tensor in table.items():
        other = _neighbor(name)
        if other in table and table[other].shape == tensor.shape:
            result[name] = replace(tensor, pieces=table[other].pieces)
            result[other] = replace(table[other], pieces=tensor.pieces)
    return result


def _is_square(tensor: HFTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] and tensor.view is not None


def _transposed(table: dict[str, HFTensor]) -> dict[str, HFTensor]:
    return {
        name: replace(tensor, pieces=(Piece(view.then("transpose", 0, 1)),))
        if _is_square(tensor) and (view := tensor.view) is not None
        else tensor
        for name, tensor in table.items()
    }


def _has_buffers(case: FamilyCase) -> bool:
    model = case.model()
    return bool(model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)})


def _without_buffers(case: FamilyCase) -> list[Patch]:
    buffers = {name for name, _ in case.model().named_buffers()}

    def exported(original: Callable[..., Any], self: StateDictAdapter, layout: Any) -> dict[str, HFTensor]:
        return {
            name: tensor
            for name, tensor in original(self, layout).items()
            if not buffers.intersection(tensor.parameters)
        }

    return [wrapped(StateDictAdapter, "exported", exported)]


def _one_place_for_all(*args: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    for buffer, bucket in bucket_buffers(*args):
        places = {name: buffer[: place.nbytes].view(place.dtype) for name, place in bucket.items()}
        yield buffer, {name: places[name].view(place.shape) for name, place in bucket.items()}


def _after_loading(change: ModelChange) -> Callable[[FamilyCase], list[Patch]]:
    def load_weights(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        fit = original(model, *args, **kwargs)
        with torch.no_grad():
            change(model)
        return fit

    return lambda case: [wrapped(pretrained, "load_weights", load_weights)]


def _last_layer_new(model: PreTrainedModel) -> None:
    names = [name for name, _ in model.named_parameters() if ".layers." in name] or [*dict(model.named_parameters())]
    parameter = model.get_parameter(names[-1])
    install(model, names[-1], torch.randn_like(parameter))


def _computed_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set and buffer.is_floating_point()
    ]


def _garbage_in_buffers(model: PreTrainedModel) -> None:
    for module, name in _computed_buffers(model):
        module._buffers[name] = torch.full_like(module.get_buffer(name), 3.0)


def _untied(model: PreTrainedModel) -> None:
    for name in model.all_tied_weights_keys:
        install(model, name, model.get_parameter(name).detach().clone())


def _can_tie(case: FamilyCase) -> bool:
    model = case.model()
    return model.get_output_embeddings() is not None and bool(model._tied_weights_keys)


def _written_twice(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    own = model.state_dict()
    return {name: own[name].clone() for name in model.all_tied_weights_keys} | original(model, *args, **kwargs)


def _is_converted(case: FamilyCase) -> bool:
    adapter = case.model().state_dict_adapter
    return bool(adapter.hub.keys() - adapter.transformers.keys())


def _own_names(model: PreTrainedModel, given: Any = None, **_: Any) -> dict[str, torch.Tensor]:
    return dict(given or model.state_dict())


def _keeps_fp32(case: FamilyCase) -> bool:
    model = case.model(torch.bfloat16)
    return bool(dtype_plan(model, torch.bfloat16)) and torch.float32 in set(
        fit._target_dtypes(model, model.state_dict_adapter, torch.bfloat16).values()
    )


def _all_one_dtype(model: PreTrainedModel, adapter: StateDictAdapter, dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {name: dtype if spec.dtype.is_floating_point else spec.dtype for name, spec in adapter.specs.items()}


def _stored_dtype(original: Callable[..., Any], dtype: Any, *rest: Any) -> Any:
    return original("auto", *rest)


def _drawing_first(original: Callable[..., PreTrainedModel], *args: Any, **kwargs: Any) -> PreTrainedModel:
    torch.rand(1)
    return original(*args, **kwargs)


def _training(model: Any) -> None:
    model.eval = lambda: model


def _everything_tied_apart(case: FamilyCase) -> list[Patch]:
    # A submodel may call `tie_weights` when it is built.
    owners = {case.model_class} | {
        type(module) for module in case.model().modules() if isinstance(module, PreTrainedModel)
    }
    return [(owner, "tie_weights", lambda self, *args, **kwargs: None) for owner in owners]


MUTANTS = (
    Mutant(
        "experts in another order",
        "stacked experts cut in the order of strings, where 10 comes before 2",
        in_code(_stored_one_by_one, _in_hub(_experts_exchanged)),
        NAMES,
    ),
    Mutant(
        "exported transposed",
        "weights as (in, out) where the hub has (out, in): no shape tells of it where they are square",
        in_code(lambda case: any(map(_is_square, case.model().state_dict_adapter.hub.values())), _in_hub(_transposed)),
        NAMES,
    ),
    Mutant(
        "persistent buffers not exported",
        "a refit that walks parameters, and forgets the router's correction",
        in_code(_has_buffers, _without_buffers),
        EXPORT,
    ),
    Mutant(
        "buckets written over",
        "one buffer for every tensor of a refit's bucket",
        in_code(always, lambda case: [(buckets_module, "bucket_buffers", _one_place_for_all)]),
        EXPORT,
    ),
    Mutant(
        "a tensor not loaded",
        "a key that matches nothing, and nobody says so",
        in_code(always, _after_loading(_last_layer_new)),
        LOADING,
    ),
    Mutant(
        "garbage in computed buffers",
        "rotary tables that are built on meta and never filled",
        in_code(lambda case: bool(_computed_buffers(case.model())), _after_loading(_garbage_in_buffers)),
        LOADING,
    ),
    Mutant(
        "untied by loading",
        "a head with separate weights after loading: it is trained and not saved",
        in_code(_can_tie, _after_loading(_untied)),
        ("test_tied_weights_share_storage",),
    ),
    Mutant(
        "never tied",
        "tie_word_embeddings not honored",
        in_code(_can_tie, _everything_tied_apart),
        ("test_tied_weights_share_storage",),
    ),
    Mutant(
        "tied weights written twice",
        "a checkpoint with a head that its configuration says is tied",
        in_code(_can_tie, lambda case: [wrapped(family, "to_checkpoint", _written_twice)]),
        ("test_new_model_saves_as_transformers", "test_tied_weights_share_storage"),
    ),
    Mutant(
        "saved in the layout of memory",
        "a checkpoint of stacked experts, where engines read them one by one",
        in_code(_is_converted, lambda case: [(family, "to_checkpoint", _own_names)]),
        SAVING,
    ),
    Mutant(
        "fp32 modules cast down",
        "a router's correction in bf16, where transformers keeps fp32",
        in_code(_keeps_fp32, lambda case: [(fit, "_target_dtypes", _all_one_dtype)]),
        LOADING,
    ),
    Mutant(
        "requested dtype ignored",
        "fp32 masters asked for, bf16 loaded",
        in_code(always, lambda case: [wrapped(pretrained, "resolve_dtype", _stored_dtype)]),
        ("test_load_in_another_dtype", *LOADING),
    ),
    Mutant(
        "initialized with other numbers",
        "a layer built twice: seeds give other weights than transformers'",
        in_code(always, lambda case: [wrapped(pretrained, "from_config", _drawing_first)]),
        ("test_from_config_is_bit_exact",),
    ),
    Mutant(
        "left in training mode",
        "dropout during inference",
        in_code(always, _after_loading(_training)),
        LOADING,
    ),
)
