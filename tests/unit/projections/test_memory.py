"""Fused weights share one buffer, unless other code holds the weights."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_attention import (
    HIDDEN,
    KV,
    PARTS,
    Attention,
    CombinedAttention,
    assert_same,
    combined_from,
    matmuls,
)

from nrl_models.common.projections import Buffer, join, own_storage, report
from nrl_models.common.projections.memory import owns_storage


def parameters(module: nn.Module, kind: str) -> list[nn.Parameter]:
    return [getattr(getattr(module, name), kind) for name in PARTS]


# Buffers


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_parameters_share_buffer_with_separate_storages(
    plain: Attention, combined: CombinedAttention, kind: str
) -> None:
    neighbors = parameters(combined, kind)
    buffer = Buffer.of(neighbors)
    assert buffer is not None
    assert torch.equal(buffer.rows, torch.cat(parameters(plain, kind)))
    address = buffer.rows.data_ptr()
    for parameter in neighbors:
        assert type(parameter) is nn.Parameter
        assert (parameter.data_ptr(), parameter.untyped_storage().nbytes()) == (address, parameter.nbytes)
        assert parameter.storage_offset() == 0
        address += parameter.nbytes


def test_safetensors_does_not_treat_contiguous_weights_as_tied(combined: CombinedAttention, tmp_path: Path) -> None:
    """safetensors drops all but one of the tensors that share a storage."""
    save_model(combined, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == combined.state_dict().keys()
    torch.testing.assert_close(saved, dict(combined.state_dict()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_separate_storage_for_any_dtype(dtype: torch.dtype) -> None:
    complete = torch.arange(24).reshape(6, 4).to(dtype)
    first, second = Buffer(complete, [2, 4]).neighbors()
    assert (first.dtype, second.dtype) == (dtype, dtype)
    assert torch.equal(torch.cat([first.view(torch.uint8), second.view(torch.uint8)]), complete.view(torch.uint8))
    second.view(torch.uint8).fill_(1)
    assert complete[2:].view(torch.uint8).eq(1).all()


def test_own_storage_returns_empty_and_meta_tensors() -> None:
    for tensor in (torch.empty(0, 3), torch.empty(2, 3, device="meta")):
        assert own_storage(tensor) is tensor


def test_buffer_of_requires_exact_tensors_in_order() -> None:
    tensors = Buffer(torch.randn(9, 4), [3, 3, 3]).neighbors()
    buffer = Buffer.of(tensors)
    assert buffer is not None
    assert Buffer.of([tensor.view(3, 4) for tensor in tensors]) is buffer
    first, second, third = tensors
    for others in (
        [second, first, third],
        [first, third, second],
        [first, second],
        [first, second, third.clone()],
        [first, second.view(torch.int32), third],
        [first, second.view(4, 3), third],
        [first[:2], second, third],
        [first, second.as_strided((3, 4), (1, 3)), third],
        [torch.randn(3, 4), second, third],
    ):
        assert Buffer.of(others) is None


@pytest.mark.long
def test_buffer_lives_as_long_as_any_weight(combined: CombinedAttention, x: torch.Tensor) -> None:
    buffer = weakref.ref(Buffer.of(parameters(combined, "weight")))
    expected = combined.v_proj.weight.detach().clone()
    del combined.q_proj
    combined.k_proj = nn.Linear(HIDDEN, KV)
    gc.collect()
    assert buffer() is not None
    assert torch.equal(combined.v_proj.weight, expected)
    combined.v_proj.weight = nn.Parameter(expected)
    gc.collect()
    assert buffer() is None


def test_owns_storage() -> None:
    tensor = torch.randn(3, 4)
    assert owns_storage(tensor)
    parameter = nn.Parameter(torch.randn(3, 4))
    assert owns_storage(parameter)
    assert not owns_storage(tensor[1:])
    assert not owns_storage(torch.randn(3, 4).share_memory_())
    view = tensor.detach()
    assert not owns_storage(tensor)
    del view
    assert owns_storage(tensor)


def test_group_weight_is_shared_buffer_while_fused(plain: Attention, combined: CombinedAttention) -> None:
    for kind in ("weight", "bias"):
        rows = getattr(combined.qkv_proj, kind)
        assert rows.data_ptr() == getattr(combined.q_proj, kind).data_ptr()
        assert torch.equal(rows, torch.cat(parameters(plain, kind)))
        assert not rows.requires_grad
    combined.k_proj.weight.data = combined.k_proj.weight.data * 2
    rows = combined.qkv_proj.weight
    assert rows.data_ptr() != combined.q_proj.weight.data_ptr()
    assert torch.equal(rows, torch.cat(parameters(combined, "weight")))
    assert combined_from(Attention(bias=False)).qkv_proj.bias is None


# Moving weights


@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.to(torch.bfloat16),
        lambda module: nn.ModuleList([module]).double()[0],
        lambda module: copy.deepcopy(module),
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: saved_and_loaded(module),
        lambda module: copy.deepcopy([module.q_proj, module])[1],
    ],
    ids=["half", "double", "bfloat16", "parent", "deepcopy", "pickle", "save", "pair"],
)
def test_moved_or_copied_weights_are_contiguous(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor, move: Callable[[nn.Module], nn.Module]
) -> None:
    original_state, objects = combined.state_dict(keep_vars=True), [getattr(combined, name) for name in PARTS]
    before = {name: tensor.detach().clone() for name, tensor in original_state.items()}
    plain, moved = move(plain), move(combined)
    if moved is not combined:  # a copy has separate memory
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(2)
        torch.testing.assert_close({name: tensor.detach() for name, tensor in original_state.items()}, before)
    else:
        assert [getattr(combined, name) for name in PARTS] == objects
    moved.load_state_dict(plain.state_dict())
    assert matmuls(moved) == 2
    assert report(moved)[0].joined
    assert_same(plain, moved, x.to(moved.o_proj.weight.dtype))


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_group_created_on_meta_runs_after_loading(plain: Attention, x: torch.Tensor) -> None:
    with torch.device("meta"):
        combined = CombinedAttention()
    assert not report(combined)[0].joined
    combined.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert matmuls(combined) == 2
    assert_same(plain, combined, x)


def test_deepcopy_of_one_linear_is_independent(combined: CombinedAttention, x: torch.Tensor) -> None:
    alone, expected = copy.deepcopy(combined.k_proj), combined(x)
    assert type(alone) is nn.Linear
    assert "forward" not in alone.__dict__
    with torch.no_grad():
        alone.weight.zero_()
        alone.bias.fill_(7)
    assert alone(x).eq(7).all()
    assert torch.equal(combined(x), expected)


# State dicts


def test_assigned_state_dict_is_fused_after_release(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor
) -> None:
    tensors = {name: tensor * 2 for name, tensor in plain.state_dict().items()}
    plain.load_state_dict(tensors)
    combined.load_state_dict(tensors, assign=True)
    assert matmuls(combined) == 4
    assert_same(plain, combined, x)
    # Code that holds the state dict observes changes of the model, as with transformers' class.
    assert all(combined.get_parameter(name).data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    del tensors
    assert matmuls(combined) == 2
    assert_same(plain, combined, x)


def test_state_dict_assigned_to_two_models_stays_shared(plain: Attention, x: torch.Tensor) -> None:
    models = CombinedAttention(), CombinedAttention(), Attention()
    tensors = plain.state_dict()
    for model in models:
        model.load_state_dict(tensors, assign=True)
    del tensors, plain, model
    for _ in range(2):
        with torch.no_grad():
            models[0].k_proj.weight.mul_(2)
            models[2].v_proj.bias.add_(1)
        for model in models[:2]:
            assert_same(models[2], model, x)
            assert matmuls(model) == 4
            assert "somebody else" not in str(report(model)[0].reason)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, FakeTensorMode])
def test_weights_are_fused_if_first_run_is_without_gradients(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A first run in `generate` or in memory estimation must not prevent later training."""
    combined.load_state_dict({name: tensor.clone() for name, tensor in plain.state_dict().items()}, assign=True)
    with mode(**{"allow_non_fake_inputs": True} if mode is FakeTensorMode else {}) as fake:
        combined(fake.from_tensor(x) if mode is FakeTensorMode else x)
    assert_same(plain, combined, x)
    assert matmuls(combined) == 2


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_model_stays_live(combined: CombinedAttention, x: torch.Tensor, assign: bool) -> None:
    held = combined.state_dict()
    combined.load_state_dict(held, assign=assign)
    combined(x)
    with torch.no_grad():
        held["k_proj.weight"].zero_()
        combined.v_proj.weight.fill_(3)
    assert not combined.k_proj.weight.any()
    assert held["v_proj.weight"].eq(3).all()


