"""Checks of each level: weights, components, the complete model, gradients."""

from __future__ import annotations

import math
import textwrap

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.forward.routing import RoutingRecord, can_replay, flip_rate
from nrl_models.common.state_dict.ties import declared_ties
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import Inputs
from nrl_models.parity.compare import StateDictComparison, compare_state_dicts, compare_tensors
from nrl_models.parity.components import calls_of, component_classes, run_layer
from nrl_models.parity.noise import (
    NOISE_FACTOR,
    TOLERANCE,
    gradient_noise,
    gradients,
    limit,
    logits_and_routing,
    logits_noise,
    logits_of,
    output_name,
    routing_noise,
)
from nrl_models.parity.parity_report import Level, ParityRow, Unit
from nrl_models.parity.precision import (
    Truth,
    compare_components_rounded,
    compare_gradients_rounded,
    compare_logits_rounded,
)
from nrl_models.parity.worst import last_if_nan, worst_of

MIN_COSINE = 0.9999

MIN_FLIPS = 0.01
"""Fraction of differing expert choices that always passes, because few tokens give a coarse rounding difference."""


def compare_weights(model: FamilyModel, reference: PreTrainedModel) -> list[ParityRow]:
    """Check level 1: weights and buffers equal the reference's exactly, and survive conversion to the hub and back.

    Args:
        model: The model under test. It has a `state_dict_adapter`.
        reference: The Hugging Face model, loaded by transformers.
    """
    adapter = model.state_dict_adapter
    actual, expected = model.state_dict(), reference.state_dict()
    weights = compare_state_dicts(expected, adapter.to_hf(actual, layout="transformers"), verbose=False)
    round_trip = compare_state_dicts(actual, adapter.from_hf(adapter.to_hf(actual)), verbose=False)
    buffers = dict(model.named_buffers())
    of_buffers = compare_state_dicts(dict(reference.named_buffers()), buffers, verbose=False)
    ties = declared_ties(model)
    apart = [name for name in ties if name not in adapter.tied]
    tied = ", ".join(f"{name} = {other}" for name, other in ties.items()) or "nothing is tied"

    def row(check: str, comparison: StateDictComparison, if_equal: str, required: str) -> ParityRow:
        measured = if_equal if comparison.equal else textwrap.shorten(str(comparison), 200, placeholder=" ...")
        differing = float(len(comparison.missing) + len(comparison.extra) + len(comparison.max_diffs))
        return ParityRow(
            f"level 1: {check}", comparison.equal, measured, required, "", Level.WEIGHTS, differing, 0.0, Unit.COUNT
        )

    return [
        row("weights", weights, f"{len(expected)} tensors", "equal exactly"),
        row("round trip", round_trip, f"{len(expected)} tensors", "exact"),
        row("buffers", of_buffers, f"{len(buffers)} buffers", "equal exactly"),
        ParityRow(
            "level 1: tied weights",
            not apart,
            f"apart: {apart}" if apart else tied,
            "one storage each",
            "",
            Level.WEIGHTS,
            float(len(apart)),
            0.0,
            Unit.COUNT,
        ),
    ]


def compare_components(
    model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, seed: int = 42, truth: Truth | None = None
) -> list[ParityRow]:
    """Check level 2: compare the output of one layer of each class with the reference's, on random hidden states.

    Below fp32, all layers are compared by their errors from fp32, on the reference's inputs
    (`nrl_models.parity.precision`).

    Args:
        model: The model under test.
        reference: The Hugging Face model with the same weights and dtype.
        inputs: Model inputs for one forward, which records the layers' other arguments.
        seed: Random seed of the hidden states.
        truth: The reference in fp32, if it already exists. Used for models below fp32.
    """
    dtype = next(reference.parameters()).dtype
    if dtype != torch.float32:
        return compare_components_rounded(model, reference, inputs, truth)
    rows = []
    classes = component_classes(reference)
    calls = calls_of(reference, classes, inputs)
    done: set[type] = set()
    for name, call in calls.items():
        original = reference.get_submodule(name)
        if type(original) in done:
            continue
        done.add(type(original))
        call = call.with_random_input(seed)
        expected = run_layer(original, call)
        if not expected:  # nothing to compare
            continue
        actual = run_layer(model.get_submodule(name), call)
        comparisons = [
            compare_tensors(first, second, verbose=False) for first, second in zip(expected, actual, strict=True)
        ]
        max_diff = worst_of(comparison.max_diff for comparison in comparisons)
        cosine = min(comparison.cosine_similarity for comparison in comparisons)
        scale = max([1.0, *(tensor.abs().max().item() for tensor in expected if tensor.is_floating_point())])
        allowed = TOLERANCE[dtype] * scale
        rows.append(
            ParityRow(
                f"level 2: {type(original).__name__}",
                max_diff <= allowed and cosine > MIN_COSINE,
                f"max_diff {max_diff:.1e}",
                f"at most {allowed:.1e}",
                name,
                Level.COMPONENTS,
                max_diff,
                allowed,
                Unit.MAX_DIFF,
            )
        )
    return rows


