"""Keeping the caller's random states: those of Python's, numpy's and torch's generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states on leaving, whatever was seeded or drawn inside; also after an error.

    These are Python's, numpy's global and torch's default generators, of the CPU and of every CUDA device. CUDA is not
    initialised for that: a process that is forked later may have to do it.
    """
    python, legacy_numpy, cpu = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()
    seed = torch.initial_seed()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        seeded = torch.initial_seed() != seed
        random.setstate(python)
        numpy.random.set_state(legacy_numpy)
        torch.random.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        elif seeded or torch.cuda.is_initialized():
            # Seeds that are set before CUDA is initialised wait until then: in general the seed that torch was given.
            torch.cuda.manual_seed_all(seed)
