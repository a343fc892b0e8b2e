"""Resume checkpoints."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from jobs.setting import assert_same, case_of, local, mesh_of, new_optimizer, train
from nrl_models import AutoModelForCausalLM
from nrl_models.common.checkpoint.local_path import MANIFEST_NAME
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.distributed.resume_checkpoints import manifest, version_writing
from nrl_models.distributed.resume_checkpoints import resume as resuming
from nrl_models.errors import CheckpointError, SaveError, ShardingError


def train_and_save(folder: str, architecture: str, **sizes: int) -> list[float]:
    """Take two steps, save a checkpoint, and take two more steps. Returns all losses."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    losses = train(model, optimizer, case, range(2))
    save_checkpoint(folder, model, optimizer, {"step": 2})
    return losses + train(model, optimizer, case, range(2, 4))


def saves_into_a_file(file: str, wait: bool, **sizes: int) -> tuple[str, str]:
    """Save into the path of a file. Returns the error's type and text."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()).train(), mesh_of(**sizes))
    with pytest.raises((SaveError, ShardingError)) as raised:
        save_checkpoint(file, model, wait=wait).wait()
    return raised.type.__name__, str(raised.value)


def resume(folder: str, architecture: str, combine: bool = True, **sizes: int) -> list[float]:
    """Take the two steps after the checkpoint, with a model that started with other weights."""
    case = case_of(architecture)
    torch.manual_seed(7)
    model = case.model_class.from_config(case.config, combine=combine).train()
    model = parallelize(model, mesh_of(**sizes))
    optimizer = new_optimizer(model)
    optimizer.param_groups[0]["lr"] = 7.0
    progress = load_checkpoint(folder, model, optimizer)
    assert progress == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 1e-3
    return train(model, optimizer, case, range(progress["step"], 4))


def saves_quantized_state(folder: str, **sizes: int) -> list[str]:
    """Save an optimizer of torchao with 8-bit state. Returns the problems in the error."""
    from torchao.optim import AdamW8bit

    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()).train(), mesh_of(**sizes))
    optimizer = AdamW8bit(model.parameters())
    for parameter in model.parameters():  # creates the state of a first step, which would compile a kernel
        moments = {name: optimizer._new_buffer(parameter, name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    with pytest.raises(CheckpointError, match="plain tensors as state") as caught:
        save_checkpoint(folder, model, optimizer)
    return [f"{problem.subject}: {problem.detail}" for problem in caught.value.problems]


def keeps_mtp(published: str, folder: str, **sizes: int) -> None:
    """Export weights of multi-token prediction from a model loaded in shards, and from one that resumes."""
    unsharded = AutoModelForCausalLM.from_pretrained(published)
    expected = dict(unsharded.state_dict_adapter.iter_export(unsharded))
    mtp = kept_by(unsharded, mtp_only=True)
    assert mtp
    loaded = AutoModelForCausalLM.from_pretrained(published, mesh=mesh_of(**sizes))
    optimizer = new_optimizer(loaded)
    save_checkpoint(folder, loaded, optimizer)
    dist.barrier()
    torch.manual_seed(7)
    new = parallelize(type(unsharded).from_config(unsharded.config, dtype=torch.bfloat16), mesh_of(**sizes))
    assert not kept_by(new)
    load_checkpoint(folder, new)
    without = AutoModelForCausalLM.from_pretrained(published, mesh=mesh_of(**sizes), mtp="drop")
    assert not mtp.keys() & dict(without.state_dict_adapter.iter_export(without)).keys()
    for model in (loaded, new):
        adapter = model.state_dict_adapter
        exported = list(adapter.iter_export(model, max_bytes=100_000))
        assert [name for name, _ in exported] == [name for name, _, _ in adapter.export_plan()]
        assert_same(dict(exported), expected)


def resume_without_optimizer(folder: str, **sizes: int) -> list[float]:
    """Resume with the weights only."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(case.model_class.from_config(case.config).train(), mesh_of(**sizes))
    load_checkpoint(folder, model)
    return train(model, new_optimizer(model), case, range(2, 4))


