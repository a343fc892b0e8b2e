"""Model checking of publishing: every pair of generations, thousands of schedules; see `tests.campaign.publishing`.

`make test` runs a subset, `tests/unit/checkpoint/test_publishing.py`.
"""

from __future__ import annotations

import os
import random
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.publishing import (
    Generation,
    after_kills,
    any_schedule,
    kill_at_every_call,
    make_generations,
    overlapped,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),  # about fork, since Python 3.12
    pytest.mark.timeout(3600),
    pytest.mark.long,
]

PAIRS = list(permutations(range(4), 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Generation]:
    return make_generations(tmp_path_factory.mktemp("generations"))


@pytest.fixture
def schedules(request: pytest.FixtureRequest) -> int:
    """Return the number of random schedules: a tenth of the number of damaged inputs per kind."""
    return request.config.getoption("--cases", 20_000) // 10


@pytest.mark.parametrize(("old", "new"), [*PAIRS, *((None, new) for new in range(4)), (2, 2)])
def test_save_killed_at_every_call(saved: list[Generation], old: int | None, new: int, tmp_path: Path) -> None:
    kill_at_every_call(tmp_path / "work", saved, old, new, following=(new + 1) % 4)


@pytest.mark.parametrize(("old", "new"), [(0, 2), (1, 3)])
def test_save_killed_at_every_call_without_hard_links(
    saved: list[Generation], old: int, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_permission_error(*_: Any, **__: Any) -> None:
        raise PermissionError("operation not permitted")

    monkeypatch.setattr(os, "link", raise_permission_error)
    kill_at_every_call(tmp_path / "work", saved, old, new, following=0)


@pytest.mark.parametrize("part", range(4))
def test_consecutive_killed_saves(saved: list[Generation], part: int, schedules: int, tmp_path: Path) -> None:
    for seed in range(part, schedules, 4):
        choose = random.Random(seed)
        writers = [(choose.randrange(4), choose.randrange(1, 50)) for _ in range(choose.randint(2, 4))]
        old = choose.choice([None, 0, 1, 2, 3])
        after_kills(tmp_path / "work", saved, old, writers, choose.randrange(4))


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_save_between_reader_calls(saved: list[Generation], old: int, new: int, tmp_path: Path) -> None:
    at, steps = 0, 0
    while at <= steps:
        found, steps, _ = overlapped(
            tmp_path / "work", saved, (old, new), lambda step, at=at: 1000 if step == at else 0, at
        )
        assert found is not None
        at += 1


def test_partial_save_between_reader_calls(saved: list[Generation], tmp_path: Path) -> None:
    """The writer makes `first` calls before the reader starts, and `more` before one call of the reader."""
    _, steps, calls = overlapped(tmp_path / "work", saved, (2, 1), lambda step: 0)
    for first, step, more in product(range(0, calls, 3), range(1, steps + 1, 2), (1, 2, 4, 8, 16)):
        schedule = {0: first, step: more}
        overlapped(tmp_path / "work", saved, (2, 1), lambda at, schedule=schedule: schedule.get(at, 0))


@pytest.mark.parametrize("part", range(4))
def test_random_reader_writer_schedules(saved: list[Generation], part: int, schedules: int, tmp_path: Path) -> None:
    for seed in range(part, schedules, 4):
        choose = random.Random(seed)
        schedule = any_schedule(choose, often=[0.02, 0.05, 0.2, 0.6])
        old, new = choose.sample(range(4), 2)
        overlapped(tmp_path / "work", saved, (old, new), schedule, seed)
