"""Keeping the caller's random states: those of Python's, numpy's and torch's generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

TorchState = tuple[torch.Tensor, list[torch.Tensor]]
"""Random states of torch's CPU generator, and of those of CUDA devices, none before CUDA is initialised."""


def torch_random_state() -> TorchState:
    """The present states of torch's generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_torch_random_state(state: TorchState) -> None:
    """Go back to some states of torch's generators."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states on leaving, whatever was seeded or drawn inside; also after an error.

    These are Python's, numpy's global and torch's default generators, of the CPU and of every CUDA device. CUDA is not
    initialised for that: a process that is forked later may have to do it.
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
            # Seeds that are set before CUDA is initialised wait until then: in general the seed that torch was given.
            torch.cuda.manual_seed_all(seed)
