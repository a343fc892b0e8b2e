"""Tests of names, shapes and views: conversion between own tensors and Hugging Face's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nrl_models.common.flags import ModelFlag
from nrl_models.common.upstream_conversions import revert_weight_conversion
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import proves
from nrl_models.testing.suite.asserts import assert_same_tensors


@proves("state dict")
def test_state_dict_roundtrip(family_case: FamilyCase) -> None:
    """Check that tensors convert to both Hugging Face layouts and back exactly, and equal the reference's."""
    model, reference = family_case.model(), family_case.reference()
    adapter = model.state_dict_adapter
    state_dict = model.state_dict()
    expected: dict[Any, dict[str, torch.Tensor]] = {
        "transformers": reference.state_dict(),
        "hub": revert_weight_conversion(reference, dict(reference.state_dict())),
    }
    for layout, tensors in expected.items():
        converted = adapter.to_hf(state_dict, layout=layout)
        assert_same_tensors(converted, tensors)
        assert_same_tensors(adapter.from_hf(converted), state_dict)


@proves("state dict")
def test_load_state_dict_takes_hub_names(family_case: FamilyCase) -> None:
    """Check that a state dict with hub names loads, in two shards that each have only parts of some parameters."""
    model = family_case.model()
    state_dict, hub = model.state_dict(), model.state_dict_adapter.to_hf(model.state_dict())
    if hub.keys() <= state_dict.keys():
        return  # torch's own rules
    loaded = copy.deepcopy(model)
    for tensor in loaded.state_dict().values():
        tensor.zero_()
    names = sorted(hub)
    for shard in (names[::2], names[1::2]):
        result = loaded.load_state_dict({name: hub[name] for name in shard}, strict=False)
        assert not result.unexpected_keys
    assert_same_tensors(loaded.state_dict(), state_dict)


@pytest.mark.thorough
@proves("state dict")
def test_views_partition_parameters(family_case: FamilyCase) -> None:
    """Check that each element of each tensor is in exactly one Hugging Face tensor of either layout."""
    model = family_case.model()
    adapter = model.state_dict_adapter
    numbers = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in model.state_dict().items()}
    for layout in ("hub", "transformers"):
        for name, number in numbers.items():
            views = [
                piece.view
                for tensor in adapter.tensors_in(name, layout)
                for piece in tensor.pieces
                if piece.view.parameter == name
            ]
            seen = torch.cat([view.of(number).reshape(-1) for view in views])
            assert torch.equal(seen.sort().values, number.reshape(-1)), f"{name} in {layout}"


@proves("state dict")
def test_full_size_names_and_shapes(family_case: FamilyCase) -> None:
    """Compare names, shapes and order with those of transformers in both layouts, on meta at published sizes.

    Uses the tiny size if there is no published size and transformers' default configuration cannot be built. Also
    checks the flag of families that tie embeddings at all sizes.
    """
    full, tied = family_case.full_configs, []
    for size, config in (full or {"tiny": family_case.config}).items():
        with torch.device("meta"):
            reference = family_case.reference_class(copy.deepcopy(config))
            model = family_case.model_class(config)
        adapter = model.state_dict_adapter
        in_memory = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        assert {name: tensor.shape for name, tensor in adapter.transformers.items()} == in_memory, size
        assert list(adapter.transformers) == list(in_memory), size
        saved = revert_weight_conversion(reference, dict(reference.state_dict()))
        assert {name: tensor.shape for name, tensor in adapter.hub.items()} == {
            name: tuple(tensor.shape) for name, tensor in saved.items()
        }, size
        tied.append(bool(reference.all_tied_weights_keys and reference.config.get_text_config().tie_word_embeddings))
    if "default" in full and family_case.reference_class._tied_weights_keys:
        assert (ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK in family_case.model_class.flags) == all(tied)


@proves("refit")
def test_single_tensor_export(family_case: FamilyCase) -> None:
    """Check that exporting tensors one by one gives the result of exporting all, sharing storage if strides allow it.

    If a hub tensor consists of several own tensors (of different layers), exporting a single one of them raises.
    """
    model = family_case.model()
    adapter = model.state_dict_adapter
    state_dict = model.state_dict()
    joint = {key for tensor in adapter.hub.values() if len(tensor.parameters) > 1 for key in tensor.parameters}
    one_by_one = {
        name: tensor
        for key in state_dict.keys() - joint
        for name, tensor in adapter.convert_single_tensor_to_hf(key, state_dict[key])
    }
    for key in joint:
        with pytest.raises(ValueError, match="convert them together"):
            adapter.convert_single_tensor_to_hf(key, state_dict[key])
    all_at_once = adapter.to_hf(state_dict)
    parts_of_joint = {tensor.name for key in joint for tensor in adapter.tensors_in(key, "hub")}
    assert_same_tensors(one_by_one, {key: all_at_once[key] for key in all_at_once.keys() - parts_of_joint})
    storages = {tensor.untyped_storage().data_ptr() for tensor in state_dict.values()}
    # Reordered rows (rotary weights) and padded tensors are not views; all others may not be copied.
    copied = {
        name
        for name in one_by_one
        if (view := adapter.hub[name].view) is None or any(method == "reshape" for method, _ in view.steps[-1:])
    }
    assert all(one_by_one[name].untyped_storage().data_ptr() in storages for name in one_by_one.keys() - copied)


@proves("refit")
def test_export_plan(family_case: FamilyCase) -> None:
    """Check that the export plan lists the tensors of the stream in the same order, with and without buckets.

    The plan has all tensors of the model, and tied tensors once.
    """
    model = family_case.model(torch.bfloat16)
    adapter = model.state_dict_adapter
    plan = adapter.export_plan()
    expected = adapter.to_hf({name: tensor for name, tensor in model.state_dict().items() if name not in adapter.tied})
    for max_bytes in (None, 600_000):
        stream = list(adapter.iter_export(model, max_bytes))
        assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stream] == plan
        assert_same_tensors(dict(stream), expected)
