"""Saves and loads of resume checkpoints, of nrl_models and torch's DCP, in forked ranks.

Used by `benchmarks.save_resume`: `python -m benchmarks.resume_worker time|kill RANKS SIZE RUNS` prints a JSON object.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from nrl_models import registry
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint

SIZES: dict[str, dict[str, Any]] = {
    "large": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
}

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FRACTIONS = (0.2, 0.4, 0.6, 0.8)
"""When ranks are killed, as fractions of the time that the save takes."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return DCP's state dict of a model and an optimizer: tensors and numbers by name."""
    own, states = get_state_dict(model, optimizer, options=FLAT)
    return {**{f"model.{name}": value for name, value in own.items()}, **states}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the part of `state_of` that a safetensors file can store."""
    return {name: value for name, value in state_of(model, optimizer).items() if isinstance(value, torch.Tensor)}


def dcp_save(folder: Path, model: Any, optimizer: Any, *, fsync: bool = True) -> None:
    dcp.save(state_of(model, optimizer), storage_writer=dcp.FileSystemWriter(folder, sync_files=fsync))


def dcp_async(folder: Path, model: Any, optimizer: Any) -> Callable[[], object]:
    future = dcp.async_save(state_of(model, optimizer), storage_writer=dcp.FileSystemWriter(folder))
    assert isinstance(future, Future)
    return future.result


def dcp_safetensors(folder: Path, model: Any, optimizer: Any) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors_of(model, optimizer)), storage_writer=writer)


def ours(folder: Path, model: Any, optimizer: Any, *, fsync: bool = True, wait: bool = True) -> Callable[[], object]:
    os.environ["NRL_MODELS_FSYNC"] = str(int(fsync))
    return save_checkpoint(folder, model, optimizer, {"step": 1}, wait=wait).wait


SAVES: dict[str, Callable[[Path, Any, Any], Callable[[], object] | None]] = {
    "`save_checkpoint`": ours,
    "`save_checkpoint`, no fsync": lambda *arguments: ours(*arguments, fsync=False),
    "`save_checkpoint(wait=False)`": lambda *arguments: ours(*arguments, wait=False),
    "DCP `save`": dcp_save,
    "DCP `save`, no fsync": lambda *arguments: dcp_save(*arguments, fsync=False),
    "DCP `async_save`": dcp_async,
    "DCP `save`, safetensors": dcp_safetensors,
}
BASELINE = "DCP `save`"


def loaded(name: str, folder: Path, model: Any, optimizer: Any) -> None:
    """Load what a save wrote."""
    if "DCP" not in name:
        load_checkpoint(folder, model, optimizer)
        return
    is_safetensors = "safetensors" in name
    state = dict(tensors_of(model, optimizer) if is_safetensors else state_of(model, optimizer))
    reader = dcp.HuggingFaceStorageReader(str(folder)) if is_safetensors else dcp.FileSystemReader(folder)
    dcp.load(state, storage_reader=reader)  # in place


def filled(model: Any, value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a copy of a model over all ranks, and create its optimizer. Every value is `value`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = parallelize(copy.deepcopy(model), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    fill(model, optimizer, value)
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set all parameters and states to a value."""
    for tensor in tensors_of(model, optimizer).values():
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(value)


def forks(ranks: int, job: Callable[[int], None]) -> list[int]:
    """Run a job in forked ranks, which are connected by gloo. Returns their process IDs."""
    store = Path(tempfile.mkdtemp(dir=".")) / "store"
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                dist.init_process_group("gloo", init_method=f"file://{store.resolve()}", rank=rank, world_size=ranks)
                job(rank)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
            os._exit(code)
        processes.append(process)
    return processes


