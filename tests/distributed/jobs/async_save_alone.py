"""Save asynchronously in one process, and end in a certain way.

    python async_save_alone.py FOLDER exits | fails | stalls | forks

Saves a first version synchronously and a second one asynchronously. `exits` ends without waiting, `fails` has a full
disk, `stalls` prints a line and stops in the middle of the weights, and `forks` saves again in a fork.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))

from jobs.checkpoint import new
from nrl_models.common.checkpoint import tensor_files
from nrl_models.distributed import load_checkpoint, save_checkpoint
from nrl_models.distributed.resume_checkpoints.background import finish_last


def main(folder: str, end: str) -> None:
    """Save two versions."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if end == "loads":
        model, optimizer = new(7.0, fsdp=1)
        print(
            load_checkpoint(folder, model, optimizer)["step"], next(model.parameters()).full_tensor().unique().tolist()
        )
        save_checkpoint(folder, model, optimizer, {"step": 3})
        return
    save_checkpoint(folder, *new(1.0, fsdp=1), {"step": 1})
    model, optimizer = new(2.0, fsdp=1)
    write, chunks = tensor_files._write_all, 0

    def write_slowly(*arguments: Any) -> None:
        nonlocal chunks
        chunks += 1
        if chunks > 5 and end == "fails":
            raise OSError(errno.ENOSPC, "No space left on device")
        if chunks > 5 and end == "stalls":
            print("stalled", flush=True)
            time.sleep(600)
        time.sleep(0.02)
        write(*arguments)

    tensor_files._write_all = write_slowly
    save = save_checkpoint(folder, model, optimizer, {"step": 2}, wait=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    if end == "forks":
        if os.fork() == 0:
            finish_last(raising=True)
            os._exit(0)
        os.wait()
    print("not done" if not save.done() else "done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
