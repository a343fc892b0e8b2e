"""Moving blocks through views: every element of a block ends at its position in the view."""

from __future__ import annotations

import random

import pytest
import torch

from nrl_models.common.views.view import View, apply_steps
from nrl_models.common.views.view_blocks import Block, through

VIEWS = {
    "identity": View("p"),
    "rows": View("p").then("narrow", 0, 4, 8),
    "one matrix of a stack": View("p").then("reshape", 4, 6, 8).then("select", 0, 2),
    "half of a matrix of a stack": View("p").then("reshape", 4, 6, 8).then("select", 0, 3).then("narrow", 0, 3, 3),
    "transposed": View("p").then("transpose", 0, 1).then("narrow", 0, 1, 5),
    "rows from each of two ranks": View("p").then("reshape", 2, 12, 8).then("narrow", 1, 3, 6).then("reshape", 12, 8),
    "packed rows in order": (
        View("p").then("reshape", 3, 2, 4, 8).then("transpose", 0, 1).then("reshape", 24, 8).then("narrow", 0, 2, 20)
    ),
    "rotary rows": View("p").then("reshape", 3, 4, 2, 8).then("transpose", 1, 2).then("reshape", 24, 8),
    "flat": View("p").then("reshape", 192),
    "regrouped": View("p", (("reshape", (8, 3, 8)), ("reshape", (4, 6, 8)), ("reshape", (12, 16)))),
    "dimensions of size one": View("p", (("reshape", (24, 1, 8, 1)), ("reshape", (1, 24, 8)))),
}
SHAPE = (24, 8)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("seed", range(12))
def test_blocks_match_view_of_region(view: View, seed: int) -> None:
    rng = random.Random(seed)
    whole = torch.arange(24 * 8).view(SHAPE)
    offset = tuple(rng.randrange(size) for size in SHAPE) if seed else (0, 0)
    size = tuple(rng.randint(1, size - start) for size, start in zip(SHAPE, offset, strict=True)) if seed else SHAPE
    region = Block(offset, torch.empty(size))
    local = region.of(whole).clone()
    seen = view.of(whole)
    found = torch.full_like(seen, -1)
    for block in through(view.steps, SHAPE, Block(offset, local)):
        assert block.tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert (block.of(found) == -1).all(), "two blocks overlap"
        block.of(found).copy_(block.tensor)
    inside = torch.zeros(SHAPE, dtype=torch.bool)
    region.of(inside).fill_(True)
    expected = torch.where(apply_steps(inside, view.steps), seen, -1)
    assert torch.equal(found, expected)


def test_writes_to_block_change_shard() -> None:
    shard = torch.zeros(12, 8)  # the second rank's rows
    steps = VIEWS["rows from each of two ranks"].steps
    (block,) = through(steps, SHAPE, Block((12, 0), shard))
    block.tensor.fill_(1)
    assert block.offset == (6, 0)
    assert shard.sum() == 6 * 8
    assert (shard[3:9] == 1).all()


def test_block_copies_to_and_from_larger_tensors() -> None:
    whole = torch.randn(400, 90)
    block = Block((30, 10), torch.randn(70, 300).t())
    before = whole.clone()
    block.take_from(whole)
    assert torch.equal(block.tensor, whole[30:330, 10:80])
    block.tensor.neg_()
    block.of(whole).copy_(block.tensor)
    assert torch.equal(whole[30:330, 10:80], -before[30:330, 10:80])
    whole[30:330, 10:80] = before[30:330, 10:80]
    assert torch.equal(whole, before)
