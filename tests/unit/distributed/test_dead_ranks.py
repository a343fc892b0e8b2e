"""Errors of a collective and of this rank's own computation."""

from __future__ import annotations

import pytest
import torch

from nrl_models.distributed.mesh import reporting_dead_ranks
from nrl_models.errors import ShardingError


def test_failed_collective_names_the_other_rank() -> None:
    with pytest.raises(ShardingError, match="a rank that this one waited for: is gone"), reporting_dead_ranks("save"):
        raise RuntimeError("Connection closed by peer")


def test_out_of_memory_is_not_another_rank() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"), reporting_dead_ranks("save"):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")
