"""Tests of fused groups: one matmul with unchanged results and Hugging Face's parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.modules.module import register_module_forward_hook

from nrl_models.common.projections import groups_of, report
from nrl_models.parity.components import Call, calls_of, run_layer, tensors_in
from nrl_models.testing.case import SEED, FamilyCase
from nrl_models.testing.features import proves
from nrl_models.testing.suite.asserts import assert_close


@pytest.mark.thorough
@proves("layers")
def test_groups_run_as_one_matmul(family_case: FamilyCase) -> None:
    """Check that all declared groups are fused, and that each parameter has a separate storage of its size."""
    model = family_case.model()
    assert not [group for group in report(model) if not group.joined]
    for name, parameter in model.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name


@proves("gradients")
def test_names_are_transformers(family_case: FamilyCase) -> None:
    """Compare parameters, modules, state dict, optimizer state and distributed checkpoints with transformers."""
    seen: list[Any] = []
    for model in family_case.new_pair():
        torch.manual_seed(SEED)  # some routers draw random numbers in training
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model.train()(**family_case.inputs(labels=True), use_cache=False).loss.backward()
        optimizer.step()
        modules = [(name, type(module).__name__) for name, module in model.named_modules()]
        parameters = [(name, type(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()]
        weights, states = get_state_dict(model, optimizer)
        seen.append((modules, parameters, list(model.state_dict()), optimizer.state_dict(), weights, states))
    expected, actual = seen
    assert actual[:3] == expected[:3]
    assert actual[3]["param_groups"] == expected[3]["param_groups"]
    for ours, theirs in zip(actual[3:], expected[3:], strict=True):
        assert list(ours) == list(theirs)
    assert_close(actual[3]["state"], expected[3]["state"])
    assert_close(actual[5]["state"], expected[5]["state"])


@pytest.mark.thorough
@proves("layers")
def test_called_twice(family_case: FamilyCase) -> None:
    """Check that a second call of a layer with the same tensor and new weights uses the new weights."""
    for layer, original, call in _layers_with_groups(family_case):
        gradients_by_module = []
        for module in (layer, original):
            gradients = []
            module.requires_grad_(True)  # some classes freeze their parameters
            weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            for _ in range(2):
                # The tensors are the same each time, but a cache in the arguments is copied, so that it does not grow.
                memo = {id(tensor): tensor for tensor in tensors_in((call.args, call.kwargs))}
                args, kwargs = copy.deepcopy((call.args, call.kwargs), memo)
                outputs = list(tensors_in(module(*args, **kwargs)))
                loss = torch.stack([tensor.float().pow(2).sum() for tensor in outputs]).sum()
                learned = list(module.parameters()) if loss.requires_grad else []  # an indexer runs without gradients
                gradients.append(
                    [loss.detach(), *(torch.autograd.grad(loss, learned, allow_unused=True) if learned else ())]
                )
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(1.25)
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(weights[name])
            gradients_by_module.append(gradients)
        actual, expected = gradients_by_module
        for ours, theirs in zip(actual, expected, strict=True):
            scale = max(float(gradient.abs().max()) for gradient in theirs if gradient is not None)
            assert_close(ours, theirs, scale=max(1.0, scale))


@proves("gradients")
def test_unused_parts_get_no_gradient(family_case: FamilyCase) -> None:
    """Check that a linear has no gradient (rather than zeros) if its output is unused, as if it had not been called."""
    _, model = family_case.new_pair()
    of_each_kind = {(type(model.get_submodule(owner)), name): (owner, group) for owner, name, group in groups_of(model)}
    for owner, group in of_each_kind.values():
        first, *others = (part.requires_grad_(True) for part in group.linears.values())
        inputs = torch.randn(3, first.in_features, generator=torch.Generator().manual_seed(SEED))
        output, *_ = group(inputs.to(family_case.device))
        output.sum().backward()
        assert first.weight.grad is not None, owner
        assert all(part.weight.grad is None for part in others), owner


def _flip(tensor: torch.Tensor, mode: str) -> None:
    # The order of the numbers is changed, because a following norm would hide a change of scale.
    if mode == "in place":
        tensor.copy_(tensor.flip(-1))
    else:
        tensor.data = tensor.data.flip(-1)


@pytest.mark.thorough
@proves("layers")
def test_edits_while_running(family_case: FamilyCase) -> None:
    """Edit the input or a weight after the first call of a group: later calls use the new values."""
    for layer, original, call in _layers_with_groups(family_case):
        for names in _own_groups(layer):
            for target, mode in itertools.product(("input", "weights"), ("in place", "data")):
                actual, expected = (_run_edited(owner, names, target, mode, call) for owner in (layer, original))
                assert_close(actual, expected, message=f"{type(original).__name__}: {target} {mode}")


def _run_edited(owner: nn.Module, names: tuple[str, ...], target: str, mode: str, call: Call) -> list[torch.Tensor]:
    """Run a layer, and change the input or other weights after the first of these linears is called.

    Afterwards, the weights have their previous values and location.
    """
    parts = [getattr(owner, name) for name in names]
    before = [part.weight.data for part in parts]
    values = [weight.clone() for weight in before]
    done: list[bool] = []

    def edit(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not done and any(module is part for part in parts):
            done.append(True)
            with torch.no_grad():
                for tensor in args[:1] if target == "input" else [part.weight for part in parts if part is not module]:
                    _flip(tensor, mode)

    handle = register_module_forward_hook(edit)
    try:
        return run_layer(owner, call)
    finally:
        handle.remove()
        for part, weight, value in zip(parts, before, values, strict=True):
            part.weight.data = weight.copy_(value)


@pytest.mark.thorough
@proves("layers")
def test_replaced_weights(family_case: FamilyCase) -> None:
    """Check that layers use a weight that was moved in memory (`.data =`), or replaced as a parameter."""
    reference, model = family_case.new_pair()
    calls = _calls(family_case)
    for name, call in calls.items():
        layers = model.get_submodule(name), reference.get_submodule(name)
        groups = _own_groups(layers[0])
        for index in (0, -1):  # one at a time, because a group's memory is freed with its last weight
            for layer in layers:
                for part in [getattr(layer, names[index]) for names in groups]:
                    if index == 0:
                        part.weight.data = part.weight.data.flip(1)
                    else:
                        part.weight = nn.Parameter(part.weight.detach().flip(1))
            actual, expected = (run_layer(layer, call) for layer in layers)
            assert_close(actual, expected)
    assert not any(group.joined for group in report(model) if group.name.rpartition(".")[0] in calls)


def _own_groups(layer: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of the linears of each group of a layer, without those of submodules."""
    return [tuple(group.linears) for owner, _, group in groups_of(layer) if not owner]


def _calls(case: FamilyCase) -> dict[str, Call]:
    """Return a call with random inputs of one layer of each kind that has groups."""
    reference, model = case.reference(), case.model()
    owners = {owner for owner, _, _ in groups_of(model)}
    kinds = {type(reference.get_submodule(owner)) for owner in owners}
    calls = calls_of(reference, kinds, case.inputs()) if kinds else {}
    chosen: dict[tuple[type, tuple[str, ...]], str] = {}
    for name in calls:
        if name in owners:
            groups = tuple(group_name for owner, group_name, _ in groups_of(model) if owner == name)
            chosen.setdefault((type(reference.get_submodule(name)), groups), name)
    return {name: calls[name].with_random_input(seed=SEED) for name in chosen.values()}


def _layers_with_groups(case: FamilyCase) -> Iterator[tuple[nn.Module, nn.Module, Call]]:
    reference, model = case.new_pair()
    for name, call in _calls(case).items():
        yield model.get_submodule(name), reference.get_submodule(name), call
