"""Where an engine diverges from a reference: the first module whose input is right and whose output is not.

An engine's modules are not transformers': names have other prefixes, projections are packed, norms add the residual,
layers return two tensors of which the sum is the hidden state. So modules are matched by the end of their names,
packed projections with our model's groups, which have the names that engines give them, and a tensor is taken for
right if the engine has it in any of these forms. A module that seems wrong although what encloses it, or a later layer,
is right only has another form, and does not count. A tensor that is wrong may relate to the right one in a simple way:
scaled, its halves swapped, of the weights of before.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from nrl_models.common.projections import LinearGroup
from nrl_models.engines.base import LOGITS, ModuleCall
from nrl_models.logprobs.head import output_embedding

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""How far a tensor may be off, of its scale, and still be right, by the engine's dtype. Roundings add up."""


Relation = Literal["", "scaled", "not refitted"]
"""What a wrong tensor is, if a known quirk may be why: the right one times a number, or that of the old weights."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first module that diverges.

    Args:
        module: its name in the reference.
        class_name: its class in the engine.
        error: the largest difference of its output, of the output's scale (or as it is, if not `relative`).
        after: the last module before it that is right.
        between: whether already its input is wrong: what diverges lies between `after` and `module`, in code that is no
            module of its own (an embedding's scale, rotary embedding, attention).
        relative: whether the error is of the output's scale.
        relation: of its tensor to the right one.
        detail: a message that says so, and what else is known.
    """

    module: str
    class_name: str
    error: float
    after: str
    between: bool = False
    relative: bool = True
    relation: Relation = ""
    detail: str = ""

    def __str__(self) -> str:
        where = f"between {self.after} and {self.module}" if self.between else f"in {self.module} ({self.class_name})"
        scale, detail = " of its scale" if self.relative else "", f"; {self.detail}" if self.detail else ""
        return f"{where}, off by {self.error:.1e}{scale}{detail}"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A module's call in the reference and in the engine: how far off, of its scale; None if nothing is comparable."""

    name: str
    right: ModuleCall
    given: ModuleCall
    of_input: float | None
    of_output: float | None

    def divergence(self, error: float, after: str, *, between: bool) -> Divergence:
        return Divergence(self.name, self.given.class_name, error, after, between)


def first_divergence(
    engine: Mapping[str, ModuleCall], reference: Mapping[str, ModuleCall], dtype: torch.dtype
) -> Divergence | None:
    """The first module to finish, in the reference, that the engine computes differently; None if none does.

    Args:
        engine, reference: calls of their modules on the same tokens. The engine may have only the last tokens of them.
        dtype: the engine's.
    """
    tolerance = _tolerance(dtype)
    pairs = []
    for name, other in match_names(engine, reference).items():
        right, given = reference[name], engine[other]
        if right.outputs:
            of_input = relative_error(right.inputs[0], given.inputs) if right.inputs else None
            pairs.append(_Pair(name, right, given, of_input, relative_error(right.outputs[0], given.outputs)))
    is_right = [pair.of_output is not None and pair.of_output <= tolerance for pair in pairs]
    after = "the tokens"
    for index, pair in enumerate(pairs):
        if is_right[index]:
            after = pair.name
        elif pair.of_output is not None and not any(
            is_right[later] and _contains(pairs[later].name, pair.name) for later in range(index + 1, len(pairs))
        ):
            if pair.of_input is None or pair.of_input <= tolerance:
                return pair.divergence(pair.of_output, after, between=False)
            found = pair.divergence(pair.of_output, after, between=True)
            return _earlier(pairs[:index], tolerance) or found
    return None


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])


def _earlier(pairs: Sequence[_Pair], tolerance: float) -> Divergence | None:
    """Norms hide a wrong scale, which shows only where it is added to something: look for it in their inputs."""
    after = "the tokens"
    for pair in pairs:
        wrong = pair.of_input if pair.of_input is not None and pair.of_input > tolerance else None
        if wrong is not None and factor_of(pair.right.inputs[0], pair.given.inputs, tolerance) is not None:
            return pair.divergence(wrong, after, between=True)
        after = pair.name
    return None


def factor_of(right: torch.Tensor, given: Sequence[torch.Tensor], tolerance: float) -> float | None:
    """The number that `right` is multiplied by in one of the engine's tensors, if there is one other than 1."""
    for wanted, form in _fitting(right, given):
        factor = ((form * wanted).sum() / wanted.square().sum().clamp(min=1e-12)).item()
        if abs(factor - 1.0) > tolerance and _is_right(wanted * factor, [form], tolerance / 4):
            return factor
    return None


def _contains(later: str, name: str) -> bool:
    """Whether all that `name` computes has gone into `later`, which finished after it."""
    if later == LOGITS or name.startswith(f"{later}."):
        return True
    layer, of_later = _layer(name), _layer(later)
    return of_later is None or (layer is not None and of_later > layer)


