"""Each rewritten layer against the layer it replaces, and what is combined against what is true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nrl_models.common.projections import groups_of
from nrl_models.common.projections.tracing import trace_linears
from nrl_models.common.recording import record_calls
from nrl_models.parity.components import calls_of, run_layer
from nrl_models.testing.case import SEED, FamilyCase
from nrl_models.testing.features import proves
from nrl_models.testing.suite.asserts import assert_close, count_matmuls, dtypes


@proves("layers")
def test_declaration_matches_trace(family_case: FamilyCase) -> None:
    """The groups a family combines are exactly the linears that read one input in the Hugging Face model.

    Of a layer that was not called (a tower for videos, for audio) nothing is known, if others of its class were, or it
    is another package's, whose own models show.
    """
    reference, model = family_case.reference(), family_case.model()
    with record_calls(reference) as called:
        traced = trace_linears(reference, lambda: reference(**family_case.inputs())).groups
    found = {(owner, frozenset(group)) for owner, groups in traced.items() for group in groups}
    declared = {(owner, frozenset(group.linears)) for owner, _, group in groups_of(model)}
    known = {type(reference.get_submodule(name)) for name in called}
    package = type(reference).__module__.rpartition(".")[0]
    unseen = {
        (owner, group)
        for owner, group in declared
        if owner not in called
        and ((layer := type(reference.get_submodule(owner))) in known or layer.__module__.rpartition(".")[0] != package)
    }
    assert declared - unseen == found


@proves("layers")
@dtypes
def test_attention_equivalence(family_case: FamilyCase, dtype: torch.dtype) -> None:
    """Each rewritten attention equals the attention it replaces, on random inputs, with fewer matmuls."""
    check_layers(family_case, dtype, lambda name: "Attention" in name)


@proves("layers")
@dtypes
def test_mlp_equivalence(family_case: FamilyCase, dtype: torch.dtype) -> None:
    """Each rewritten MLP equals the MLP it replaces, on random inputs, with fewer matmuls."""
    check_layers(family_case, dtype, lambda name: "Attention" not in name and "MLP" in name)


@proves("layers")
@dtypes
def test_layer_equivalence(family_case: FamilyCase, dtype: torch.dtype) -> None:
    """Any other rewritten layer equals the layer it replaces, on random inputs."""
    check_layers(family_case, dtype, lambda name: "Attention" not in name and "MLP" not in name)


def check_layers(case: FamilyCase, dtype: torch.dtype, is_wanted: Callable[[str], bool]) -> None:
    """Compare every instance of the rewritten classes of one kind with what they replace."""
    reference, model = case.reference(dtype), case.model(dtype)
    layers = {type(module) for module in reference.modules() if is_wanted(type(module).__name__)}
    rewrites = {layer: new for layer in layers if (new := case.model_class.rewrite_of(layer)) is not None}
    calls = calls_of(reference, rewrites, case.inputs()) if rewrites else {}
    if not calls:
        pytest.skip("rewrites no such layer")
    for name, call in calls.items():
        layer, original = model.get_submodule(name), reference.get_submodule(name)
        assert type(layer) is rewrites[type(original)]
        call = call.with_random_input(seed=SEED)
        expected = run_layer(original, call)
        assert expected, f"{type(original).__name__} returns no tensor to compare"
        assert_close(run_layer(layer, call), expected, dtype)
        assert count_matmuls(layer, call) == count_matmuls(original, call) - _matmuls_saved(layer)


def _matmuls_saved(layer: nn.Module) -> int:
    """A group of n linears saves n - 1 matmuls."""
    return sum(len(group.linears) - 1 for _, _, group in groups_of(layer))
