"""Views as data: positions, reading, writing, and tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nrl_models.common.views.traced_tensor import NotAViewError, TracedTensor
from nrl_models.common.views.view import HFTensor, Piece, Region, View

SHAPE = (6, 4, 10)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def traced(name: str = "w", shape: tuple[int, ...] = SHAPE) -> TracedTensor:
    return TracedTensor.of_pieces(shape, torch.float32, (Piece(View(name)),))


def read(result: TracedTensor, **tensors: torch.Tensor) -> torch.Tensor:
    return HFTensor("t", tuple(result.shape), result.pieces).read(tensors)


# View


VIEWS = {
    "complete": View("w"),
    "narrow": View("w").then("narrow", 0, 2, 3),
    "narrow inner": View("w").then("narrow", 2, 1, 4),
    "select": View("w").then("select", 1, 2),
    "transpose": View("w").then("transpose", 0, 2),
    "reshape": View("w").then("reshape", 24, 10),
    "block of rows": View("w").then("select", 0, 3).then("narrow", 0, 1, 2),
    "all operations": View("w")
    .then("narrow", 0, 1, 4)
    .then("transpose", 0, 1)
    .then("select", 0, 3)
    .then("reshape", 2, 2, 10),
    "rows in another order": View("w").then("reshape", 3, 2, 4, 10).then("transpose", 0, 1).then("reshape", 6, 4, 10),
}


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest) -> View:
    return VIEWS[request.param]


def test_place_matches_torch_strides_and_offset(view: View) -> None:
    tensor = numbered(*SHAPE)
    region, place = view.of(tensor), view.region_in(SHAPE)
    assert place.shape == tuple(region.shape)
    if region.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        assert (place.strides, place.offset) == (region.stride(), region.storage_offset())
    else:
        assert place.strides is None


def test_block_is_contiguous_range_of_elements(view: View) -> None:
    tensor = numbered(*SHAPE)
    values, place = view.of(tensor).reshape(-1), view.region_in(SHAPE)
    run = tensor.view(-1)[place.offset : place.offset + len(values)]
    assert place.is_block is torch.equal(values, run)


def test_single_row_is_a_block() -> None:
    assert View("w").then("narrow", 0, 2, 1).region_in(SHAPE).is_block
    assert View("w").then("narrow", 0, 0, 1).then("narrow", 1, 1, 2).region_in(SHAPE).is_block
    assert not View("w").then("narrow", 1, 1, 2).region_in(SHAPE).is_block


def test_writing_is_the_inverse_of_reading(view: View) -> None:
    tensor, value = numbered(*SHAPE), -1 - view.of(numbered(*SHAPE))
    view.write(tensor, value)
    assert torch.equal(view.of(tensor), value)
    assert (tensor < 0).sum() == value.numel()  # no other element was written


def test_writing_casts_to_parameter_dtype() -> None:
    tensor = torch.zeros(4, 2, dtype=torch.float32)
    View("w").then("narrow", 0, 1, 2).write(tensor, torch.full((2, 2), 1.5, dtype=torch.bfloat16))
    assert tensor[1:3].eq(1.5).all()
    assert tensor.dtype == torch.float32


def test_writing_after_copying_reshape_raises() -> None:
    view = VIEWS["rows in another order"].then("narrow", 0, 0, 1)
    tensor = torch.arange(torch.Size(SHAPE).numel()).view(SHAPE)
    row = view.of(tensor)
    assert torch.equal(row, VIEWS["rows in another order"].of(tensor)[:1])
    assert view.region_in(SHAPE) == Region(tuple(row.shape), None)
    with pytest.raises(ValueError, match="only reshapes may follow"):
        view.write(tensor, row)


def test_unknown_step_raises() -> None:
    with pytest.raises(ValueError, match="unknown step flip"):
        View("w").then("flip", 0).region_in(SHAPE)


def test_reshape_replaces_reshape_before_it() -> None:
    view = View("w").then("reshape", 24, 10).then("reshape", 240)
    assert view == View("w").then("reshape", 240)
    rows = view.then("narrow", 0, 0, 24).then("reshape", 4, 6)
    assert [method for method, _ in rows.steps] == ["reshape", "narrow", "reshape"]


def test_view_str() -> None:
    assert str(View("a.weight").then("narrow", 0, 2, 3)) == "a.weight.narrow(0, 2, 3)"


# Tracing


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "narrow": lambda t: t.narrow(0, 1, 3),
    "narrow, negative dim": lambda t: torch.narrow(t, -1, 2, 5),
    "narrow by keyword": lambda t: t.narrow(dim=1, start=1, length=2),
    "narrow to everything": lambda t: t.narrow(0, 0, 6),
    "select": lambda t: t.select(1, 2),
    "select, negative": lambda t: t.select(-1, -2),
    "select of several rows": lambda t: t.narrow(0, 2, 3)[1],
    "transpose": lambda t: t.transpose(0, 2),
    "transpose, negative": lambda t: torch.transpose(t, -1, -2),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "chunk": lambda t: torch.chunk(t, 3, dim=0),
    "chunk, uneven": lambda t: torch.chunk(t, 4, dim=-1),
    "split": lambda t: torch.split(t, 4, dim=0),
    "split by sizes": lambda t: t.split([1, 2, 3], dim=0),
    "split by keyword": lambda t: t.split(split_size=[3, 7], dim=2),
    "split_with_sizes": lambda t: t.split_with_sizes([4, 2]),
    "unbind": lambda t: torch.unbind(t, dim=1),
    "iteration": lambda t: tuple(t),
    "squeeze": lambda t: t.narrow(1, 2, 1).squeeze(1),
    "squeeze, negative": lambda t: t.narrow(2, 2, 1).squeeze(-1),
    "squeeze larger dim": lambda t: t.squeeze(1),
    "squeeze after reshape": lambda t: t.reshape(6, 1, 40).squeeze(1),
    "squeeze after reshape, negative": lambda t: t.reshape(6, 40, 1).squeeze(-1),
    "squeeze after select": lambda t: t.narrow(0, 1, 1).select(1, 2).squeeze(0),
    "reshape": lambda t: t.reshape(24, 10),
    "reshape, inferred": lambda t: t.reshape(-1, 5),
    "reshape from a tuple": lambda t: t.reshape((3, 2, 40)),
    "view": lambda t: t.view(60, 4),
    "rows in another order": lambda t: t.view(2, 3, 4, 10).transpose(0, 1).reshape(6, 4, 10),
    "getitem": lambda t: t[2],
    "getitem, negative": lambda t: t[-1],
    "getitem, slice": lambda t: t[1:4],
    "getitem, several": lambda t: t[:, 1, 2:],
    "getitem, open slice": lambda t: t[-2:],
    "getitem, ellipsis": lambda t: t[...],
    "contiguous": lambda t: t.contiguous().detach().clone(),
    "cat of neighbors": lambda t: torch.cat(t.chunk(3, dim=0), dim=0),
    "cat of inner neighbors": lambda t: torch.cat(t.split([3, 7], dim=2), dim=-1),
    "cat of others": lambda t: torch.cat([t[3:], t[:3]]),
    "cat along another dim": lambda t: torch.cat(t.chunk(2, dim=0), dim=1),
    "cat of transposed": lambda t: torch.cat([t[:2].transpose(1, 2), t[2:].transpose(1, 2)]),
    "cat, nested": lambda t: torch.cat([torch.cat([t[4:], t[:1]]), t[1:4]]),
    "stack": lambda t: torch.stack([t[:2], t[3:5]], dim=1),
    "stack of one tensor twice": lambda t: torch.stack([t, t]),
    "unsqueeze": lambda t: t[None].unsqueeze(-1),
    "permute": lambda t: t.permute(2, 0, 1),
    "movedim": lambda t: t.movedim(0, -1),
    "t": lambda t: t[0].t(),
    "integer indexing": lambda t: t[:, [0, 3]],
    "integer indexing, a run": lambda t: t[:, [1, 2, 3]],
    "integer indexing, negative and repeated": lambda t: t[torch.tensor([-1, 0, -1])],
    "index_select": lambda t: t.index_select(2, torch.tensor([4, 9, 0])),
    "new_zeros": lambda t: torch.cat([t, t.new_zeros(2, *t.shape[1:])]),
    "zeros_like": lambda t: torch.cat([torch.zeros_like(t), t], dim=2),
    "pad": lambda t: nn.functional.pad(t, (1, 2, 0, 0, 3, 0)),
    "joined, narrowed": lambda t: torch.cat([t[4:], t[:3]])[1:4],
    "joined, narrowed to a part": lambda t: torch.cat([t[4:], t[:3]])[:2],
    "joined, selected": lambda t: torch.cat([t[4:], t[:3]])[3],
    "joined, selected across": lambda t: torch.cat([t[4:], t[:3]])[:, 2],
    "joined, transposed": lambda t: torch.cat([t[4:], t[:3]]).transpose(0, 2),
    "joined, flattened": lambda t: torch.cat([t[:, 3:], t[:, :1]], dim=1).flatten(0, 1),
    "joined, flattened whole": lambda t: torch.cat([t[:, 3:], t[:, :1]], dim=1).flatten(),
    "joined, unflattened": lambda t: torch.cat([t[4:], t[:3]]).unflatten(2, (2, 5)),
    "joined, split": lambda t: torch.cat([t[:2], t[4:]]).reshape(2, 2, 4, 10),
    "joined, split across parts": lambda t: torch.cat([t[:1], t[2:]]).reshape(-1).unflatten(0, (2, 5, 5, 4)),
    "joined, interleaved": lambda t: torch.cat([t[:3], t[3:]][::-1]).unflatten(0, (2, 3)).transpose(0, 1).flatten(0, 1),
    "joined, integer indexing": lambda t: t[:, [0, 3]].flatten(0, 1),
    "empty, reshaped": lambda t: t[:0].reshape(0, 40),
    "empty, joined and reshaped": lambda t: torch.stack([t[:0], t[1:1]], dim=1).reshape(0, 40),
    "padded, flattened": lambda t: torch.cat([t, t.new_zeros(6, 1, 10)], dim=1).flatten(0, 1),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_tracing_matches_torch(operation: Callable[[torch.Tensor], Any]) -> None:
    tensor = numbered(*SHAPE)
    expected, actual = operation(tensor), operation(traced())
    if isinstance(expected, torch.Tensor):
        expected, actual = (expected,), (actual,)
    assert len(actual) == len(expected)
    for have, want in zip(actual, expected, strict=True):
        assert tuple(have.shape) == tuple(want.shape)
        assert torch.equal(read(have, w=tensor), want)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: torch.add(t, 1),
        lambda t: t.float() * 2,
        lambda t: t * 2,
        lambda t: 1 - t,
        lambda t: t @ t.transpose(1, 2),
        lambda t: t.flip(0),
        lambda t: t[::2],
        lambda t: t[torch.tensor([0, 1]), torch.tensor([0, 1])],
        lambda t: t[torch.tensor([[0, 1]])],
        lambda t: nn.functional.pad(t, (1, 0), value=1.0),
        lambda t: t.repeat(2, 1, 1),
    ],
)
def test_tracing_unsupported_operations_raises(operation: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(NotAViewError, match="view"):
        operation(traced())


def test_index_out_of_bounds_raises() -> None:
    for index in (6, -7):
        with pytest.raises(IndexError, match=f"index {index} is out of bounds for dimension 0 with size 6"):
            traced()[index]
        with pytest.raises(IndexError, match="out of range"):
            traced().select(0, index)
    with pytest.raises(IndexError, match="out of range"):
        traced().transpose(0, 3)
    with pytest.raises(RuntimeError, match="split_with_sizes expects"):
        traced().split([1, 2])


def test_cat_of_contiguous_views_is_one_view() -> None:
    parts = traced().split([1, 2, 3], dim=0)
    assert torch.cat(parts).pieces == (Piece(View("w").then("narrow", 0, 0, 6)),)
    assert torch.cat(parts[1:]).pieces == (Piece(View("w").then("narrow", 0, 1, 5)),)
    assert len(torch.cat(parts[::-1]).pieces) == 3
    assert len(torch.cat([traced("a")[:2], traced("b")[2:]]).pieces) == 2  # adjacent, but not contiguous


def test_tensor_of_two_parameters() -> None:
    left, right = numbered(2, 3), -numbered(4, 3)
    joined = torch.cat([traced("left", (2, 3)), traced("right", (4, 3))])
    tensor = HFTensor("t", (6, 3), joined.pieces)
    assert tensor.parameters == ("left", "right")
    assert tensor.view is None
    complete = torch.cat([left, right])
    assert torch.equal(tensor.read({"left": left, "right": right}), complete)
    target = torch.zeros(4, 3)
    tensor.write_into("right", target, complete)
    assert torch.equal(target, right)
    transposed = joined.transpose(0, 1)
    swapped = HFTensor("t", tuple(transposed.shape), transposed.pieces)
    assert torch.equal(swapped.read({"left": left, "right": right}), complete.t())
    swapped.write_into("right", target.zero_(), complete.t())
    assert torch.equal(target, right)


def test_complete_view_reads_same_tensor() -> None:
    tensor = numbered(*SHAPE)
    assert HFTensor("t", SHAPE, (Piece(View("w")),)).read({"w": tensor}) is tensor
