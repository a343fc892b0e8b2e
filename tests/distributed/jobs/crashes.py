"""Kill the writer of a resume checkpoint at every step, and run a writer at every step of a reader.

    python crashes.py FOLDER

Steps are Python's audit events for files: opening, renaming, listing, removing. The world has one process. A killed
writer is a fork that exits as with SIGKILL. Prints each problem on a line.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nrl_models import registry
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.errors import CheckpointError
from nrl_models.testing.case import FamilyCase

MODEL = FamilyCase(registry.model_class("LlamaForCausalLM"), torch.device("cpu"), {"num_hidden_layers": 1}).model()
MODEL.state_dict_adapter  # noqa: B018  transformers creates its table of names once, so before the forks

_hooks: list[Callable[[str], None]] = []


def _record_step(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        _hooks
        and event.split(".")[0] in ("open", "os", "shutil")
        and any("/steps" in str(each) for each in arguments[:2])
    ):
        _hooks[-1](f"{event}: {' '.join(map(str, arguments[:2]))}")


@contextmanager
def at_step(number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """Call `act` before one of the following steps. Yields the list of steps."""
    steps: list[str] = []

    def count(step: str) -> None:
        steps.append(step)
        if len(steps) == number:
            _hooks.append(lambda step: None)  # ignore the steps of `act`
            try:
                act()
            finally:
                _hooks.pop()

    _hooks.append(count)
    try:
        yield steps
    finally:
        _hooks.remove(count)


class Stopped(BaseException):
    """Ends a writer. It is not an Exception, so nothing catches it."""


@cache
def sharded_model(user: str) -> Any:
    """Create a model of this process: one for `writer`, one for `reader`, because a writer may run within a reader."""
    return parallelize(copy.deepcopy(MODEL), init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))


def values(number: int, user: str) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model, its configuration and a new optimizer in which every value is `number`."""
    model = sharded_model(user)
    model.config.bos_token_id = number
    optimizer = torch.optim.AdamW(model.parameters(), lr=number)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, number)
        state = torch.full_like(parameter.detach(), number)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(number)),
            "exp_avg": state,
            "exp_avg_sq": state.clone(),
        }
    return model, optimizer


def save(folder: Path, number: int) -> None:
    save_checkpoint(folder, *values(number, "writer"), {"step": number})


def load(folder: Path) -> set[float]:
    """Return the smallest and the largest value of each tensor in a checkpoint, its step and learning rate."""
    model, optimizer = values(99, "reader")
    distinct = {load_checkpoint(folder, model, optimizer)["step"], optimizer.param_groups[0]["lr"]}
    for state in (model.state_dict(), *optimizer.state.values()):
        for tensor in state.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            distinct |= {local.min().item(), local.max().item()}
    return distinct


def forked(job: Callable[[], None]) -> int:
    """Run a job in a fork. Returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            begin()
            job()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def begin() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def kill_at_every_step(folder: Path) -> int:
    """Save a second version over a first, and kill it before each of its steps. Returns the number of steps."""
    assert forked(lambda: save(folder / "steps", 1)) == 0
    number = 0
    while True:
        number += 1
        case = folder / f"{number}" / "steps"
        shutil.copytree(folder / "steps", case)

        def killed(case: Path = case, number: int = number) -> None:
            with at_step(number, lambda: os._exit(9)):
                save(case, 2)

        if (status := forked(killed)) != 9:
            assert status == 0
            return number - 1


def check(folder: Path, count: int) -> None:
    """Check that checkpoints of killed writers load, and that the next save removes their files."""
    seen = set()
    for number in range(1, count + 1):
        case = folder / f"{number}" / "steps"
        loaded = load(case)
        seen |= loaded
        if loaded not in ({1}, {2}):
            print(f"killed before step {number}: values of {loaded}")
        save(case, 3)
        (version, *others) = case.iterdir()
        expected = {
            "manifest.json",
            "config.json",
            "weights-00000-00000.safetensors",
            "optimizer-00000-00000.safetensors",
        }
        if others or {path.name for path in version.iterdir()} != expected:
            print(f"killed before step {number}: the next save leaves {sorted(map(str, case.rglob('*')))}")
        if (loaded := load(case)) != {3}:
            print(f"killed before step {number}: the next save has {loaded}")
    if seen != {1, 2}:
        print(f"killed writers left only {seen}")


def overlap(folder: Path) -> None:
    """Before each step of a reader, run a writer completely, or up to a step that readers can observe."""
    base = folder / "base" / "steps"
    save(base, 1)
    with at_step(0, lambda: None) as writing:
        save(base, 2)
    seen_by_others = [
        number for number, step in enumerate(writing, 1) if "/version-" in step and not step.startswith("open")
    ]
    with at_step(0, lambda: None) as reading:
        load(base)
    outcomes: dict[str, int] = {}
    for reader in range(1, len(reading) + 1):
        for writer in (*seen_by_others, len(writing) + 1):
            shutil.rmtree(base)
            save(base, 1)

            def write(writer: int = writer) -> None:
                def stop() -> None:
                    raise Stopped

                try:
                    with at_step(writer, stop):
                        save(base, 2)
                except Stopped:
                    pass

            try:
                with at_step(reader, write):
                    loaded = load(base)
                outcome = str(sorted(loaded))
                if loaded not in ({1}, {2}):
                    print(f"read {outcome}: a writer took {writer} steps before the reader's {reader}")
            except CheckpointError as error:
                outcome = type(error).__name__
                if writer > len(writing) and "was saved while version-1 was read: load again" not in str(error):
                    print(f"writer {writer}, reader {reader}: {error}")
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(f"# {len(reading)} steps of a reader, {len(seen_by_others) + 1} of a writer: {outcomes}")


def main(folder: Path) -> None:
    logging.disable()
    sys.addaudithook(_record_step)
    count = kill_at_every_step(folder / "kills")
    print(f"# killed at {count} steps")
    begin()
    check(folder / "kills", count)
    overlap(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
