"""Where an engine diverges from a reference: the first module whose input is right and whose output is not.

An engine's modules are not transformers': names have other prefixes, projections are packed, norms add the residual,
layers return two tensors of which the sum is the hidden state. So modules are matched by the end of their names,
packed projections with our model's groups, which have the names that engines give them, and a tensor counts as right if
the engine has it in any of these forms. A module that seems wrong although what encloses it, or a later layer, is right
only has another form, and does not count. A wrong tensor may relate to the expected one in a known pattern: scaled, its
halves swapped, computed with stale weights.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from nrl_models.common.projections import LinearGroup
from nrl_models.engines.engine_types import LOGITS, ModuleCall
from nrl_models.logprobs.head import output_embedding
from nrl_models.quirks import Pattern

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""How far a tensor may be off, relative to its scale, by the engine's dtype. Rounding errors add up over layers."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first module that diverges.

    Args:
        module: its name in the reference.
        class_name: its class in the engine.
        error: the largest difference of its output, relative to the output's scale (absolute, if not `relative`).
        after: the last module before it that is right.
        between: whether its input is wrong already: what diverges lies between `after` and `module`, in code that is no
            module of its own (an embedding's scale, rotary embedding, attention).
        relative: whether the error is relative.
        pattern: how its tensor relates to the expected one.
        weights: names of its weights that differ from the reference's.
        detail: what else is known, as text.
    """

    module: str
    class_name: str
    error: float
    after: str = ""
    between: bool = False
    relative: bool = True
    pattern: Pattern = Pattern.UNKNOWN
    weights: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        where = f"between {self.after} and {self.module}" if self.between else f"in {self.module} ({self.class_name})"
        scale, detail = " of its scale" if self.relative else "", f"; {self.detail}" if self.detail else ""
        return f"{where}, off by {self.error:.1e}{scale}{detail}"


class _Pair(NamedTuple):
    """A module's call in the reference and in the engine, with relative errors; None if nothing is comparable."""

    name: str
    expected: ModuleCall
    actual: ModuleCall
    input_error: float | None
    output_error: float | None


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
    for name, engine_name in match_names(engine, reference).items():
        expected, actual = reference[name], engine[engine_name]
        if expected.outputs:
            input_error = relative_error(expected.inputs[0], actual.inputs) if expected.inputs else None
            output_error = relative_error(expected.outputs[0], actual.outputs)
            pairs.append(_Pair(name, expected, actual, input_error, output_error))
    is_right = [pair.output_error is not None and pair.output_error <= tolerance for pair in pairs]
    after = "the tokens"
    for index, pair in enumerate(pairs):
        if is_right[index]:
            after = pair.name
        elif pair.output_error is not None and not any(
            is_right[later] and _contains(pairs[later].name, pair.name) for later in range(index + 1, len(pairs))
        ):
            found = Divergence(pair.name, pair.actual.class_name, pair.output_error, after)
            if pair.input_error is None or pair.input_error <= tolerance:
                return found
            return _earlier(pairs[:index], tolerance) or replace(found, between=True)
    return None


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])


def _earlier(pairs: Sequence[_Pair], tolerance: float) -> Divergence | None:
    """Norms hide a wrong scale, which shows only where it is added to something: look for it in their inputs."""
    after = "the tokens"
    for pair in pairs:
        error = pair.input_error or 0.0
        if error > tolerance and factor_of(pair.expected.inputs[0], pair.actual.inputs, tolerance) is not None:
            return Divergence(pair.name, pair.actual.class_name, error, after, between=True)
        after = pair.name
    return None


def factor_of(expected: torch.Tensor, actual: Sequence[torch.Tensor], tolerance: float) -> float | None:
    """The number that `expected` is multiplied by in one of the engine's tensors, if there is one other than 1."""
    for wanted, form in _comparable(expected, actual):
        factor = ((form * wanted).sum() / wanted.square().sum().clamp(min=1e-12)).item()
        if abs(factor - 1.0) > tolerance and _is_right(wanted * factor, [form], tolerance / 4):
            return factor
    return None


def _contains(later: str, name: str) -> bool:
    """Whether all that `name` computes has gone into `later`, which finished after it."""
    if later == LOGITS or name.startswith(f"{later}."):
        return True
    layer, later_layer = _layer(name), _layer(later)
    return later_layer is None or (layer is not None and later_layer > layer)


def _layer(name: str) -> int | None:
    found = re.search(r"layers\.(\d+)", name)
    return int(found[1]) if found else None


