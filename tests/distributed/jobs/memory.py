"""Measure the memory of a rank, and the bytes that it sends."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode


def anonymous() -> int:
    """Return this process's anonymous memory (without a file behind it) in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Peak:
    """Record the largest increase in anonymous memory within a `with` block."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # returns memory of earlier jobs, which would otherwise be reused unnoticed
        self.base, self.peak, self.done = anonymous(), 0, False
        self.watcher = threading.Thread(target=self._watch)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while not self.done:
            self.peak = max(self.peak, anonymous() - self.base)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.done = True
        self.watcher.join()
        self.peak = max(self.peak, anonymous() - self.base)  # on a busy machine, the watcher may have slept until now


class Sent(TorchDispatchMode):
    """Count the bytes this rank sends within a `with` block, by mesh dimension. Each collective counts as a ring."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.names = {mesh.get_group(dim).group_name: (name,) for dim, name in enumerate(mesh.mesh_dim_names)}
        self.sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        self.nbytes = dict.fromkeys(mesh.mesh_dim_names, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):  # FSDP's: (output, input, ...)
            if not args[0].is_floating_point():  # sizes and bytes of gathered objects, from torch 2.15 on
                return result
            self.nbytes["fsdp"] += min(args[0].nbytes, args[1].nbytes) * (self.sizes["fsdp"] - 1)
        elif name.startswith("_c10d_functional::") and not ("wait" in name or "wrap" in name):
            groups = [self.names[arg] for arg in args if isinstance(arg, str) and arg in self.names]
            # A group of all dimensions together, which torch creates if something has flattened such a mesh. It is
            # equivalent to one collective per dimension.
            for dim in groups[0] if groups else tuple(self.sizes):
                others = self.sizes[dim] - 1
                if "all_reduce" in name:
                    self.nbytes[dim] += 2 * args[0].nbytes * others // self.sizes[dim]
                elif groups and ("all_gather" in name or "reduce_scatter" in name):
                    self.nbytes[dim] += min(args[0].nbytes, result.nbytes) * others
                else:
                    raise AssertionError(f"{name} is not counted")
        return result
