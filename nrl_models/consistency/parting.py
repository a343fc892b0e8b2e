"""Where an engine parts from a reference: the first module whose input is right and whose output is not.

An engine's modules are not transformers': names have other prefixes, projections are packed, norms add the residual,
layers return two tensors of which the sum is the hidden state. So modules are matched by the end of their names,
packed projections with our model's groups, which have the names that engines give them, and a tensor is taken for
right if the engine has it in any of these forms. A module that seems wrong although what encloses it, or a later layer,
is right only has another form, and does not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nrl_models.engines.base import LOGITS, ModuleCall

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""How far a tensor may be off, of its scale, and still be right, by the engine's dtype. Roundings add up."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first module that parts.

    Args:
        module: its name in the reference.
        class_name: its class in the engine.
        error: the largest difference of its output, of the output's scale (or as it is, if not `relative`).
        after: the last module before it that is right.
        between: whether already its input is wrong: what parts lies between `after` and `module`, in code that is no
            module of its own (an embedding's scale, rotary embedding, attention).
    """

    module: str
    class_name: str
    error: float
    after: str
    between: bool = False
    relative: bool = True

    def __str__(self) -> str:
        where = f"between {self.after} and {self.module}" if self.between else f"in {self.module} ({self.class_name})"
        return f"{where}, off by {self.error:.1e}" + (" of its scale" if self.relative else "")


@dataclass(frozen=True, slots=True)
class _Held:
    """One module held against its counterpart: how far off, of its scale; None where nothing can be compared."""

    name: str
    class_name: str
    of_input: float | None
    of_output: float | None


def first_parting(
    engine: Mapping[str, ModuleCall], reference: Mapping[str, ModuleCall], dtype: torch.dtype
) -> Parting | None:
    """The first module to finish, in the reference, that the engine computes differently; None if none does.

    Args:
        engine, reference: calls of their modules on the same tokens. The engine may have only the last tokens of them.
        dtype: the engine's.
    """
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    names = match_names(engine, reference)
    held = []
    for name, call in reference.items():
        other = engine[names[name]] if name in names else None
        if other is not None and call.outputs:
            of_input = departure(call.inputs, other.inputs) if call.inputs else None
            held.append(_Held(name, other.class_name, of_input, departure(call.outputs, other.outputs)))
    right = [one.of_output is not None and one.of_output <= tolerance for one in held]
    after = "the tokens"
    for index, one in enumerate(held):
        if right[index]:
            after = one.name
        elif one.of_output is not None and not any(
            right[later] and _contains(held[later].name, one.name) for later in range(index + 1, len(held))
        ):
            if one.of_input is None or one.of_input <= tolerance:
                return Parting(one.name, one.class_name, one.of_output, after)
            found = Parting(one.name, one.class_name, one.of_output, after, between=True)
            return _earlier(held[:index], engine, reference, names, tolerance) or found
    return None


def _earlier(
    held: Sequence[_Held],
    engine: Mapping[str, ModuleCall],
    reference: Mapping[str, ModuleCall],
    names: Mapping[str, str],
    tolerance: float,
) -> Parting | None:
    """Norms hide a wrong scale, which shows only where it is added to something: look for it in their inputs."""
    after = "the tokens"
    for one in held:
        if one.of_input is not None and one.of_input > tolerance:
            factor = factor_of(reference[one.name].inputs[0], engine[names[one.name]].inputs, tolerance)
            if factor is not None:
                return Parting(one.name, one.class_name, one.of_input, after, between=True)
        after = one.name
    return None


def factor_of(right: torch.Tensor, given: Sequence[torch.Tensor], tolerance: float) -> float | None:
    """The number that `right` is multiplied by in one of the engine's tensors, if there is one other than 1."""
    flat = right.float().reshape(-1, right.shape[-1]).cpu()
    for form in forms(given):
        if form.shape[-1] != flat.shape[-1] or form.shape[0] > flat.shape[0]:
            continue
        wanted = flat[-form.shape[0] :]
        factor = ((form * wanted).sum() / wanted.square().sum().clamp(min=1e-12)).item()
        left = departure([wanted * factor], [form])
        if abs(factor - 1.0) > tolerance and left is not None and left <= tolerance / 4:
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
    ends: dict[str, list[str]] = {}
    for name in engine:
        ends.setdefault(_end(name), []).append(name)
    result = {}
    for name in reference:
        found = [name] if name in engine else ends.get(_end(name), [])
        if name and len(found) == 1:
            result[name] = found[0]
    return result


def _end(name: str) -> str:
    """The part of a module's name that engines agree on: from `layers.` on, or the last component."""
    place = name.rfind("layers.")
    return name[place:] if place >= 0 else name.rpartition(".")[2]


def departure(reference: Sequence[torch.Tensor], engine: Sequence[torch.Tensor]) -> float | None:
    """How far the engine's tensors are from the reference's first, at best, of its scale; None if no shape fits."""
    wanted = reference[0].float().reshape(-1, reference[0].shape[-1]).cpu() if reference[0].ndim else None
    if wanted is None:
        return None
    scale = max(wanted.abs().nan_to_num(posinf=0.0).max().item(), 1e-6)
    best: float | None = None
    for form in forms(engine):
        if form.shape[-1] != wanted.shape[-1] or form.shape[0] > wanted.shape[0]:
            continue
        difference = (form - wanted[-form.shape[0] :]).abs().max().item() / scale
        difference = math.inf if math.isnan(difference) else difference
        best = difference if best is None else min(best, difference)
    return best


def forms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What an engine's tensors can stand for, `(tokens, features)` in fp32: each, and the sum of the first two."""
    flat = [one.float().reshape(-1, one.shape[-1]).cpu() for one in tensors if one.ndim]
    if len(flat) > 1 and flat[0].shape == flat[1].shape:
        flat.append(flat[0] + flat[1])
    return flat
