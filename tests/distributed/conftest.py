"""Process groups of two and four processes, kept for the session, and checkpoints of tiny models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # also for the worker processes


def _world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.close()


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    """A world of two processes."""
    yield from _world(2)


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """A world of four processes."""
    yield from _world(4)
