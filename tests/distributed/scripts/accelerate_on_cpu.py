"""Run `examples/accelerate_fsdp2.py` on CPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import accelerate_fsdp2
import fsdp_on_cpu  # noqa: F401  FSDP on CPUs
from accelerate import Accelerator

accelerator = Accelerator()
assert accelerator.is_fsdp2
losses = accelerate_fsdp2.main(accelerator)
Path(f"{os.environ['LOSSES']}.{accelerator.process_index}").write_text(json.dumps(losses))
accelerator.wait_for_everyone()
accelerator.end_training()  # otherwise gloo may abort the last rank, because its connections are gone
