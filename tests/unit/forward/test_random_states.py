"""Random states are unaffected by code that seeds or draws random numbers."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from nrl_models.common.forward.random_states import random_states_kept


def drawn() -> tuple[float, float, float]:
    """Draw a number from each generator."""
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def disturb() -> None:
    """Seed and draw as vLLM does at startup."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    drawn()


@pytest.fixture(params=[1, 0])
def expected(request: pytest.FixtureRequest) -> tuple[float, float, float]:
    """Return the next numbers. 0 is also the seed in `disturb`."""

    def begin() -> None:
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(request.param)
        drawn()

    begin()
    following = drawn()
    begin()
    return following


def test_random_states_are_restored(expected: tuple[float, float, float]) -> None:
    with random_states_kept():
        disturb()
    assert drawn() == expected


def test_random_states_are_restored_after_error(expected: tuple[float, float, float]) -> None:
    @random_states_kept()
    def fails() -> None:
        disturb()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fails()
    assert drawn() == expected


class FakeCuda:
    """The part of `torch.cuda` that is used."""

    def __init__(self, initialized: bool) -> None:
        self.initialized, self.state, self.seeds = initialized, ["state"], []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", self.get)
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda state: setattr(self, "state", state))
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.seeds.append)

    def get(self) -> list[str]:
        assert self.initialized, "initializes CUDA"
        return self.state


def test_cuda_state_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(initialized=True)
    cuda.install(monkeypatch)
    with random_states_kept():
        cuda.state = ["moved"]
    assert cuda.state == ["state"]


@pytest.mark.parametrize("initialized_inside", [False, True])
def test_uninitialized_cuda(monkeypatch: pytest.MonkeyPatch, initialized_inside: bool) -> None:
    torch.manual_seed(9)
    cuda = FakeCuda(initialized=False)
    cuda.install(monkeypatch)
    with random_states_kept():
        torch.manual_seed(3)
        cuda.initialized = initialized_inside
    assert cuda.seeds[-1] == 9
    cuda.seeds.clear()
    cuda.initialized = False
    with random_states_kept():
        torch.rand(3)
    assert not cuda.seeds  # nothing was seeded, so CUDA is not called
