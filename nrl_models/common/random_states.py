"""Random numbers of those who call: Python's, numpy's and torch's generators, put back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Whatever is seeded or drawn inside, afterwards the random states are those of before; also after an error.

    Held are Python's, numpy's global and torch's default generators, of the CPU and of every CUDA device. CUDA is not
    initialised for that: it may have to be by a process yet to be forked.
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
            # What CUDA is asked before it is initialised waits for that: the seed that torch was given, in general.
            torch.cuda.manual_seed_all(seed)
