"""Bugs in the inputs of a forward: masks, positions, packed documents, caches, replayed routing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nrl_models.common.documents import masks, packing
from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.documents.current_documents import documents_running, running
from nrl_models.common.documents.layers import ByDocument
from nrl_models.common.forward import routing
from nrl_models.common.upstream import CACHE_NAMES, cache_in, cache_input, cache_name
from nrl_models.parity.noise import logits_and_routing
from nrl_models.testing.case import FamilyCase
from tools.mutants.planting import Mutant, Patch, called_with, in_code, wrapped

PACKED = ("test_packing", "test_documents_get_no_gradient_from_each_other")
PADDED = ("test_padded_batch", "test_left_padding", *PACKED, "test_right_padding")


def _forward(change: Callable[[nn.Module, dict[str, Any]], dict[str, Any]]) -> Callable[[FamilyCase], list[Patch]]:
    """Change the arguments of the model's forward."""
    return lambda case: [wrapped(case.model_class, "forward", called_with(change))]


def _takes(name: str) -> Callable[[FamilyCase], bool]:
    return lambda case: name in inspect.signature(case.model_class.forward).parameters


def _without_mask(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    return given | {"attention_mask": None}


def _without_positions(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    positions = given.get("position_ids")
    if given.get("attention_mask") is None or positions is None or positions.ndim != 2:
        return given
    # Number all positions, padding included, starting at the end of the cache.
    first = positions.max() - positions.shape[1] + 1 if cache_in(given) is not None else 0
    return given | {"position_ids": (torch.arange(positions.shape[1], device=positions.device) + first)[None]}


def _stale_cache(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    cache = cache_in(kwargs)
    if cache is None or not kwargs.get("use_cache"):
        return forward(self, *args, **kwargs)
    others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
    output = forward(self, *args, **others, **cache_input(forward, copy.deepcopy(cache)))
    output[cache_name(type(output))] = cache
    return output


def _keeps_documents_apart(case: FamilyCase) -> bool:
    is_limited = "packed sequences" in case.model_class.limits
    return not is_limited and not case.architecture.endswith("SequenceClassification")


def _hidden_by_a_mask(documents_of: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> Any:
    return documents_of(model, inputs) if inputs.get("attention_mask") is None else None


def _keeps_state(case: FamilyCase) -> bool:
    return _keeps_documents_apart(case) and any(isinstance(module, ByDocument) for module in case.model().modules())


def _state_goes_on(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with running(None):
        return forward(self, *args, **kwargs)


def _state_begins_late(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    documents = documents_running()
    with running(None if documents is None else _one_token_late(documents)):
        return forward(self, *args, **kwargs)


def _one_token_late(documents: Documents) -> Documents:
    """Assign the first token of each document to the previous document."""
    first = documents.index.roll(1, 1)
    first[:, 0] = 0
    late = (first[:, 1:] != first[:, :-1]).cumsum(1)
    places = torch.arange(late.shape[1], device=late.device)
    return Documents.from_positions(nn.functional.pad(places + 2 * late, (1, 0), value=-1))


def _attends_late(attend: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    *states, documents = tensors
    return attend(*states, _one_token_late(documents), **options)


def _window_of_the_row(attend: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    *states, documents = tensors
    if options.get("window") is not None:
        places = torch.arange(documents.shape[1], device=documents.index.device)
        documents = Documents.from_positions(places.expand(documents.shape))
    return attend(*states, documents, **options)


def _routes(case: FamilyCase) -> bool:
    is_limited = "router replay" in case.model_class.limits
    return not is_limited and bool(logits_and_routing(case.model(), case.inputs())[1])


def _own_choice(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


MUTANTS = (
    Mutant(
        "mask of padding ignored",
        "attention_mask not passed on by a model's own forward",
        in_code(_takes("attention_mask"), _forward(_without_mask), probed=True),
        PADDED,
    ),
    Mutant(
        "positions counted with padding",
        "position_ids not passed on: those of the padded row are used",
        in_code(_takes("position_ids"), _forward(_without_positions), probed=True),
        PADDED,
    ),
    Mutant(
        "packed documents see each other",
        "a mask of ones that hides where documents begin",
        in_code(
            _keeps_documents_apart, lambda case: [wrapped(packing, "_documents_of", _hidden_by_a_mask)], probed=True
        ),
        PACKED,
    ),
    Mutant(
        "state carried over",
        "seq_idx not passed to a convolution or a scan: a document goes on from the state of the one before it",
        in_code(_keeps_state, lambda case: [wrapped(ByDocument, "forward", _state_goes_on)], probed=True),
        PACKED,
    ),
    Mutant(
        "state begins one token late",
        "a boundary off by one where documents are cut apart for a recurrence",
        in_code(_keeps_state, lambda case: [wrapped(ByDocument, "forward", _state_begins_late)], probed=True),
        PACKED,
    ),
    Mutant(
        "attention begins one token late",
        "cu_seqlens off by one, in attention without a mask",
        in_code(_keeps_documents_apart, lambda case: [wrapped(masks, "attend", _attends_late)], probed=True),
        PACKED,
    ),
    Mutant(
        "window across documents",
        "a window over the sequence's last tokens, across documents",
        in_code(_keeps_documents_apart, lambda case: [wrapped(masks, "attend", _window_of_the_row)], probed=True),
        PACKED,
    ),
    Mutant(
        "a stale cache returned",
        "what a step computes is not in the cache that the next one gets",
        in_code(
            lambda case: any(_takes(name)(case) for name in CACHE_NAMES) and case.model().can_generate(),
            lambda case: [wrapped(case.model_class, "forward", _stale_cache)],
            probed=True,
        ),
        ("test_cached_decode", "test_decoded_steps"),
    ),
    Mutant(
        "routing recorded and not replayed",
        "hooks on modules that are not called",
        in_code(_routes, lambda case: [(routing._Replayer, "__torch_function__", _own_choice)]),
        ("test_router_replay",),
    ),
)
