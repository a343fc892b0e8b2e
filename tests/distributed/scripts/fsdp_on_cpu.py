"""Make accelerate run FSDP on a CPU. It supports only accelerators, so importing this module patches it."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_begin = AcceleratorState.__init__


def _begin_with_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin  # created from the environment of `accelerate launch`


AcceleratorState.__init__ = _begin_with_fsdp  # type: ignore[method-assign]
