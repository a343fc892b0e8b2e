"""accelerate has FSDP on accelerators only: imported, this tells it that a processor is one."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_begin = AcceleratorState.__init__


def _begin_with_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin  # made from what `accelerate launch` put into the environment


AcceleratorState.__init__ = _begin_with_fsdp  # type: ignore[method-assign]