def dies_while_resuming(folder: str, dying: int, **sizes: int) -> None:
    """One rank exits when all ranks have agreed that the checkpoint fits."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    if dist.get_rank() == dying:
        resuming.restore = lambda *_: os._exit(3)
    load_checkpoint(folder, model, optimizer)


def resume_with_one_group(folder: str, **sizes: int) -> None:
    """Resume with an optimizer that has other parameter groups."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def resumes_in_dtype(folder: str, saved: torch.dtype, dtype: torch.dtype, **sizes: int) -> list[torch.dtype]:
    """Save in one dtype and resume in another, for a step. Returns the dtypes of the moments."""
    case = case_of("LlamaForCausalLM")
    models = [parallelize(copy.deepcopy(case.model(of)).train(), mesh_of(**sizes)) for of in (saved, dtype)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    train(models[0], optimizers[0], case, range(1))
    save_checkpoint(folder, models[0], optimizers[0])
    load_checkpoint(folder, models[1])
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(local(one).to(dtype), local(other))
    load_checkpoint(folder, models[1], optimizers[1])
    train(models[1], optimizers[1], case, range(1, 2))
    return list({state["exp_avg"].dtype for state in optimizers[1].state.values()})


def resumes_with_names(folder: str, **sizes: int) -> list[str]:
    """Save and load an optimizer of `named_parameters()`. Returns the names after loading that are not the model's."""
    case, optimizers = case_of("LlamaForCausalLM"), []
    for lr in (1e-3, 2e-3):
        model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
        optimizers.append(torch.optim.AdamW(model.named_parameters(), lr=lr))
        if lr == 1e-3:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizers[0].step()
            save_checkpoint(folder, model, optimizers[0])
    load_checkpoint(folder, model, optimizers[1])
    (saved,), (loaded,) = (optimizer.param_groups for optimizer in optimizers)
    assert loaded["lr"] == saved["lr"]
    for one, other in zip(saved["params"], loaded["params"], strict=True):
        assert torch.equal(local(optimizers[0].state[one]["exp_avg"]), local(optimizers[1].state[other]["exp_avg"]))
    return sorted({*loaded["param_names"]} ^ {name for name, _ in model.named_parameters()})


def new(fill: float | None = None, **sizes: int) -> tuple[Any, torch.optim.Optimizer]:
    """Create a tiny Llama, and its optimizer after a step. If `fill` is passed, all values are `fill`."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    train(model, optimizer, case, range(1))
    if fill is not None:
        with torch.no_grad():
            for tensor in values_of(model, optimizer).values():
                local(tensor).fill_(fill)
    return model, optimizer


def values_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors that a checkpoint stores, under unique names."""
    states = {
        f"{number}.{key}": value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    return dict(model.state_dict()) | states


def saves_values(folder: str, value: float, **sizes: int) -> None:
    """Save a checkpoint in which all values are equal."""
    save_checkpoint(folder, *new(value, **sizes), {"step": value})


def loaded_values(folder: str, **sizes: int) -> list[float]:
    """Return the distinct values in a checkpoint, sorted."""
    model, optimizer = new(-1, **sizes)
    values = {float(load_checkpoint(folder, model, optimizer)["step"])}
    for tensor in values_of(model, optimizer).values():
        values |= set(local(tensor).flatten().tolist())
    return sorted(values)


def saves_progress(folder: str, progress: dict[str, Any], **sizes: int) -> None:
    """Save a checkpoint without an optimizer."""
    save_checkpoint(
        folder, parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes)), None, progress
    )


class Planted:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def opened_while_loading(folder: str, **sizes: int) -> list[str]:
    """Return the files that Python opens to load a checkpoint."""
    model, optimizer = new(**sizes)
    opened: list[str] = []

    def record_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and recording:
            opened.append(str(arguments[0]))

    recording = True
    sys.addaudithook(record_open)
    load_checkpoint(folder, model, optimizer)
    recording = False
    return opened


def problem_of_damaged_checkpoint(folder: str, model: Any, optimizer: torch.optim.Optimizer) -> str | None:
    """Load a damaged checkpoint. Returns None if that raises a typed error and changes nothing, else the problem."""
    before = {name: local(tensor).clone() for name, tensor in values_of(model, optimizer).items()}
    options = [dict(group, params=()) for group in optimizer.param_groups]
    wrong = "accepted"
    try:
        load_checkpoint(folder, model, optimizer)
    except CheckpointError:
        wrong = None
    except Exception as error:
        wrong = repr(error)
    after = {name: local(tensor) for name, tensor in values_of(model, optimizer).items()}
    is_same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    if not is_same or options != [dict(group, params=()) for group in optimizer.param_groups]:
        wrong = f"{wrong}, and values changed"
    return wrong


