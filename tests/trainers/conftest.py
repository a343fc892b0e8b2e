"""Tests of trainers. Each file needs an environment with its trainer (`make test-trainers`), or is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

UPSTREAM_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "slow",
    "torch_compile_test",
)
"""Markers that transformers' tests use."""


def pytest_configure(config: pytest.Config) -> None:
    for marker in UPSTREAM_MARKERS:
        config.addinivalue_line("markers", f"{marker}: used by transformers' tests")


@pytest.fixture
def one_process() -> Iterator[None]:
    """Initialize a process group with only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
