"""Find the first module where an engine diverges from a reference: its input is right, and its output is not.

Modules of an engine differ from those of transformers: names have other prefixes, projections are packed, norms add the
residual, and layers return two tensors whose sum is the hidden state. So the comparison is tolerant:

- Modules are matched by the end of their names, and packed projections with fused groups of the same name.
- A tensor counts as right if the engine has it in any of these forms.
- A module with a wrong tensor does not count if its parent or a later layer is right: it only has another form.

A wrong tensor may relate to the expected one in a known pattern: scaled, halves swapped, or computed with stale
weights.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from nrl_models.common.projections import declared_groups
from nrl_models.engines.engine_types import LOGITS, ModuleCall
from nrl_models.logprobs.head import output_embedding
from nrl_models.parity.worst import last_if_nan
from nrl_models.quirks import Pattern

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Maximum error of a tensor, relative to its scale, by the engine's dtype. Rounding errors add up over layers."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first module that diverges.

    Args:
        module: Name of the module in the reference.
        class_name: Class of the module in the engine.
        error: Largest difference of its output, relative to the output's scale (absolute if not `relative`).
        after: The last module before it that is right.
        between: Whether its input is already wrong. The source is then code between `after` and `module` that is not in
            a module (an embedding's scale, rotary embedding, attention).
        relative: Whether the error is relative.
        pattern: Relation of its tensor to the expected one.
        weights: Names of its weights that differ from the reference's.
        detail: Further information, as text.
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


@dataclass(frozen=True, slots=True)
class ModulePair:
    """Difference between an engine's module and the reference's.

    Args:
        module: Name of the module in the reference.
        class_name: Class of the module in the engine.
        input_error: Error of its input, relative to the input's scale; None if nothing is comparable.
        output_error: Error of its output.
        scaled: Whether its input is the expected one times a factor other than 1.
    """

    module: str
    class_name: str
    input_error: float | None
    output_error: float | None
    scaled: bool = False


def module_pairs(
    engine: Mapping[str, ModuleCall], reference: Mapping[str, ModuleCall], dtype: torch.dtype
) -> list[ModulePair]:
    """Compare each module, in the order in which modules of the reference finish.

    Args:
        engine, reference: Calls of their modules on the same tokens. The engine may have only the last tokens.
        dtype: Dtype of the engine.
    """
    tolerance = _tolerance(dtype)
    pairs = []
    for name, engine_name in match_names(engine, reference).items():
        expected, actual = reference[name], engine[engine_name]
        if expected.outputs:
            error = relative_error(expected.inputs[0], actual.inputs) if expected.inputs else None
            scaled = error is not None and error > tolerance
            scaled = scaled and factor_of(expected.inputs[0], actual.inputs, tolerance) is not None
            output_error = relative_error(expected.outputs[0], actual.outputs)
            pairs.append(ModulePair(name, actual.class_name, error, output_error, scaled))
    return pairs


def first_of(pairs: Sequence[ModulePair], dtype: torch.dtype) -> Divergence | None:
    """Return the first module that the engine computes differently; None if there is none.

    Args:
        pairs: Result of `module_pairs`.
        dtype: Dtype of the engine.
    """
    tolerance = _tolerance(dtype)
    is_right = [pair.output_error is not None and pair.output_error <= tolerance for pair in pairs]
    after = "the tokens"
    for index, pair in enumerate(pairs):
        if is_right[index]:
            after = pair.module
        elif pair.output_error is not None and not any(
            is_right[later] and _contains(pairs[later].module, pair.module) for later in range(index + 1, len(pairs))
        ):
            divergence = Divergence(pair.module, pair.class_name, pair.output_error, after)
            if pair.input_error is None or pair.input_error <= tolerance:
                return divergence
            return _earlier(pairs[:index]) or replace(divergence, between=True)
    return None


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])


def _earlier(pairs: Sequence[ModulePair]) -> Divergence | None:
    """Find an earlier divergence in the inputs of norms. Norms hide a wrong scale of their input."""
    after = "the tokens"
    for pair in pairs:
        if pair.scaled and pair.input_error is not None:
            return Divergence(pair.module, pair.class_name, pair.input_error, after, between=True)
        after = pair.module
    return None


def factor_of(expected: torch.Tensor, actual: Sequence[torch.Tensor], tolerance: float) -> float | None:
    """Return the factor other than 1 between `expected` and one of the engine's tensors, if there is one."""
    for wanted, form in _comparable(expected, actual):
        factor = ((form * wanted).sum() / wanted.square().sum().clamp(min=1e-12)).item()
        if abs(factor - 1.0) > tolerance and _is_right(wanted * factor, [form], tolerance / 4):
            return factor
    return None


