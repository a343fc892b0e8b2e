"""Bugs in groups of projections: wrong rows, gradients, weights, inputs or copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.common.projections import (
    CombinedProjections,
    LinearGroup,
    group,
    groups_of,
    matmul,
    memory,
)
from nrl_models.common.projections.run import GroupRun
from nrl_models.common.upstream_torch import current_graph_task_id
from nrl_models.testing.case import FamilyCase
from tools.mutants.planting import Bug, Mutant, in_code, wrapped

LAYERS = ("test_layer_equivalence", "test_logits_equivalence")
TRAINING = ("test_gradient_equivalence", "test_training_loss_decreases")
COPIES = ("test_copies_keep_one_storage",)

QUERY, KEY, VALUE = ("q_proj", "query", "q"), ("k_proj", "key", "k"), ("v_proj", "value", "v")
GATE, UP = ("gate_proj", "w1"), ("up_proj", "w3")
"""Names of linears with the same role."""

FIRST_WEIGHT = 5
"""Index of the first weight among the arguments of the fused matmul's autograd function, and of its gradients."""

Outputs = tuple[torch.Tensor, ...]


def groups_in(case: FamilyCase) -> Iterator[LinearGroup]:
    """Yield the model's groups."""
    return (found for _, _, found in groups_of(case.model()))


def combines(case: FamilyCase) -> bool:
    """Return True if the model has a group."""
    return any(True for _ in groups_in(case))


