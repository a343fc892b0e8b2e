"""Finds where two models diverge: the first module with a wrong output, confirmed by substituting the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.recording import RecordedCall, record_calls
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import Inputs
from nrl_models.parity.compare import compare_tensors
from nrl_models.parity.noise import TOLERANCE, limit, logits_noise, logits_of


@dataclass(frozen=True, slots=True)
class Culprit:
    """A module whose output differs although its inputs agree.

    Args:
        module: its name.
        class_name: its class.
        max_diff: the largest difference of its output.
        confirmed: whether the models' logits agree once the reference's output is substituted for its own (and for the
            earlier culprits').
        weights: names of its own weights that differ from the reference's; empty if it computes differently.
    """

    module: str
    class_name: str
    max_diff: float
    confirmed: bool
    weights: tuple[str, ...]

    @property
    def cause(self) -> str:
        """Whether its weights differ or its computation, as text."""
        return f"its weights differ: {', '.join(self.weights)}" if self.weights else "same weights, other computation"

    def __str__(self) -> str:
        confirmed = "confirmed by substitution" if self.confirmed else "more follow"
        return f"{self.module} ({self.class_name}): output off by {self.max_diff:.1e}; {self.cause}; {confirmed}"


def localise(model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, max_culprits: int = 8) -> list[Culprit]:
    """The modules that make `model` differ from `reference`, first to last; empty if it does not.

    Both are run with hooks on every module they share. At fault is the first module to finish (so the innermost) whose
    inputs agree and whose output does not. The reference's output is substituted for its output, and the search
    continues until the logits agree.

    Args:
        model: the model under test.
        reference: the Hugging Face model, of the same dtype.
        inputs: what to call both with. Every module's output is kept, so use short sequences.
        max_culprits: how many to look for.
    """
    modules = dict(model.named_modules())
    names = {
        name
        for name, module in reference.named_modules()
        if name in modules and (type(module) is not nn.Linear or isinstance(modules[name], nn.Linear))
    }
    expected = _record(reference, names, inputs)
    logits = logits_of(reference, inputs)
    dtype = next(reference.parameters()).dtype
    allowed = limit(logits_noise(reference, inputs), dtype)
    converted = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")
    weights = [name for name, weight in reference.state_dict().items() if not torch.equal(weight, converted[name])]
    substituted: dict[str, Any] = {}
    culprits: list[Culprit] = []
    for _ in range(max_culprits):
        with _substituting(model, substituted):
            actual = _record(model, names - substituted.keys(), inputs)
        found = _first_divergence(expected, actual, TOLERANCE[dtype])
        if found is None:
            break
        name, difference = found
        substituted[name] = expected[name].output
        with _substituting(model, substituted):
            agrees = compare_tensors(logits, logits_of(model, inputs), verbose=False).max_diff <= allowed
        own = tuple(weight for weight in weights if weight.startswith(f"{name}."))
        culprits.append(Culprit(name, type(model.get_submodule(name)).__name__, difference, agrees, own))
        if agrees:
            break
    return culprits


def _record(model: nn.Module, names: set[str], inputs: Inputs) -> dict[str, RecordedCall]:
    """Every module's last call in one forward, by name, in the order in which modules finish."""
    with record_calls(model, names) as calls:
        logits_of(model, inputs)
    return calls


@contextmanager
def _substituting(model: nn.Module, outputs: dict[str, Any]) -> Iterator[None]:
    """While open, these modules of `model` return these outputs."""
    with ExitStack() as stack:
        for name, output in outputs.items():
            hook = model.get_submodule(name).register_forward_hook(lambda *_, output=output: output)
            stack.callback(hook.remove)
        yield


def _first_divergence(
    expected: dict[str, RecordedCall], actual: dict[str, RecordedCall], tolerance: float
) -> tuple[str, float] | None:
    """The first module to finish whose inputs agree and whose output does not, and by how much."""
    for name, call in expected.items():
        if name in actual:
            difference = _divergence(call.outputs, actual[name].outputs, tolerance)
            if difference and not _divergence(call.inputs, actual[name].inputs, tolerance):
                return name, difference
    return None


def _divergence(expected: list[torch.Tensor], actual: list[torch.Tensor], tolerance: float) -> float:
    """The largest difference if it is more than `tolerance` of the tensors' scale, else zero."""
    worst = 0.0
    for first, second in zip(expected, actual, strict=False):
        if first.shape != second.shape:
            return float("inf")
        finite = first.float().abs().nan_to_num(nan=0.0, posinf=0.0)
        scale = max(1.0, finite.max().item()) if first.numel() else 1.0
        difference = compare_tensors(first, second, verbose=False).max_diff
        if difference > tolerance * scale:
            worst = max(worst, difference)
    return worst