def match_names(engine: Mapping[str, ModuleCall], reference: Mapping[str, ModuleCall]) -> dict[str, str]:
    """For each module of the reference the engine's module of the same place, if exactly one matches."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for name in engine:
        suffixes[_suffix(name)].append(name)
    found = {name: [name] if name in engine else suffixes[_suffix(name)] for name in reference if name}
    return {name: names[0] for name, names in found.items() if len(names) == 1}


def _suffix(name: str) -> str:
    """The end of a module's name that engines agree on: from `layers.` on, or the last component."""
    place = name.rfind("layers.")
    return name[place:] if place >= 0 else name.rpartition(".")[2]


def relative_error(expected: torch.Tensor, actual: Sequence[torch.Tensor]) -> float | None:
    """The smallest error of the forms that `actual` may have, relative to the scale; None if no shape fits."""
    errors = []
    for wanted, form in _comparable(expected, actual):
        difference = (form - wanted).abs().max().item()
        scale = max(expected.abs().nan_to_num(posinf=0.0).max().item(), 1e-6)
        errors.append(math.inf if math.isnan(difference) else difference / scale)
    return min(errors, default=None)


def _is_right(expected: torch.Tensor, actual: Sequence[torch.Tensor], tolerance: float) -> bool:
    error = relative_error(expected, actual)
    return error is not None and error <= tolerance


def _comparable(expected: torch.Tensor, actual: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The expected values and what an engine's tensors can stand for, `(tokens, features)` in fp32.

    That is each of them, and the sum of the first two. The engine may have the last tokens alone.
    """
    if not expected.ndim:
        return
    wanted = _by_token(expected)
    forms = [_by_token(tensor) for tensor in actual if tensor.ndim]
    if len(forms) > 1 and forms[0].shape == forms[1].shape:
        forms.append(forms[0] + forms[1])
    for form in forms:
        if form.shape[-1] == wanted.shape[-1] and len(form) <= len(wanted):
            yield wanted[-len(form) :], form


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().reshape(-1, tensor.shape[-1]).cpu()


def classify(
    divergence: Divergence,
    engine: Mapping[str, ModuleCall],
    reference: Mapping[str, ModuleCall],
    previous: nn.Module | None,
    dtype: torch.dtype,
) -> Divergence:
    """The divergence with its pattern: how the engine's tensor relates to the expected one.

    Args:
        divergence: what `first_divergence` found.
        engine, reference: calls of their modules.
        previous: the reference with the weights of before the last refit, if there were others.
        dtype: the engine's.
    """
    tolerance, name = _tolerance(dtype), divergence.module
    wanted, given = reference[name], engine[match_names(engine, reference)[name]]
    what = "input" if divergence.between else "output"
    expected, actual = (wanted.inputs, given.inputs) if divergence.between else (wanted.outputs, given.outputs)

    def known(pattern: Pattern, detail: str) -> Divergence:
        return replace(divergence, pattern=pattern, detail=detail)

    half, remainder = divmod(expected[0].shape[-1], 2)
    if not remainder and _is_right(expected[0].roll(half, -1), actual, tolerance):
        return known(Pattern.HALVES_SWAPPED, f"its {what} is the expected one with its halves swapped")
    if _is_right(-expected[0], actual, tolerance):
        return known(Pattern.SIGN_FLIPPED, f"its {what} is the expected one with its sign flipped")
    if (factor := factor_of(expected[0], actual, tolerance)) is not None:
        return known(Pattern.SCALED, f"its {what} is the expected one times {factor:.6g}")
    if divergence.between:
        detail = "no module computes what lies between: an embedding's scale, rotary embedding or attention"
        return replace(divergence, detail=detail)
    before = None if previous is None else _output_of(previous, name, wanted)
    if before is not None and _is_right(before, actual, tolerance):
        return known(Pattern.STALE_WEIGHTS, "its output is that of the previous weights: it was not refitted")
    if name != LOGITS:
        return divergence
    for other, call in reference.items():
        reads_the_same = other != LOGITS and call.inputs and call.outputs and call.inputs[0] is wanted.inputs[0]
        if reads_the_same and _is_right(call.outputs[0], actual, tolerance):
            return known(Pattern.UNFINISHED_LOGITS, f"it is the output of {other}, without the scale or soft cap")
    return replace(divergence, detail="the last hidden states are right")


@torch.no_grad()
def _output_of(model: nn.Module, name: str, call: ModuleCall) -> torch.Tensor | None:
    """What a module of `model` computes from the input of `call`; None if it needs more than that."""
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
