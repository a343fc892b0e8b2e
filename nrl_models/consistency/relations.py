"""How a wrong tensor of an engine relates to the right one: scaled, its halves swapped, of the weights of before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from nrl_models.common.projections import LinearGroup
from nrl_models.consistency.parting import TOLERANCE, Parting, departure, factor_of, match_names
from nrl_models.engines.base import LOGITS, ModuleCall
from nrl_models.logprobs.head import output_embedding


def relation(
    parting: Parting,
    engine: Mapping[str, ModuleCall],
    reference: Mapping[str, ModuleCall],
    previous: nn.Module | None,
    dtype: torch.dtype,
) -> str:
    """What the engine has where it parts, in words; empty if nothing simple.

    Args:
        parting: where.
        engine, reference: calls of their modules.
        previous: the reference with the weights of before, if there were others.
        dtype: the engine's.
    """
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    wanted, other = reference[parting.module], engine[match_names(engine, reference)[parting.module]]
    right, given = (wanted.inputs, other.inputs) if parting.between else (wanted.outputs, other.outputs)
    what = "its input" if parting.between else "its output"
    for words, candidate in _candidates(right[0]):
        if (error := departure([candidate], given)) is not None and error <= tolerance:
            return f"{what} is the right one with {words}"
    if (factor := factor_of(right[0], given, tolerance)) is not None:
        return f"{what} is the right one times {factor:.6g}"
    if previous is not None and not parting.between:
        before = _output_of(previous, parting.module, wanted)
        if before is not None and (departure([before], given) or 0.0) <= tolerance:
            return "its output is that of the weights of before: it was not refitted"
    if parting.module == LOGITS:
        return _about_logits(reference, given, tolerance)
    if parting.between:
        return "no module of its own computes what lies between: an embedding's scale, rotary embedding or attention"
    return ""


@torch.no_grad()
def _output_of(model: nn.Module, name: str, call: ModuleCall) -> torch.Tensor | None:
    """What a module of `model` makes of the input of `call`; None if it needs more than that."""
    head = output_embedding(model)
    module = head if name == LOGITS else model.get_submodule(name)
    if len(call.inputs) != 1:
        return None
    try:
        output = module(call.inputs[0])
        if isinstance(module, LinearGroup):
            output = torch.cat(output, -1)
    except Exception:  # a module that takes other arguments too
        return None
    return output if isinstance(output, torch.Tensor) else None


def _candidates(right: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    size = right.shape[-1]
    if size % 2 == 0:
        yield "its halves swapped", right.roll(size // 2, -1)
    yield "its sign flipped", -right


def _about_logits(reference: Mapping[str, ModuleCall], given: tuple[torch.Tensor, ...], tolerance: float) -> str:
    """Whether the logits are those before what the model does behind its output embedding."""
    for name, call in reference.items():
        if name != LOGITS and call.inputs and call.outputs and call.inputs[0] is reference[LOGITS].inputs[0]:
            error = departure(call.outputs, given)
            if error is not None and error <= tolerance:
                return f"they are those of {name}, without the scale or soft cap behind it"
    return "the hidden states before are right"