def compare_end_to_end(
    model: nn.Module, reference: nn.Module, inputs: Inputs, truth: Truth | None = None
) -> list[ParityRow]:
    """Check level 3: compare the complete model's logits with the reference's.

    In fp32, the limit is a small multiple of the reference's own noise (its difference from itself with other rounding)
    and at least the tolerance. So the limit is not so large that it hides a bug. Below fp32, the model's error from
    fp32 is compared with the reference's (`nrl_models.parity.precision`). Mixture-of-experts models are compared with
    the reference's choice of experts; a separate row has the fraction of different choices.

    Args:
        model: The model under test.
        reference: The Hugging Face model with the same weights and dtype.
        inputs: Inputs for both.
        truth: The reference in fp32, if it already exists. Used for models below fp32.
    """
    dtype = next(reference.parameters()).dtype
    expected, routing = logits_and_routing(reference, inputs)
    if dtype != torch.float32:
        replayed = routing if can_replay(model) else {}
        rounded = compare_logits_rounded(model, reference, inputs, expected, replayed, truth)
        return [_choices(model, reference, inputs, routing), rounded] if routing else [rounded]
    noise = logits_noise(reference, inputs)
    result = compare_tensors(expected, logits_of(model, inputs), verbose=False)
    allowed = limit(noise, dtype)
    return [
        ParityRow(
            f"level 3: {output_name(reference)}, {dtype_name(dtype)}",
            result.max_diff <= allowed and result.cosine_similarity > MIN_COSINE,
            f"max_diff {result.max_diff:.1e}, cosine {result.cosine_similarity:.6f}",
            f"max_diff at most {allowed:.1e}, cosine above {MIN_COSINE}",
            f"rounding difference {noise:.1e}; values up to {expected.abs().max().item():.1f}",
            Level.LOGITS,
            result.max_diff,
            allowed,
            Unit.MAX_DIFF,
        ),
    ]


def _choices(model: nn.Module, reference: nn.Module, inputs: Inputs, routing: RoutingRecord) -> ParityRow:
    """Check that the fraction of expert choices that differ from the reference's does not exceed rounding noise."""
    noise = routing_noise(reference, inputs, routing)
    flipped = flip_rate(routing, logits_and_routing(model, inputs)[1])
    allowed = max(NOISE_FACTOR * noise, MIN_FLIPS)
    return ParityRow(
        f"level 3: choice of experts, {dtype_name(next(reference.parameters()).dtype)}",
        flipped <= allowed,
        f"{flipped:.2%} differ",
        f"at most {allowed:.2%}",
        f"rounding difference {noise:.2%}",
        Level.LOGITS,
        flipped,
        allowed,
        Unit.SHARE,
    )


def compare_gradients(
    model: FamilyModel, reference: PreTrainedModel, inputs: Inputs, truth: Truth | None = None
) -> list[ParityRow]:
    """Compare the gradients of the loss, mapped to the reference's names, with the reference's.

    Below fp32, their errors from fp32 are compared (`nrl_models.parity.precision`).

    Args:
        model: The model under test.
        reference: The Hugging Face model with the same weights and dtype.
        inputs: Model inputs with labels.
        truth: The reference in fp32, if it already exists. Used for models below fp32.
    """
    dtype = next(reference.parameters()).dtype
    if dtype != torch.float32:
        return [compare_gradients_rounded(model, reference, inputs, truth)]
    expected = gradients(reference, inputs)
    noise = gradient_noise(reference, inputs, expected)
    actual = model.state_dict_adapter.to_hf(gradients(model, inputs), layout="transformers")
    missing = sorted(expected.keys() - actual.keys())
    # Some gradients are zero except for rounding (a key's bias does not change a softmax). They get the others' scale.
    smallest = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values())
    differences = {
        name: (
            compare_tensors(gradient, actual[name], verbose=False).max_diff,
            max(NOISE_FACTOR * noise[name], TOLERANCE[dtype] * max(gradient.abs().max().item(), smallest)),
        )
        for name, gradient in expected.items()
        if name in actual
    }
    worst = max(differences, key=lambda name: last_if_nan(differences[name][0] / differences[name][1]), default="")
    difference, allowed = differences.get(worst, (math.inf, 0.0))
    return [
        ParityRow(
            f"gradients, {dtype_name(dtype)}",
            not missing and difference <= allowed,
            f"none for {missing[:4]}" if missing else f"max_diff {difference:.1e} in {len(expected)} tensors",
            f"at most {allowed:.1e} in this tensor",
            f"worst: {worst}",
            Level.GRADIENTS,
            difference,
            allowed,
            Unit.MAX_DIFF,
        )
    ]
