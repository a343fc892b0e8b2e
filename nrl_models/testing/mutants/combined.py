"""Bugs in combined projections: which rows are whose, when the matmul runs, what training and copies make of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from nrl_models.common.combined import CombinedLinear, CombinedProjections, PartTensor, ProjectionPart
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mutants.mutant import Mutant
from nrl_models.testing.mutants.planting import InCode

LAYERS = ("test_attention_equivalence", "test_mlp_equivalence", "test_layer_equivalence", "test_logits_equivalence")
TRAINING = ("test_gradient_equivalence", "test_training_loss_decreases")

QUERY, KEY, VALUE = ("q_proj", "query", "q"), ("k_proj", "key", "k"), ("v_proj", "value", "v")
GATE, UP = ("gate_proj", "w1"), ("up_proj", "w3")
"""What linears are called that do one thing."""

split, forward = CombinedLinear.split, CombinedLinear.forward


def combined_linears(case: FamilyCase) -> Iterator[CombinedLinear]:
    """The model's combined projections."""
    return (module for module in case.model().modules() if isinstance(module, CombinedLinear))


def combines(case: FamilyCase) -> bool:
    """Whether anything is combined."""
    return any(True for _ in combined_linears(case))


def _pair_of(combined: CombinedLinear, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[int, int] | None:
    """The numbers of two parts of equal size, by what they are called."""
    names = list(combined.rows)
    pair = [next((at for at, name in enumerate(names) if name in wanted), None) for wanted in (first, second)]
    if None in pair or len({combined.rows[names[at]][1] for at in pair}) > 1:
        return None
    return pair[0], pair[1]


def _exchanged(name: str, stands_for: str, first: tuple[str, ...], second: tuple[str, ...]) -> Mutant:
    def wrong_split(self: CombinedLinear, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = list(split(self, output))
        if pair := _pair_of(self, first, second):
            one, other = pair
            parts[one], parts[other] = parts[other], parts[one]
        return tuple(parts)

    def where(case: FamilyCase) -> bool:
        return any(_pair_of(one, first, second) for one in combined_linears(case))

    return Mutant(name, stands_for, _split_as(wrong_split, where), LAYERS)


def _split_as(wrong: Callable[..., Any], where: Callable[[FamilyCase], bool] = combines) -> InCode:
    return InCode(where, lambda case: [(CombinedLinear, "split", wrong)])


def _one_row_further(self: CombinedLinear, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, *rest = split(self, output)
    return first, *split(self, output.roll(-1, -1))[1 : len(rest) + 1]


def _last_part_detached(self: CombinedLinear, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    *others, last = split(self, output)
    return *others, last.detach()


def _without_last_bias(self: CombinedLinear, x: torch.Tensor) -> torch.Tensor:
    if self.bias is None:
        return forward(self, x)
    start, _ = list(self.rows.values())[-1]
    kept = torch.arange(len(self.bias), device=x.device) < start
    return F.linear(x, self.weight, self.bias * kept)


def _apart(self: CombinedProjections, outputs: Any, combined: str, part: str, input: torch.Tensor) -> torch.Tensor:
    module = self._modules[combined]
    return dict(zip(module.rows, module.split(module(input)), strict=True))[part]


def _remembered(self: CombinedProjections, outputs: Any, combined: str, part: str, input: torch.Tensor) -> torch.Tensor:
    kept = self.__dict__.setdefault("_remembered", {})
    if kept.get((combined, "shape")) != input.shape:
        kept[combined, "shape"] = input.shape
        module = self._modules[combined]
        kept[combined] = dict(zip(module.rows, module.split(module(input)), strict=True))
    return kept[combined][part]


def _otherwise_in_backward(self: CombinedLinear, x: torch.Tensor) -> torch.Tensor:
    return forward(self, x.roll(1, -2) if torch._C._current_graph_task_id() != -1 else x)


def _is_checkpointed(case: FamilyCase) -> bool:
    model = case.model()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return model.supports_gradient_checkpointing and any(
        isinstance(module, CombinedLinear) for layer in layers for module in layer.modules()
    )


def _unwritten_data() -> property:
    return property(PartTensor.data.fget, lambda self, value: None)


def _shifted_data() -> property:
    def write(self: PartTensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value.roll(1, 0))

    return property(PartTensor.data.fget, write)


def _owned_by_the_original(self: ProjectionPart, memo: dict[int, Any]) -> nn.Linear:
    copied = ProjectionPart.__new__(ProjectionPart)
    memo[id(self)] = copied
    kept = {"_owner": self._owner}
    copied.__dict__.update({name: kept.get(name) or copy.deepcopy(one, memo) for name, one in self.__dict__.items()})
    return copied


MUTANTS = (
    _exchanged("gate and up exchanged", "a checkpoint's w1 and w3, or an engine's order of the two", GATE, UP),
    _exchanged("keys and values exchanged", "a packed QKV that is cut in another order", KEY, VALUE),
    _exchanged("queries and keys exchanged", "a packed QKV that is cut in another order", QUERY, KEY),
    Mutant(
        "parts read one row too far",
        "an offset off by one where a combined weight is cut",
        _split_as(_one_row_further),
        LAYERS,
    ),
    Mutant(
        "bias of a part dropped",
        "a combined projection that forgets that one of its linears has a bias",
        InCode(
            lambda case: any(one.bias is not None for one in combined_linears(case)),
            lambda case: [(CombinedLinear, "forward", _without_last_bias)],
        ),
        LAYERS,
    ),
    Mutant(
        "parts multiplied apart",
        "a combination that computes all of itself for each part: right, and slower than none",
        InCode(combines, lambda case: [(CombinedProjections, "_take_output", _apart)]),
        LAYERS,
    ),
    Mutant(
        "outputs remembered past the forward",
        "a cache of the combined matmul that is not emptied",
        InCode(combines, lambda case: [(CombinedProjections, "_take_output", _remembered)]),
        LAYERS,
    ),
    Mutant(
        "a part gets no gradient",
        "a detach, or a write in place, between the matmul and one of its users",
        _split_as(_last_part_detached),
        TRAINING,
    ),
    Mutant(
        "recomputed on another input",
        "state that is not there any more when activations are computed again",
        InCode(_is_checkpointed, lambda case: [(CombinedLinear, "forward", _otherwise_in_backward)]),
        ("test_activation_checkpointing",),
    ),
    Mutant(
        "merged adapters lost",
        "PEFT's `weight.data = ...` on a view that is thrown away",
        InCode(combines, lambda case: [(PartTensor, "data", _unwritten_data())]),
        ("test_lora",),
    ),
    Mutant(
        "adapters merged into other rows",
        "LoRA of one linear applied to another's rows",
        InCode(combines, lambda case: [(PartTensor, "data", _shifted_data())]),
        ("test_lora",),
    ),
    Mutant(
        "copies share the original's weights",
        "a reference to the owner that a copy keeps",
        InCode(combines, lambda case: [(ProjectionPart, "__deepcopy__", _owned_by_the_original)]),
        ("test_copies_keep_one_storage", "test_tied_weights_share_storage"),
    ),
)
