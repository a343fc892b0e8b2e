"""One attention, without and with a group."""

from __future__ import annotations

import pytest
import torch
from toy_attention import Attention, CombinedAttention, combined_from, inputs


@pytest.fixture
def plain() -> Attention:
    torch.manual_seed(0)
    return Attention()


@pytest.fixture
def combined(plain: Attention) -> CombinedAttention:
    return combined_from(plain)


@pytest.fixture
def x() -> torch.Tensor:
    return inputs()
