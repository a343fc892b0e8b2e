"""Asynchronous resume checkpoints."""

from __future__ import annotations

import copy
import errno
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobs.checkpoint import new, values_of
from jobs.setting import case_of, local, mesh_of, train
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.distributed.resume_checkpoints import resume as resuming
from nrl_models.distributed.resume_checkpoints import version_writing
from nrl_models.distributed.resume_checkpoints.manifest import WrittenFile, read_manifest
from nrl_models.errors import SaveError, ShardingError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "none": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


@contextmanager
def held_back() -> Iterator[None]:
    """Context manager in which background threads do not write. They write when it ends."""
    write, released = version_writing.write_blocks, threading.Event()

    def write_later(*arguments: Any) -> Any:
        assert released.wait(60)
        return write(*arguments)

    version_writing.write_blocks = write_later
    try:
        yield
    finally:
        released.set()
        version_writing.write_blocks = write


def saves_both_ways(
    folder: str, architecture: str, config: dict[str, Any], optimizer_name: str, **sizes: int
) -> dict[str, bool]:
    """Save synchronously and asynchronously, and train before the second is written. Returns which files are equal."""
    case = case_of(architecture, config)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    train(model, optimizer, case, range(1))
    progress = {"step": 1, "history": [1]}
    now = save_checkpoint(f"{folder}/now", model, optimizer, progress).wait()
    before = state_of(model, optimizer)
    with held_back():
        save = save_checkpoint(f"{folder}/later", model, optimizer, progress, wait=False)
        train(model, optimizer, case, range(1, 3))  # collectives, and updates in place
        progress["history"].append(2)
        model.config.bos_token_id = 17
        optimizer.param_groups[0]["lr"] = 7.0
        assert not save.done()
    later = save.wait()
    after = train(model, optimizer, case, range(3, 4))
    assert progress != load_checkpoint(f"{folder}/later", model, optimizer) == {"step": 1, "history": [1]}
    resumed = state_of(model, optimizer)
    assert after != train(model, optimizer, case, range(3, 4))
    assert before.keys() == resumed.keys()
    assert all(torch.equal(before[name], resumed[name]) for name in before)
    names = sorted(path.name for path in now.iterdir())
    assert names == sorted(path.name for path in later.iterdir())
    return {name: (now / name).read_bytes() == (later / name).read_bytes() for name in names}


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a copy of this rank's shards of all tensors, and of the learning rates."""
    values = {name: torch.as_tensor(value) for name, value in values_of(model, optimizer).items()}
    rates = {f"lr of {number}": torch.tensor(group["lr"]) for number, group in enumerate(optimizer.param_groups)}
    return {name: local(value).clone() for name, value in (values | rates).items()}


def frees_the_copy(folder: str, **sizes: int) -> tuple[int, int, int]:
    """Return the bytes of this rank's state, those of the copy, and the number of copies left after the save."""
    model, optimizer = new(1.0, **sizes)
    copies: list[weakref.ref[torch.Tensor]] = []
    sizes_of_copies: list[int] = []
    copied = resuming.copied

    def recording_copy(blocks: Any) -> Any:
        blocks_copied = copied(blocks)
        copies.extend(weakref.ref(block.tensor) for _, block in blocks_copied)
        sizes_of_copies.extend(block.tensor.untyped_storage().nbytes() for _, block in blocks_copied)
        return blocks_copied

    resuming.copied = recording_copy
    try:
        save = save_checkpoint(folder, model, optimizer, wait=False)
        save.wait()
    finally:
        resuming.copied = copied
    for thread in threading.enumerate():
        if thread.name == "nrl_models-save":
            thread.join()
    gc.collect()
    state = sum(local(tensor).nbytes for tensor in values_of(model, optimizer).values() if tensor.ndim)
    return state, sum(sizes_of_copies), sum(copy() is not None for copy in copies)


def fails(folder: str, raised_by: str, **sizes: int) -> list[str]:
    """Fail to write on rank 1 in the background. Returns what is raised by `wait()` or the next save, in turn."""
    model, optimizer = new(1.0, **sizes)
    write = version_writing.write_blocks
    raised: list[str] = []

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_checkpoint(folder, model, optimizer, {"step": 1})
    if dist.get_rank() == 1:
        version_writing.write_blocks = full
    try:
        save = save_checkpoint(folder, model, optimizer, {"step": 2}, wait=False)
        if raised_by == "wait" or (raised_by == "wait on one rank" and dist.get_rank() == 1):
            with pytest.raises((SaveError, ShardingError)) as caught:
                save.wait()
            raised.append(f"wait: {type(caught.value).__name__}: {caught.value}")
        while not save.done():
            time.sleep(0.01)
    finally:
        version_writing.write_blocks = write
    assert load_checkpoint(folder, model, optimizer) == {"step": 1}
    for step in (3, 4):
        try:
            save_checkpoint(folder, model, optimizer, {"step": step}, wait=step == 4)
        except (SaveError, ShardingError) as error:
            raised.append(f"save {step}: {type(error).__name__}: {error}")
    assert load_checkpoint(folder, model, optimizer) == {"step": 4}
    assert len(list(Path(folder).iterdir())) == 1
    return raised


def opened_for_reading(folder: str, **sizes: int) -> list[str]:
    """Return the weights and states that Python opens for reading while it saves."""
    model, optimizer = new(1.0, **sizes)
    opened: list[str] = []

    def record_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and recording and str(arguments[0]).endswith(".safetensors") and arguments[1] == "r":
            opened.append(str(arguments[0]))

    recording = True
    sys.addaudithook(record_open)
    version = save_checkpoint(folder, model, optimizer).wait()
    recording = False
    files = read_manifest(version).files
    assert all(WrittenFile.of(version / name) == written for name, written in files.items())
    return opened
