"""Find where two models diverge: the first module with a wrong output, confirmed by substituting the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.recording import RecordedCall, record_calls
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import Inputs
from nrl_models.parity.compare import compare_tensors
from nrl_models.parity.noise import TOLERANCE, limit, logits_noise, logits_of
from nrl_models.parity.worst import worst_of


@dataclass(frozen=True, slots=True)
class Culprit:
    """A module whose output differs although its inputs agree.

    Args:
        module: Name of the module.
        class_name: Class of the module.
        max_diff: Largest difference of its output.
        confirmed: Whether the models' logits agree after replacing its output (and those of earlier culprits) with the
            reference's.
        weights: Names of its weights that differ from the reference's. Empty if the computation differs.
    """

    module: str
    class_name: str
    max_diff: float
    confirmed: bool
    weights: tuple[str, ...]

    @property
    def cause(self) -> str:
        """Whether the weights or the computation differ, as text."""
        if self.weights:
            return f"its weights differ: {', '.join(self.weights)}"
        return "same weights, different computation"

    def __str__(self) -> str:
        confirmed = "confirmed by substitution" if self.confirmed else "further modules differ"
        return f"{self.module} ({self.class_name}): output off by {self.max_diff:.1e}; {self.cause}; {confirmed}"


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """How far a module of two models differs.

    Args:
        module: Name of the module.
        class_name: Class of the module in the model under test.
        inputs: Largest difference of its inputs; 0 if they agree.
        output: Largest difference of its output; 0 if it agrees.
    """

    module: str
    class_name: str
    inputs: float
    output: float

    @property
    def is_culprit(self) -> bool:
        """Whether its output differs although its inputs agree."""
        return self.output > 0.0 and self.inputs == 0.0


class Recorded(Protocol):
    """Recorded call of a module."""

    @property
    def inputs(self) -> Sequence[torch.Tensor]:
        """Floating-point tensors in its arguments."""

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Floating-point tensors in its result."""


@dataclass(frozen=True, slots=True)
class SearchRound:
    """One forward of the model under test, with the outputs of earlier culprits replaced.

    Args:
        differences: Modules in the order in which they finish, up to the culprit of this round.
        agrees: Whether the logits agree after the culprit's output is replaced as well.
    """

    differences: tuple[ModuleDifference, ...]
    agrees: bool


def localize(model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, max_culprits: int = 8) -> list[Culprit]:
    """Find the modules that make `model` differ from `reference`, in order; empty if they agree.

    Both models run with hooks on all common modules. The first module to finish (so the innermost) whose inputs agree
    and whose output does not is a culprit. Its output is replaced by the reference's, and the search continues until
    the logits agree.

    Args:
        model: The model under test.
        reference: The Hugging Face model in the same dtype.
        inputs: Inputs of both models. Use short sequences, because all module outputs are kept.
        max_culprits: Maximum number of culprits.
    """
    return culprits_of(search_rounds(model, reference, inputs, max_culprits), differing_weights(model, reference))


def culprits_of(rounds: Sequence[SearchRound], weights: Sequence[str]) -> list[Culprit]:
    """Return the culprit of each round.

    Args:
        rounds: Result of `search_rounds`.
        weights: Names of all weights that differ.
    """
    culprits: list[Culprit] = []
    for search_round in rounds:
        first = next((each for each in search_round.differences if each.is_culprit), None)
        if first is None:
            break
        weight_names = tuple(weight for weight in weights if weight.startswith(f"{first.module}."))
        culprits.append(Culprit(first.module, first.class_name, first.output, search_round.agrees, weight_names))
        if search_round.agrees:
            break
    return culprits


def differing_weights(model: FamilyModel, reference: PreTrainedModel) -> list[str]:
    """Return the names in transformers of weights that differ between two models."""
    converted = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")
    return [name for name, weight in reference.state_dict().items() if not torch.equal(weight, converted[name])]


def search_rounds(
    model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, max_culprits: int = 8
) -> list[SearchRound]:
    """Run both models, and replace the output of one more culprit in each round, until the logits agree.

    Args:
        model, reference, inputs, max_culprits: See `localize`.
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
    substituted: dict[str, Any] = {}
    rounds: list[SearchRound] = []
    for _ in range(max_culprits):
        with _substituting(model, substituted):
            actual = _record(model, names - substituted.keys(), inputs)
        differences: list[ModuleDifference] = []
        for name, call in expected.items():
            if name in actual:
                class_name = type(modules[name]).__name__
                differences.append(difference_of(name, class_name, call, actual[name], dtype))
                if differences[-1].is_culprit:
                    break
        else:
            break
        substituted[name] = expected[name].output
        with _substituting(model, substituted):
            agrees = compare_tensors(logits, logits_of(model, inputs), verbose=False).max_diff <= allowed
        rounds.append(SearchRound(tuple(differences), agrees))
        if agrees:
            break
    return rounds


def _record(model: nn.Module, names: set[str], inputs: Inputs) -> dict[str, RecordedCall]:
    """Record the last call of each module in one forward, by name, in the order in which modules finish."""
    with record_calls(model, names) as calls:
        logits_of(model, inputs)
    return calls


@contextmanager
def _substituting(model: nn.Module, outputs: dict[str, Any]) -> Iterator[None]:
    """Replace the outputs of modules of `model`, by module name, inside a `with` block."""
    with ExitStack() as stack:
        for name, output in outputs.items():
            hook = model.get_submodule(name).register_forward_hook(lambda *_, output=output: output)
            stack.callback(hook.remove)
        yield


def difference_of(
    name: str, class_name: str, expected: Recorded, actual: Recorded, dtype: torch.dtype
) -> ModuleDifference:
    """Compare the calls of a module of two models."""
    inputs, output = (
        tensor_difference(first, second, dtype)
        for first, second in ((expected.inputs, actual.inputs), (expected.outputs, actual.outputs))
    )
    return ModuleDifference(name, class_name, inputs, output)


def tensor_difference(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """Return the largest difference if it exceeds the tolerance of `dtype` times the tensors' scale, else zero."""
    worst = 0.0
    for first, second in zip(expected, actual, strict=False):
        if first.shape != second.shape:
            return float("inf")
        finite = first.float().abs().nan_to_num(nan=0.0, posinf=0.0)
        scale = max(1.0, finite.max().item()) if first.numel() else 1.0
        difference = compare_tensors(first, second, verbose=False).max_diff
        if difference > TOLERANCE[dtype] * scale:
            worst = worst_of((worst, difference))
    return worst
