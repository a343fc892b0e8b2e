"""Tests of layers: compare each rewritten layer with the original, and declared groups with traced ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PreTrainedModel

from nrl_models.common.documents.packing import KeepsDocumentsApart
from nrl_models.common.projections import groups_of
from nrl_models.common.projections.tracing import trace_linears
from nrl_models.common.recording import record_calls
from nrl_models.parity.components import Call, calls_of, run_layer
from nrl_models.parity.noise import limit, rounded_otherwise
from nrl_models.testing.case import SEED, FamilyCase
from nrl_models.testing.features import proves
from nrl_models.testing.suite.asserts import TOLERANCE, assert_close, count_matmuls, dtypes


@proves("layers")
def test_declaration_matches_trace(family_case: FamilyCase) -> None:
    """Check that declared groups are exactly the linears with a common input in the Hugging Face model.

    Layers that are not called (video or audio towers) are ignored, if other layers of the class are called or the class
    belongs to another package with its own tests.
    """
    reference, model = family_case.reference(), family_case.model()
    with record_calls(reference) as called:
        traced = trace_linears(reference, lambda: reference(**family_case.inputs())).groups
    traced_groups = {(owner, frozenset(group)) for owner, groups in traced.items() for group in groups}
    declared = {(owner, frozenset(group.linears)) for owner, _, group in groups_of(model)}
    known = {type(reference.get_submodule(name)) for name in called}
    package = type(reference).__module__.rpartition(".")[0]
    unseen = {
        (owner, group)
        for owner, group in declared
        if owner not in called
        and ((layer := type(reference.get_submodule(owner))) in known or layer.__module__.rpartition(".")[0] != package)
    }
    assert declared - unseen == traced_groups


@proves("layers")
@dtypes
def test_layer_equivalence(family_case: FamilyCase, dtype: torch.dtype) -> None:
    """Check that each rewritten layer equals the layer it replaces, with fewer matmuls. Inputs are random.

    Also checks that no other layer is replaced.
    """
    reference, model = family_case.reference(dtype), family_case.model(dtype)
    rewrites = {}
    for name, original in list(reference.named_modules())[1:]:
        rewritten = family_case.model_class.rewrite_of(type(original))
        # torch creates a class for each parametrized module.
        kinds = _class_of(model.get_submodule(name)), type_before_parametrizations(original)
        assert kinds[0] is (rewritten or kinds[1]), name
        if rewritten is not None:
            rewrites[type(original)] = rewritten
    calls = calls_of(reference, rewrites, family_case.inputs()) if rewrites else {}
    for name, call in calls.items():
        layer, original = model.get_submodule(name), reference.get_submodule(name)
        call = call.with_random_input(seed=SEED)
        # First, because a layer may keep a state of its last forward. A state with gradients could not be copied later.
        saved = count_matmuls(original, call) - count_matmuls(layer, call)
        assert saved == _matmuls_saved(layer, name, calls), name
        expected = run_layer(original, call)
        assert expected, f"{type(original).__name__} returns no tensor to compare"
        is_fp32_model = isinstance(original, PreTrainedModel) and dtype == torch.float32
        scale = _rounding(original, call, expected) if is_fp32_model else 1.0
        assert_close(run_layer(layer, call), expected, dtype, scale, message=f"{name} ({type(original).__name__})")


def _class_of(module: nn.Module) -> Any:
    """Return a module's class without parametrizations and without the wrapped forward of inner models."""
    module_class = type_before_parametrizations(module)
    return module_class.wraps if issubclass(module_class, KeepsDocumentsApart) else module_class


def _rounding(original: nn.Module, call: Call, expected: list[torch.Tensor]) -> float:
    """Return how much fp32 rounding changes the output of a complete model, in tolerances; at least one."""
    with rounded_otherwise(original):
        pairs = zip(run_layer(original, call), expected, strict=True)
        noise = max((moved.double() - before.double()).abs().max().item() for moved, before in pairs)
    return limit(noise, torch.float32) / TOLERANCE[torch.float32]


def _matmuls_saved(layer: nn.Module, name: str, calls: Mapping[str, Call]) -> int:
    """Return the number of matmuls that a layer's groups save: n - 1 for n linears, if the group's owner runs.

    Layers that read an encoder's states may not run.
    """
    owners = ((f"{name}.{owner}" if owner else name, group) for owner, _, group in groups_of(layer))
    return sum(len(group.linears) - 1 for owner, group in owners if owner in calls)
