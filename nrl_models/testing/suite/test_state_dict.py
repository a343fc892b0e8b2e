"""Names, shapes and views: the way between own tensors and Hugging Face's."""

from __future__ import annotations

import torch
from transformers.core_model_loading import revert_weight_conversion

from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import proves
from nrl_models.testing.suite.asserts import assert_same_tensors


@proves("state dict")
def test_state_dict_roundtrip(family_case: FamilyCase) -> None:
    """Own tensors to Hugging Face ones and back, exactly, in both layouts; and they are the reference's."""
    model, reference = family_case.model(), family_case.reference()
    adapter = model.state_dict_adapter
    own = model.state_dict()
    expected = {
        "transformers": reference.state_dict(),
        "hub": revert_weight_conversion(reference, dict(reference.state_dict())),
    }
    for layout, tensors in expected.items():
        converted = adapter.to_hf(own, layout=layout)
        assert_same_tensors(converted, tensors)
        assert_same_tensors(adapter.from_hf(converted), own)


@proves("state dict")
def test_views_partition_parameters(family_case: FamilyCase) -> None:
    """Each element of each tensor is in exactly one Hugging Face tensor of either layout."""
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
    """At published size, on meta: names, shapes and order are those of transformers, in both layouts."""
    with torch.device("meta"):
        reference = family_case.reference_class(family_case.full_config)
        model = family_case.model_class(family_case.full_config)
    adapter = model.state_dict_adapter
    in_memory = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert {name: tensor.shape for name, tensor in adapter.transformers.items()} == in_memory
    assert list(adapter.transformers) == list(in_memory)
    saved = revert_weight_conversion(reference, dict(reference.state_dict()))
    assert {name: tensor.shape for name, tensor in adapter.hub.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }


@proves("state dict")
def test_load_state_dict_accepts_hf_names(family_case: FamilyCase) -> None:
    """`load_state_dict` takes transformers' and the hub's names, strictly."""
    reference, expected = family_case.reference(), family_case.model().state_dict()
    for tensors in (reference.state_dict(), revert_weight_conversion(reference, dict(reference.state_dict()))):
        model = family_case.model_class.from_config(family_case.config, device=family_case.device)
        result = model.load_state_dict(tensors, strict=False)
        assert set(result.missing_keys) <= set(model.all_tied_weights_keys)
        assert not result.unexpected_keys
        assert_same_tensors(model.state_dict(), expected)


@proves("refit")
def test_single_tensor_export(family_case: FamilyCase) -> None:
    """Exporting tensor by tensor gives what exporting all at once gives, sharing the parameters' storage."""
    model = family_case.model()
    adapter = model.state_dict_adapter
    own = model.state_dict()
    one_by_one = {name: tensor for key in own for name, tensor in adapter.convert_single_tensor_to_hf(key, own[key])}
    assert_same_tensors(one_by_one, adapter.to_hf(own))
    storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    assert all(tensor.untyped_storage().data_ptr() in storages for tensor in one_by_one.values())


@proves("refit")
def test_export_plan(family_case: FamilyCase) -> None:
    """The plan names what the stream yields, in its order; buckets hold the same values."""
    model = family_case.model(torch.bfloat16)
    adapter = model.state_dict_adapter
    plan = adapter.export_plan()
    for max_bytes in (None, 100_000):
        stream = list(adapter.iter_export(model, max_bytes))
        assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stream] == plan
        assert_same_tensors(dict(stream), {name: adapter.to_hf(model.state_dict())[name] for name, _, _ in plan})