def accepts_flipped_bits(version: str, flips: int, **sizes: int) -> list[str]:
    """Flip bits at the ends and at random positions of each file, and load. Returns the damage that loading accepts."""
    generator = random.Random(0)
    model, optimizer = new(**sizes)
    wrong = []
    for file in sorted(Path(version).iterdir()):
        bits = 8 * file.stat().st_size
        for bit in (0, bits - 1, *generator.sample(range(bits), flips)):
            flip(file, bit)
            if (problem := problem_of_damaged_checkpoint(str(file.parent.parent), model, optimizer)) is not None:
                wrong.append(f"{file.name}, bit {bit}: {problem}")
            flip(file, bit)
    load_checkpoint(Path(version).parent, model, optimizer)
    return wrong


def flip(file: Path, bit: int) -> None:
    """Flip a bit of a file, while no rank reads it."""
    dist.barrier()
    if dist.get_rank() == 0:
        with open(file, "r+b") as handle:
            handle.seek(bit // 8)
            byte = handle.read(1)[0] ^ 1 << bit % 8
            handle.seek(bit // 8)
            handle.write(bytes([byte]))
    dist.barrier()


def accepts_changed_manifests(version: str, **sizes: int) -> dict[str, str]:
    """Load a version with changed manifests whose hashes are correct. Returns the changes that loading accepts."""
    model, optimizer = new(**sizes)
    file = Path(version) / MANIFEST_NAME
    content = json.loads(file.read_text())["manifest"]
    wrong = {}
    for name, change in CHANGES.items():
        other = copy.deepcopy(content)
        data = change(other)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(data if isinstance(data, bytes) else manifest._rendered(other))
        dist.barrier()
        if (problem := problem_of_damaged_checkpoint(str(file.parent.parent), model, optimizer)) is not None:
            wrong[name] = problem
        dist.barrier()
    return wrong


def _group(content: Any) -> Any:
    return content["optimizer"]["groups"][0]


def _first_state(content: Any) -> Any:
    return next(iter(content["optimizer"]["states"].values()))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "null": lambda content: b"null",
    "a list": lambda content: b"[]",
    "deep": lambda content: b"[" * 100_000,
    "no UTF-8": lambda content: b"\xff",
    "NaN": lambda content: b'{"xxh3_128": NaN, "manifest": NaN}',
    "step is null": lambda content: content["progress"].update(step=None),
    "step is a list": lambda content: content["progress"].update(step=[2]),
    "no files": lambda content: content["files"].clear(),
    "no weights": lambda content: [content["files"].pop(name) for name in [*content["files"]] if "weights" in name],
    "weights of one rank": lambda content: content["files"].pop("weights-00001-00000.safetensors"),
    "states of one rank": lambda content: content["files"].pop("optimizer-00001-00000.safetensors"),
    "a file elsewhere": lambda content: content["files"].update({"../x": content["files"]["config.json"]}),
    "no groups": lambda content: content["optimizer"]["groups"].clear(),
    "a group is null": lambda content: content["optimizer"].update(groups=[None, None]),
    "no states": lambda content: content["optimizer"]["states"].clear(),
    "a state of no parameter": lambda content: content["optimizer"]["states"].update(x={"scalars": {}, "tensors": []}),
    "scalars are a list": lambda content: _first_state(content).update(scalars=[]),
    "tensors are less": lambda content: _first_state(content)["tensors"].pop(),
    "no optimizer": lambda content: content.update(optimizer=None),
    "a scalar is text": lambda content: _first_state(content)["scalars"]["step"].update(value="x"),
    "a scalar of no type": lambda content: _first_state(content)["scalars"]["step"].update(type="x"),
    "lr is text": lambda content: _group(content)["options"].update(lr="x"),
    "lr is null": lambda content: _group(content)["options"].update(lr=None),
    "no lr": lambda content: _group(content)["options"].pop("lr"),
    "one beta": lambda content: _group(content)["options"]["betas"].pop(),
    "another format": lambda content: content.update(format=3),
}


def dies_while_saving(folder: str, function_name: str, dying: int, *, wait: bool = True, **sizes: int) -> None:
    """One rank exits when it calls a function."""
    model, optimizer = new(2, **sizes)
    if dist.get_rank() == dying:
        setattr(version_writing, function_name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    save_checkpoint(folder, model, optimizer, {"step": 2}, wait=wait).wait()


def names_in(version: Path, part: str) -> set[str]:
    """Return the names of tensors in the files of one part."""
    names = set()
    for file in version.glob(f"{part}-*"):
        with safe_open(file, framework="pt") as handle:
            names |= {key.rpartition("@")[0] for key in handle.keys()}  # noqa: SIM118
    return names