def _contains(later: str, name: str) -> bool:
    """Return True if all results of `name` are inputs of `later`, which finished after it."""
    if later == LOGITS or name.startswith(f"{later}."):
        return True
    layer, later_layer = _layer(name), _layer(later)
    return later_layer is None or (layer is not None and later_layer > layer)


def _layer(name: str) -> int | None:
    match = re.search(r"layers\.(\d+)", name)
    return int(match[1]) if match else None


def match_names(engine: Mapping[str, ModuleCall], reference: Mapping[str, ModuleCall]) -> dict[str, str]:
    """Map each module of the reference to the engine's corresponding module, if exactly one matches."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for name in engine:
        suffixes[_suffix(name)].append(name)
    candidates = {name: [name] if name in engine else suffixes[_suffix(name)] for name in reference if name}
    return {name: names[0] for name, names in candidates.items() if len(names) == 1}


def _suffix(name: str) -> str:
    """Return the part of a module's name that engines agree on: from `layers.` on, or else the last component."""
    start = name.rfind("layers.")
    return name[start:] if start >= 0 else name.rpartition(".")[2]


def relative_error(expected: torch.Tensor, actual: Sequence[torch.Tensor]) -> float | None:
    """Return the smallest error among the possible forms of `actual`, relative to the scale; None if no shape fits."""
    errors = []
    for wanted, form in _comparable(expected, actual):
        difference = (form - wanted).abs().max().item()
        scale = max(expected.abs().nan_to_num(posinf=0.0).max().item(), 1e-6)
        errors.append(last_if_nan(difference / scale))
    return min(errors, default=None)


def _is_right(expected: torch.Tensor, actual: Sequence[torch.Tensor], tolerance: float) -> bool:
    error = relative_error(expected, actual)
    return error is not None and error <= tolerance


def _comparable(expected: torch.Tensor, actual: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of expected values and possible forms of an engine's tensors, `(tokens, features)` in fp32.

    The forms are each tensor, and the sum of the first two. The engine may have only the last tokens.
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
    output_before: Callable[[str, ModuleCall], torch.Tensor | None],
    dtype: torch.dtype,
) -> Divergence:
    """Add the pattern to a divergence: the relation of the engine's tensor to the expected one.

    Args:
        divergence: Result of `first_of`.
        engine, reference: Calls of their modules.
        output_before: Computes the output of a module with the weights from before the last refit, from the input of
            its call; None if there are no such weights.
        dtype: Dtype of the engine.
    """
    tolerance, name = _tolerance(dtype), divergence.module
    wanted, engine_call = reference[name], engine[match_names(engine, reference)[name]]
    direction = "input" if divergence.between else "output"
    expected, actual = (
        (wanted.inputs, engine_call.inputs) if divergence.between else (wanted.outputs, engine_call.outputs)
    )

    def known(pattern: Pattern, detail: str) -> Divergence:
        return replace(divergence, pattern=pattern, detail=detail)

    half, remainder = divmod(expected[0].shape[-1], 2)
    if not remainder and _is_right(expected[0].roll(half, -1), actual, tolerance):
        return known(Pattern.HALVES_SWAPPED, f"its {direction} is the expected one with its halves swapped")
    if _is_right(-expected[0], actual, tolerance):
        return known(Pattern.SIGN_FLIPPED, f"its {direction} is the expected one with its sign flipped")
    if (factor := factor_of(expected[0], actual, tolerance)) is not None:
        return known(Pattern.SCALED, f"its {direction} is the expected one times {factor:.6g}")
    if divergence.between:
        detail = "no module computes what lies between: an embedding's scale, rotary embedding or attention"
        return replace(divergence, detail=detail)
    before = output_before(name, wanted)
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
def module_output(model: nn.Module, name: str, call: ModuleCall) -> torch.Tensor | None:
    """Compute the output of a module of `model` from the input of `call`; None if it needs further arguments."""
    if len(call.inputs) != 1:
        return None
    groups = {f"{owner}.{group}": (owner, linears) for owner, group, linears in declared_groups(model)}
    try:
        if name in groups:
            owner, linears = groups[name]
            outputs = [model.get_submodule(f"{owner}.{linear}")(call.inputs[0]) for linear in linears]
            return torch.cat(outputs, -1)
        module = output_embedding(model) if name == LOGITS else model.get_submodule(name)
        output = module(call.inputs[0])
    except Exception:  # a module with further arguments
        return None
    return output if isinstance(output, torch.Tensor) else None
