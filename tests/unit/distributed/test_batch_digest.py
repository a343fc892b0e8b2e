"""Digests that compare the batches of several ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from nrl_models.distributed.batch_checks import exact_digest

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool]


def digest(*values: float) -> int:
    return int(exact_digest(torch.tensor(values)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_depends_on_row_order(dtype: torch.dtype) -> None:
    value = (torch.arange(24).view(2, 3, 4) % 7 > 2).to(dtype)
    assert int(exact_digest(value)) == int(exact_digest(value.clone()))
    assert int(exact_digest(value)) != int(exact_digest(value.flip(0)))


def test_digest_distinguishes_permutations() -> None:
    """With position weights that are linear, about half of the permutations collided."""
    assert len({digest(*values) for values in itertools.permutations(range(7))}) == 5040
    assert len({digest(*map(float, values)) for values in itertools.permutations(range(6))}) == 720


def test_digest_distinguishes_masks_with_inf() -> None:
    assert len({digest(*values) for values in itertools.product((0.0, float("-inf")), repeat=10)}) == 1024
    assert digest(float("nan"), 1.0) == digest(float("nan"), 1.0)


def test_digest_is_independent_of_memory_layout() -> None:
    value = torch.randn(3, 4)
    assert int(exact_digest(value.T)) == int(exact_digest(value.T.contiguous()))
    assert int(exact_digest(value[:, ::2])) == int(exact_digest(value[:, ::2].clone()))