def _pair_of(group: LinearGroup, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[int, int] | None:
    """Return the indices of two linears of equal size, given their possible names."""
    names = list(group.linears)
    left, right = ([at for at, name in enumerate(names) if name in wanted] for wanted in (first, second))
    if not (left and right) or len({group.linears[names[at]].out_features for at in (left[0], right[0])}) > 1:
        return None
    return left[0], right[0]


def _exchanged(name: str, stands_for: str, first: tuple[str, ...], second: tuple[str, ...]) -> Mutant:
    def wrong(self: LinearGroup, outputs: Outputs) -> Outputs:
        parts = list(outputs)
        if pair := _pair_of(self, first, second):
            left, right = pair
            parts[left], parts[right] = parts[right], parts[left]
        return tuple(parts)

    def where(case: FamilyCase) -> bool:
        return any(_pair_of(found, first, second) for found in groups_in(case))

    return Mutant(name, stands_for, _outputs_as(wrong, where), LAYERS)


def _outputs_as(
    wrong: Callable[[LinearGroup, Outputs], Outputs], where: Callable[[FamilyCase], bool] = combines
) -> Bug:
    """Change a group's outputs."""

    def changed(outputs_with: Callable[..., Outputs], self: LinearGroup, *given: Any) -> Outputs:
        return wrong(self, outputs_with(self, *given))

    return in_code(where, lambda case: [wrapped(LinearGroup, "outputs_with", changed)])


def _one_row_further(self: LinearGroup, outputs: Outputs) -> Outputs:
    rolled = torch.cat(outputs, -1).roll(-1, -1)
    return outputs[0], *rolled.split([output.shape[-1] for output in outputs], -1)[1:]


def _last_part_detached(self: LinearGroup, outputs: Outputs) -> Outputs:
    *others, last = outputs
    return *others, last.detach()


def _without_last_bias(joined_linear: Callable[..., Outputs], *given: Any) -> Outputs:
    *others, bias, lengths = given
    if bias is not None:
        bias = bias * (torch.arange(len(bias), device=bias.device) < len(bias) - lengths[-1])
    return joined_linear(*others, bias, lengths)


def _kept_at_join(put_side_by_side: Callable[..., bool], self: LinearGroup) -> bool:
    self.__dict__.pop("_kept", None)
    waits = put_side_by_side(self)
    self.__dict__["_kept"] = self.joinable_weights(list(self.linears.values()))
    return waits


def _kept_weights(joinable_weights: Callable[..., Any], self: LinearGroup, linears: Any) -> Any:
    return self.__dict__.get("_kept") or joinable_weights(self, linears)


def _remembered(self: Any, number: int, input: torch.Tensor) -> torch.Tensor:
    kept = self.group.__dict__.setdefault("_remembered", {})
    if kept.get("input") is not input:
        kept["input"], kept["outputs"] = input, self.group(input)
    return kept["outputs"][number]


def _versions_ignored(
    take: Callable[..., torch.Tensor | None], self: GroupRun, number: int, input: torch.Tensor
) -> torch.Tensor | None:
    if self.left and input is self.input:
        self.remember(input)  # reuse an output that was computed from an earlier version of the input
    return take(self, number, input)


def _otherwise_in_backward(
    outputs_with: Callable[..., Outputs], self: LinearGroup, input: torch.Tensor, weights: Any
) -> Outputs:
    return outputs_with(self, input.roll(1, -2) if current_graph_task_id() != -1 else input, weights)


def _is_checkpointed(case: FamilyCase) -> bool:
    model = case.model()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return model.supports_gradient_checkpointing and any(True for layer in layers for _ in groups_of(layer))


def _alike(case: FamilyCase) -> bool:
    """Return True if some group has two linears of the same size."""
    sizes = [[part.out_features for part in found.linears.values()] for found in groups_in(case)]
    return any(len(set(group)) < len(group) for group in sizes)


def _gradients_exchanged(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    found = list(backward(ctx, *gradients))
    alike = (pair for pair in combinations(range(len(ctx.lengths)), 2) if len({ctx.lengths[at] for at in pair}) == 1)
    for left, right in islice(alike, 1):
        left, right = FIRST_WEIGHT + left, FIRST_WEIGHT + right
        found[left], found[right] = found[right], found[left]
    return tuple(found)


def _zeros_for_the_unused(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    found = list(backward(ctx, *gradients))
    for at, weight in enumerate(ctx.weights, FIRST_WEIGHT):
        if found[at] is None and ctx.wants_weights:
            found[at] = torch.zeros_like(weight)
    return tuple(found)


def _not_joined_again(self: LinearGroup, state: dict[str, Any]) -> None:
    state = dict(state)
    linears = state.pop("linears")
    nn.Module.__setstate__(self, state)
    self._set_linears(linears)


MUTANTS = (
    _exchanged("gate and up exchanged", "a checkpoint's w1 and w3, or an engine's order of the two", GATE, UP),
    _exchanged("keys and values exchanged", "a packed QKV that is cut in another order", KEY, VALUE),
    _exchanged("queries and keys exchanged", "a packed QKV that is cut in another order", QUERY, KEY),
    Mutant(
        "parts read one row too far",
        "an offset off by one where a joined matmul is cut",
        _outputs_as(_one_row_further),
        LAYERS,
    ),
    Mutant(
        "bias of a part dropped",
        "a joined matmul that forgets that one of its linears has a bias",
        in_code(
            lambda case: any(found.bias is not None for found in groups_in(case)),
            lambda case: [wrapped(group, "joined_linear", _without_last_bias)],
        ),
        LAYERS,
    ),
    Mutant(
        "parts multiplied apart",
        "a group that never runs: right, and no faster than none",
        in_code(combines, lambda case: [(GroupRun, "take", lambda self, number, input: None)]),
        LAYERS,
    ),
    Mutant(
        "outputs remembered past the forward",
        "a cache keyed by the input alone, and never cleared",
        in_code(combines, lambda case: [(GroupRun, "take", _remembered)]),
        ("test_called_twice",),
    ),
    Mutant(
        "versions ignored",
        "an input, or a weight, that is changed in place between two calls",
        in_code(combines, lambda case: [wrapped(GroupRun, "take", _versions_ignored)]),
        ("test_edits_while_running",),
    ),
    Mutant(
        "a weight elsewhere in memory ignored",
        "`weight.data = ...`, or another parameter: what was the neighbor computes on",
        in_code(
            combines,
            lambda case: [
                wrapped(LinearGroup, "_put_side_by_side", _kept_at_join),
                wrapped(LinearGroup, "joinable_weights", _kept_weights),
            ],
        ),
        ("test_replaced_weights",),
    ),
    Mutant(
        "a part gets no gradient",
        "a detach, or a write in place, between the matmul and one of its users",
        _outputs_as(_last_part_detached),
        TRAINING,
    ),
    Mutant(
        "gradients of two parts exchanged",
        "the rows of one gradient handed out in another order",
        in_code(_alike, lambda case: [wrapped(matmul._JoinedLinear, "backward", _gradients_exchanged)]),
        TRAINING,
    ),
    Mutant(
        "zeros for a part that was not used",
        "a gradient that is zero where there is none: weight decay and momentum move what did not learn",
        in_code(combines, lambda case: [wrapped(matmul._JoinedLinear, "backward", _zeros_for_the_unused)]),
        ("test_unused_parts_get_no_gradient",),
    ),
    Mutant(
        "recomputed on another input",
        "state that is not there any more when activations are computed again",
        in_code(_is_checkpointed, lambda case: [wrapped(LinearGroup, "outputs_with", _otherwise_in_backward)]),
        ("test_activation_checkpointing",),
    ),
    Mutant(
        "copies run the original's group",
        "a reference to the original that a copy keeps",
        in_code(combines, lambda case: [(LinearGroup, "__deepcopy__", lambda self, memo: self)]),
        COPIES,
    ),
    Mutant(
        "copies are not joined again",
        "a copy, or an unpickled model, that is slower for ever",
        in_code(
            combines,
            lambda case: [
                (LinearGroup, "__setstate__", _not_joined_again),
                (CombinedProjections, "__setstate__", nn.Module.__setstate__),
            ],
        ),
        COPIES,
    ),
    Mutant(
        "neighbors share a storage",
        "slices of one storage, which accelerate, safetensors and transformers take for tied weights and drop",
        in_code(combines, lambda case: [(memory, "own_storage", lambda tensor: tensor)]),
        COPIES,
    ),
)
