"""Save asynchronously in one process, and end in a certain way.

    python async_save_alone.py

Each line of stdin is a list in JSON: the arguments of `main`. A fork of this process runs it and exits like a script.
Its exit status, stdout and stderr are printed as a list in JSON. A new interpreter would import torch for ten seconds.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
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
    """Save a first version synchronously and a second one asynchronously, or load a version and save the next.

    Args:
        folder: The folder of the versions.
        end: `exits` ends without waiting, `fails` has a full disk, `is killed` ends in the middle of the weights,
            `forks` saves again in a fork, and `loads` loads.
    """
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
        if chunks > 5 and end == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
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


def serve() -> None:
    """Fork for each line. Also returns in each fork."""
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            if (child := os.fork()) == 0:
                os.dup2(output.fileno(), sys.stdout.fileno())
                os.dup2(errors.fileno(), sys.stderr.fileno())
                main(*json.loads(line))
                return
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in (output, errors):
                file.seek(0)
            print(json.dumps([status, output.read(), errors.read()]), flush=True)


if __name__ == "__main__":
    serve()