def _layer(name: str) -> int | None:
    found = re.search(r"layers\.(\d+)", name)
    return int(found[1]) if found else None


def match_names(engine: Mapping[str, ModuleCall], reference: Mapping[str, ModuleCall]) -> dict[str, str]:
    """For each module of the reference the engine's of the same place, if there is just one."""
    ends: dict[str, list[str]] = defaultdict(list)
    for name in engine:
        ends[_end(name)].append(name)
    found = {name: [name] if name in engine else ends[_end(name)] for name in reference if name}
    return {name: names[0] for name, names in found.items() if len(names) == 1}


def _end(name: str) -> str:
    """The part of a module's name that engines agree on: from `layers.` on, or the last component."""
    place = name.rfind("layers.")
    return name[place:] if place >= 0 else name.rpartition(".")[2]


def relative_error(right: torch.Tensor, given: Sequence[torch.Tensor]) -> float | None:
    """How far what is given is from what is right, at best, of its scale; None if no shape fits."""
    errors = []
    for wanted, form in _fitting(right, given):
        difference = (form - wanted).abs().max().item()
        scale = max(right.abs().nan_to_num(posinf=0.0).max().item(), 1e-6)
        errors.append(math.inf if math.isnan(difference) else difference / scale)
    return min(errors, default=None)


def _is_right(right: torch.Tensor, given: Sequence[torch.Tensor], tolerance: float) -> bool:
    error = relative_error(right, given)
    return error is not None and error <= tolerance


def _fitting(right: torch.Tensor, given: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The forms of what is given that have the right size, each behind those of the right tokens it stands for."""
    if not right.ndim:
        return
    wanted = _by_token(right)
    for form in _forms(given):
        if form.shape[-1] == wanted.shape[-1] and len(form) <= len(wanted):
            yield wanted[-len(form) :], form


def _forms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What an engine's tensors can stand for, `(tokens, features)` in fp32: each, and the sum of the first two."""
    flat = [_by_token(one) for one in tensors if one.ndim]
    if len(flat) > 1 and flat[0].shape == flat[1].shape:
        flat.append(flat[0] + flat[1])
    return flat


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().reshape(-1, tensor.shape[-1]).cpu()


def relation(
    divergence: Divergence,
    engine: Mapping[str, ModuleCall],
    reference: Mapping[str, ModuleCall],
    previous: nn.Module | None,
    dtype: torch.dtype,
) -> tuple[Relation, str]:
    """How the engine's tensor relates to the right one where it diverges, and a message that says so.

    Args:
        divergence: where.
        engine, reference: calls of their modules.
        previous: the reference with the weights of before, if there were others.
        dtype: the engine's.
    """
    tolerance = _tolerance(dtype)
    wanted, other = reference[divergence.module], engine[match_names(engine, reference)[divergence.module]]
    right, given = (wanted.inputs, other.inputs) if divergence.between else (wanted.outputs, other.outputs)
    what = "its input" if divergence.between else "its output"
    half, odd = divmod(right[0].shape[-1], 2)
    if not odd and _is_right(right[0].roll(half, -1), given, tolerance):
        return "", f"{what} is the right one with its halves swapped"
    if _is_right(-right[0], given, tolerance):
        return "", f"{what} is the right one with its sign flipped"
    if (factor := factor_of(right[0], given, tolerance)) is not None:
        return "scaled", f"{what} is the right one times {factor:.6g}"
    if previous is not None and not divergence.between:
        before = _output_of(previous, divergence.module, wanted)
        if before is not None and _is_right(before, given, tolerance):
            return "not refitted", "its output is that of the weights of before: it was not refitted"
    if divergence.module == LOGITS:
        return "", _about_logits(reference, given, tolerance)
    elsewhere = "no module of its own computes what lies between: an embedding's scale, rotary embedding or attention"
    return "", elsewhere if divergence.between else ""


@torch.no_grad()
def _output_of(model: nn.Module, name: str, call: ModuleCall) -> torch.Tensor | None:
    """What a module of `model` makes of the input of `call`; None if it needs more than that."""
    module = output_embedding(model) if name == LOGITS else model.get_submodule(name)
    if len(call.inputs) != 1:
        return None
    try:
        output = module(call.inputs[0])
        if isinstance(module, LinearGroup):
            output = torch.cat(output, -1)
    except Exception:  # a module that takes other arguments too
        return None
    return output if isinstance(output, torch.Tensor) else None


def _about_logits(reference: Mapping[str, ModuleCall], given: tuple[torch.Tensor, ...], tolerance: float) -> str:
    """Whether the logits are those before what the model does behind its output embedding."""
    hidden_states = reference[LOGITS].inputs[0]
    for name, call in reference.items():
        reads_them = name != LOGITS and call.inputs and call.outputs and call.inputs[0] is hidden_states
        if reads_them and _is_right(call.outputs[0], given, tolerance):
            return f"they are those of {name}, without the scale or soft cap behind it"
    return "the hidden states before are right"