def finish(processes: list[int]) -> bool:
    """Wait for processes. Returns True if all of them succeeded."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    return not any(codes)


def measure(model: Any, ranks: int, runs: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Time all saves in turn, each over its previous one."""

    def job(rank: int) -> None:
        sharded, optimizer = filled(model, 1.0)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in SAVES}
        for run in range(runs + 1):  # the first warms up
            for number, (name, save) in enumerate(SAVES.items()):
                dist.barrier()
                if rank == 0:
                    os.sync()  # what others wrote does not count
                dist.barrier()
                started = time.perf_counter()
                wait = save(folder / f"{number}", sharded, optimizer)
                returned = time.perf_counter() - started
                if wait is not None:
                    wait()
                dist.barrier()
                complete = time.perf_counter() - started
                if run:
                    measured[name].append({"returns": returned, "complete": complete})
        if rank == 0:
            (folder / "measured.json").write_text(json.dumps(measured))

    assert finish(forks(ranks, job))
    return json.loads((folder / "measured.json").read_text())


def kill(model: Any, ranks: int, seconds: dict[str, float], folder: Path) -> dict[str, dict[str, int]]:
    """Kill all ranks while each save writes over its previous one, and count what loads afterwards."""
    outcomes: dict[str, dict[str, int]] = {}
    for name, duration in seconds.items():
        if "no fsync" in name:  # matters if power fails, not if a process is killed
            continue
        outcomes[name] = {}
        for fraction in FRACTIONS:
            target, go = folder / "saved", folder / "go"
            shutil.rmtree(target, ignore_errors=True)
            go.unlink(missing_ok=True)

            def save_twice(rank: int, name: str = name, target: Path = target, go: Path = go) -> None:
                sharded, optimizer = filled(model, 1.0)
                for value in (1.0, 2.0):
                    fill(sharded, optimizer, value)
                    dist.barrier()
                    if rank == 0 and value == 2.0:
                        go.touch()
                    wait = SAVES[name](target, sharded, optimizer)
                    if wait is not None:
                        wait()

            processes = forks(ranks, save_twice)
            while not go.exists():
                time.sleep(0.001)
            time.sleep(fraction * duration)
            for process in processes:
                os.kill(process, signal.SIGKILL)
            finish(processes)

            def load(rank: int, name: str = name, target: Path = target) -> None:
                sharded, optimizer = filled(model, 7.0)
                loaded(name, target, sharded, optimizer)
                own = tensors_of(sharded, optimizer).values()
                locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in own]
                values = {extreme for tensor in locals_ for extreme in (tensor.min().item(), tensor.max().item())}
                (folder / f"values-{rank}").write_text(json.dumps(sorted(values)))

            is_loaded = finish(forks(ranks, load))
            values = {value for rank in range(ranks) for value in _values(folder / f"values-{rank}", is_loaded)}
            outcome = "old" if values == {1.0} else "new" if values == {2.0} else "mixed" if is_loaded else "error"
            outcomes[name][outcome] = outcomes[name].get(outcome, 0) + 1
    return outcomes


def _values(file: Path, is_loaded: bool) -> list[float]:
    return json.loads(file.read_text()) if is_loaded else []


def main(what: str, ranks: int, size: str, runs: int) -> None:
    """Run one measurement, and print it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # DCP overwrites its files, which is intended here
    transformers.utils.logging.disable_progress_bar()
    config = LlamaConfig(**SIZES[size], num_attention_heads=8, num_key_value_heads=4)
    torch.manual_seed(0)
    model_class: Any = registry.model_class("LlamaForCausalLM")
    model = model_class(config).to(torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=".") as name:
        os.chdir(name)
        folder = Path.cwd()
        found: dict[str, Any] = {"bytes": 3 * sum(tensor.nbytes for tensor in model.state_dict().values())}
        found["seconds"] = measure(model, ranks, runs, folder)
        if what == "kill":
            typical = {name: min(row["complete"] for row in rows) for name, rows in found["seconds"].items()}
            found["outcomes"] = kill(model, ranks, typical, folder)
        os.chdir("..")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
