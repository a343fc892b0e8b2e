"""Preserve the caller's random states of Python, numpy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

TorchState = tuple[torch.Tensor, list[torch.Tensor]]
"""Random states of torch's CPU generator and of all CUDA devices (none before CUDA is initialized)."""


def torch_random_state() -> TorchState:
    """Return the current states of torch's generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_torch_random_state(state: TorchState) -> None:
    """Restore states of torch's generators."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states on exit, even after an error and regardless of seeds set inside.

    Covers Python's, numpy's global and torch's default generators on the CPU and all CUDA devices. Does not initialize
    CUDA, because a process that is forked later may have to do that.
    """
    python, legacy_numpy, state = random.getstate(), numpy.random.get_state(), torch_random_state()
    seed = torch.initial_seed()
    _, cuda = state
    try:
        yield
    finally:
        seeded = torch.initial_seed() != seed
        random.setstate(python)
        numpy.random.set_state(legacy_numpy)
        set_torch_random_state(state)
        if not cuda and (seeded or torch.cuda.is_initialized()):
            # Seeds set before CUDA is initialized are applied at initialization; usually it is torch's seed.
            torch.cuda.manual_seed_all(seed)
