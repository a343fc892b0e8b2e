"""`examples/accelerate_fsdp2.py` on processors: accelerate has FSDP on accelerators only, so it is told this is one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import accelerate_fsdp2

accelerator = Accelerator()
assert accelerator.distributed_type == DistributedType.MULTI_CPU, accelerator.distributed_type
accelerator.state.fsdp_plugin = (
    FullyShardedDataParallelPlugin()
)  # from what `accelerate launch` put into the environment
accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
assert accelerator.is_fsdp2
losses = accelerate_fsdp2.main(accelerator)
Path(f"{os.environ['LOSSES']}.{accelerator.process_index}").write_text(json.dumps(losses))
accelerator.wait_for_everyone()
accelerator.end_training()  # or gloo may abort the rank that ends last, whose connections are then gone
