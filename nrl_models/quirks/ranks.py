"""Ranks that are not there: one process that takes itself for the first of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended_mesh(ranks: int, name: str = "tp") -> Iterator[DeviceMesh]:
    """A mesh of one dimension, whose collectives do nothing. Tensors are divided as they would be, and not exchanged.

    Raises:
        RuntimeError: there are ranks already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group()