def test_shared_memory_is_not_moved(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    combined.share_memory()
    for _ in range(2):
        assert_same(plain, combined, x)
        join(combined)
        assert all(parameter.is_shared() for parameter in combined.parameters())


def test_parameters_stay_the_same_objects(plain: Attention) -> None:
    before = dict(plain.named_parameters())
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    plain.__class__ = CombinedAttention
    plain.combine_projections()
    after = dict(plain.double().named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    plain.q_proj.weight.grad = torch.ones_like(plain.q_proj.weight)
    expected = plain.q_proj.weight.detach() - 1
    optimizer.step()
    assert torch.equal(plain.qkv_proj.weight[:12], expected)


def test_own_storage_shares_memory() -> None:
    stack = torch.arange(24, dtype=torch.bfloat16).view(4, 2, 3)
    alone = torch.ones(3)
    tensors = {f"experts.{index}": stack[index] for index in range(4)} | {
        "alone": alone,
        "a part": torch.zeros(4, 4)[1:],
        "transposed": stack[0].t(),
        "none": torch.empty(0, 3),
    }
    separate = {name: own_storage(tensor) for name, tensor in tensors.items()}
    assert list(separate) == list(tensors)
    assert all(
        torch.equal(separate[name], tensor) and separate[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    stored = [tensor for tensor in separate.values() if tensor.numel()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in stored)
    assert len({tensor.untyped_storage().data_ptr() for tensor in stored if tensor.is_contiguous()}) == len(stored)
    for index in range(4):
        assert separate[f"experts.{index}"].data_ptr() == stack[index].data_ptr()
    del tensors, stack
    assert separate["experts.3"].tolist() == [[18, 19, 20], [21, 22, 23]]  # the memory still exists
