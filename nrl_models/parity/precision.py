"""Checks below fp32: a model's error from fp32 may only slightly exceed transformers' own error from fp32.

In bf16, the logits of two correct models can differ by more than 1, as can those of a correct and a wrong one. So the
reference also runs in fp32 on the same (rounded) weights and inputs, and both models are compared with that result. For
example, a norm computed in bf16 triples a layer's error, which comparisons in fp32 cannot detect.

Layers are compared one by one on the reference's inputs, so that errors of earlier layers hide nothing. Layers without
matrices (norms, rotary embeddings, activations) must be bitwise equal. Matmuls may sum in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
from einops import reduce
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.forward.routing import RoutingRecord, can_replay, record_routing, replay_routing
from nrl_models.common.projections import groups_of
from nrl_models.common.recording import float_tensors
from nrl_models.common.upstream_torch import tree_map
from nrl_models.family import FamilyModel
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.parity.compare import compare_tensors
from nrl_models.parity.components import Call, calls_of, component_classes, run_layer
from nrl_models.parity.noise import gradients, logits_and_routing, logits_of, output_name
from nrl_models.parity.parity_report import Level, ParityRow, Unit
from nrl_models.parity.worst import last_if_nan, worst_of

FLOOR = 1e-6
"""Relative error that always passes, for values that the lower precision represents almost exactly."""


class Errors(NamedTuple):
    """Error of a tensor from its value in fp32, relative to the root mean square of each row (a token's values).

    Attributes:
        rms: Root mean square over all elements; infinite if a value is unexpectedly not finite.
        largest: Largest error of an element.
    """

    rms: float
    largest: float

    @classmethod
    def of(cls, actual: torch.Tensor, exact: torch.Tensor) -> Errors:
        """Compute the errors of `actual` from `exact`, which has the same shape. The last dimension is a row."""
        if actual.shape != exact.shape:
            return cls(math.inf, math.inf)
        if exact.numel() == 0:
            return cls(0.0, 0.0)
        actual_fp32, truth = actual.detach().float(), exact.detach().to(actual.device).float()
        same = (actual_fp32 == truth) | (actual_fp32.isnan() & truth.isnan())  # masked scores are infinite in both
        difference = torch.where(same, 0.0, actual_fp32 - truth).nan_to_num(nan=math.inf)
        finite = torch.where(truth.isfinite(), truth, 0.0)
        rows = reduce(finite.square(), "... value -> ... 1", "mean").sqrt() if finite.ndim else finite.abs()
        scale = rows.clamp_min(1e-3 * rows.square().mean().sqrt().item()).clamp_min(torch.finfo(torch.float32).tiny)
        relative = difference / scale
        return cls(relative.square().mean().sqrt().item(), relative.abs().max().item())

    def times(self, reference: Errors) -> Errors:
        """Return the errors as multiples of the reference's."""
        return Errors(self.rms / max(reference.rms, FLOOR), self.largest / max(reference.largest, FLOOR))

    @property
    def excess(self) -> float:
        """Factor by which multiples exceed `LIMITS`; at most 1 passes."""
        return worst_of((self.rms / LIMITS.rms, self.largest / LIMITS.largest))


EXACT = Errors(0.0, 0.0)

LIMITS = Errors(rms=1.25, largest=2.0)
"""Limits of a model's errors, as multiples of the reference's errors."""

TYPICAL_GRADIENT, WORST_GRADIENT = 1.5, 8.0
"""Limits for gradients: of the median error, and of every error. For SmolLM2, the errors of two correct backward passes
differ by a factor of 1.13 in the median, and by up to four for the weights of some norms."""

FEW_VALUES = 16
"""Gradients with fewer values use transformers' typical error as baseline if their own is smaller, because the error of
a single value may be near zero by chance."""

REQUIRED = f"RMS error at most {LIMITS.rms:g} times transformers', largest at most {LIMITS.largest:g} times"
SAME_BITS = "equal bit for bit"


class Truth:
    """The reference in fp32, created on first use. Most models do not need it, because they are bitwise equal.

    Args:
        reference: The reference in lower precision. The fp32 model has its (rounded) weights.
    """

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference

    @cached_property
    def model(self) -> nn.Module:
        """The reference in fp32."""
        # State that a forward stored in modules (a recurrent state) is attached to a graph, and cannot be deep-copied.
        left = [value for module in self.reference.modules() for value in vars(module).values()]
        graphs = [value for value in left if isinstance(value, torch.Tensor) and value.grad_fn is not None]
        model = copy.deepcopy(self.reference, {id(value): value.detach().clone() for value in graphs}).float()
        # Some towers get the dtype of their inputs from their configuration.
        for module in model.modules():
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                config.dtype = torch.float32
        return model


@dataclass(slots=True)
class ComparedTensors:
    """Result for the layers of one class, or for the gradients.

    Args:
        compared: Number of compared tensors.
        same: Number of bitwise equal tensors.
        times: Worst errors, as multiples of the reference's error.
        where: Name of the tensor with the worst error.
        differs: Names of layers that should be bitwise equal but are not.
    """

    compared: int = 0
    same: int = 0
    times: Errors = EXACT
    where: str = ""
    differs: tuple[str, ...] = ()

    def add(self, name: str, times: Errors | None, *, strict: bool = False) -> None:
        """Count one more tensor. `times` is None if it is bitwise equal."""
        self.compared += 1
        if times is None:
            self.same += 1
        elif strict:
            self.differs += (name,)
        elif last_if_nan(times.excess) >= last_if_nan(self.times.excess):
            self.times, self.where = times, name

    def row(self, check: str, level: Level, strict: bool = False) -> ParityRow:
        """Return the row of the report."""
        if self.differs:
            measured = f"{len(self.differs)} of {self.compared} differ"
        elif self.same == self.compared:
            measured = SAME_BITS
        else:
            measured = f"RMS error {self.times.rms:.2f} times transformers', largest {self.times.largest:.2f} times"
        where = self.differs[0] if self.differs else self.where
        return ParityRow(
            check,
            not self.differs and self.times.excess <= 1.0,
            measured,
            SAME_BITS if strict else REQUIRED,
            f"worst: {where}" if where else f"{self.compared} compared",
            level,
            0.0 if self.same == self.compared else self.times.rms,
            LIMITS.rms,
            Unit.TIMES_TRANSFORMERS_ERROR,
        )


def compare_components_rounded(
    model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, truth: Truth | None = None
) -> list[ParityRow]:
    """Check level 2 below fp32: compare all layers on the reference's inputs of one forward. Returns a row per class.

    Args:
        model: The model under test, below fp32.
        reference: The Hugging Face model with the same weights and dtype.
        inputs: Inputs of the reference.
        truth: `reference` in fp32, if it already exists.
    """
    truth = truth or Truth(reference)
    replays = can_replay(model)
    results: dict[tuple[str, bool], ComparedTensors] = {}
    for name, call in calls_of(reference, component_classes(reference), inputs).items():
        original, layer = reference.get_submodule(name), model.get_submodule(name)
        with record_routing(original) as routing:
            expected = float_tensors(run_layer(original, call))
        if not expected:
            continue
        routing = routing if replays else {}
        strict = _without_matmuls(original, layer, model)
        with _replaying(layer, routing):
            actual = float_tensors(run_layer(layer, call))
        if _same(expected, actual):
            times = None
        else:
            strict = strict and _same(expected, float_tensors(run_layer(original, call)))
            counterpart = truth.model.get_submodule(name)
            with _replaying(counterpart, routing):
                exact = float_tensors(run_layer(counterpart, _in_fp32(call)))
            times = max(_times(actual, expected, exact), key=lambda pair: last_if_nan(pair.excess))
        key = type(original).__name__, strict
        results.setdefault(key, ComparedTensors()).add(name, times, strict=strict)
    dtype = dtype_name(_dtype(reference))
    return [
        result.row(f"level 2: {name}, {dtype}", Level.COMPONENTS, strict) for (name, strict), result in results.items()
    ]


def compare_logits_rounded(
    model: nn.Module,
    reference: nn.Module,
    inputs: Inputs,
    expected: torch.Tensor,
    routing: RoutingRecord,
    truth: Truth | None = None,
) -> ParityRow:
    """Check level 3 below fp32: compare the logits. MoE models use the experts that the reference chose.

    Args:
        model: The model under test, below fp32.
        reference: The Hugging Face model with the same weights and dtype.
        inputs: Inputs of both models.
        expected: Logits of the reference.
        routing: The reference's choice of experts; empty to not replay it.
        truth: `reference` in fp32, if it already exists.
    """
    with _replaying(model, routing):
        actual = logits_of(model, inputs)
    logits_result, difference = ComparedTensors(), compare_tensors(expected, actual, verbose=False)
    if torch.equal(expected, actual):
        logits_result.add("logits", None)
    else:
        exact_model = (truth or Truth(reference)).model
        with _replaying(exact_model, routing):
            exact = logits_of(exact_model, inputs)
        logits_result.add("logits", Errors.of(actual, exact).times(Errors.of(expected, exact)))
    row = logits_result.row(f"level 3: {output_name(reference)}, {dtype_name(_dtype(reference))}", Level.LOGITS)
    return replace(row, detail=f"max_diff {difference.max_diff:.1e}, cosine {difference.cosine_similarity:.6f}")


def compare_gradients_rounded(
    model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, truth: Truth | None = None
) -> ParityRow:
    """Compare gradients of the loss below fp32. MoE models use the experts that the reference chose.

    Args:
        model: The model under test, below fp32.
        reference: The Hugging Face model with the same weights and dtype.
        inputs: Model inputs with labels.
        truth: `reference` in fp32, if it already exists.
    """
    routing = logits_and_routing(reference, inputs)[1] if can_replay(model) else {}
    with _replaying(reference, routing):
        expected = gradients(reference, inputs)
    with _replaying(model, routing):
        actual = model.state_dict_adapter.to_hf(gradients(model, inputs), layout="transformers")
    missing = sorted(expected.keys() - actual.keys())
    differing = [name for name in actual if name in expected and not torch.equal(expected[name], actual[name])]
    multiples = dict.fromkeys(expected, 1.0)
    if differing:
        exact_model = (truth or Truth(reference)).model
        with _replaying(exact_model, routing):
            exact = {name: gradient.flatten() for name, gradient in gradients(exact_model, inputs).items()}
        # Some gradients are zero except for rounding (a key's bias does not change a softmax).
        smallest = 1e-3 * worst_of(gradient.square().mean().sqrt().item() for gradient in exact.values())
        errors = {
            name: (
                Errors.of(actual[name].flatten(), exact[name]).rms,
                Errors.of(expected[name].flatten(), exact[name]).rms,
            )
            for name in exact.keys() & actual.keys()
            if not exact[name].square().mean().sqrt().item() <= smallest  # a gradient with NaN is compared
        }
        usual = median([theirs for _, theirs in errors.values()] or [FLOOR])
        for name in differing:
            if name in errors:
                ours, theirs = errors[name]
                floor = usual if exact[name].numel() < FEW_VALUES else FLOOR
                multiples[name] = ours / max(theirs, floor)
    worst, typical = max(multiples, key=lambda name: last_if_nan(multiples[name])), median(multiples.values())
    measured = f"{typical:.2f} times, at worst {multiples[worst]:.2f} times" if differing else SAME_BITS
    return ParityRow(
        f"gradients, {dtype_name(_dtype(reference))}",
        not missing and typical <= TYPICAL_GRADIENT and multiples[worst] <= WORST_GRADIENT,
        f"none for {missing[:4]}" if missing else measured,
        f"at most {TYPICAL_GRADIENT:g} times transformers' error in the median, {WORST_GRADIENT:g} times in any",
        f"worst: {worst}" if differing else f"{len(expected)} compared",
        Level.GRADIENTS,
        typical if differing else 0.0,
        TYPICAL_GRADIENT,
        Unit.TIMES_TRANSFORMERS_ERROR,
    )


def _times(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> Iterator[Errors]:
    for ours, theirs, true in zip(actual, expected, exact, strict=True):
        yield Errors.of(ours, true).times(Errors.of(theirs, true))


def _same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        tensor.dtype == other.dtype and torch.equal(tensor, other) for tensor, other in zip(first, second, strict=True)
    )


def _without_matmuls(original: nn.Module, layer: nn.Module, model: FamilyModel) -> bool:
    """Return True if a layer must be bitwise equal, because it has no matrix and is the Hugging Face layer."""
    matrices = any(parameter.ndim > 1 for parameter in original.parameters())
    return not matrices and type(layer) is type(original) and not list(groups_of(layer))


def _replaying(module: nn.Module, routing: RoutingRecord) -> AbstractContextManager[None]:
    return replay_routing(module, routing) if routing else nullcontext()


def _in_fp32(call: Call) -> Call:
    def widen(value: object) -> object:
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(widen, (call.args, call.kwargs))
    return Call(args, kwargs)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
