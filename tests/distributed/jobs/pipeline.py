"""What a pipeline computes, against one process with the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional
from transformers import PreTrainedModel

from jobs.setting import assert_same, case_of, mesh_of, new_optimizer
from nrl_models.distributed import (
    ParallelPlan,
    Pipeline,
    clip_grad_norm_,
    load_checkpoint,
    parallelize,
    save_checkpoint,
)
from nrl_models.distributed.mesh import rank_in
from nrl_models.distributed.pipeline import running, shared
from nrl_models.distributed.pipeline.stages import Stages
from nrl_models.testing.case import FamilyCase

SEQUENCES, LENGTH, MICROBATCHES = 8, 12, 4

_mesh = lru_cache(maxsize=None)(mesh_of)


def sharded(case: FamilyCase, schedule: str, dtype: torch.dtype = torch.float64, **sizes: int) -> PreTrainedModel:
    """The tiny model over stages, in training."""
    return parallelize(copy.deepcopy(case.model(dtype)).train(), _mesh(**sizes), ParallelPlan(schedule=schedule))


def batch(case: FamilyCase) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Packed rows of two documents, and what they are to predict."""
    tokens = case.inputs(batch=SEQUENCES, length=LENGTH, seed=0)["input_ids"]
    positions = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)]).expand(SEQUENCES, -1)
    weights = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": positions.contiguous()}, {"tokens": tokens, "weights": weights}


def loss_of(logits: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A share of the mean over the tokens of the whole batch."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets["tokens"].flatten(), reduction="none")
    return (losses * targets["weights"].flatten()).sum() / (SEQUENCES * LENGTH)


def expected(case: FamilyCase, dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process, by its own names."""
    model = copy.deepcopy(case.model(dtype)).train()
    inputs, targets = batch(case)
    total = 0.0
    for rows in torch.arange(SEQUENCES).chunk(MICROBATCHES):
        given = {name: value[rows] for name, value in inputs.items()}
        loss = loss_of(model(**given, use_cache=False).logits, {name: value[rows] for name, value in targets.items()})
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(model: PreTrainedModel, loss: float, wanted: tuple[float, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """How far loss and gradients of this rank's stages are from one process's, and which it has."""
    scale = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    off = [float((_whole(gradient) - wanted[1][name]).abs().max()) / scale for name, gradient in own.items()]
    return {"loss": abs(loss - wanted[0]), "gradients": max(off), "names": sorted(own), "scale": scale}


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def equals_one_process(
    architecture: str,
    schedule: str,
    config: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    fault: str = "",
    **sizes: int,
) -> dict[str, Any]:
    """How far a step, and gradients of two, are from one process's; with a planted fault, if one is named."""
    case = case_of(architecture, config)
    wanted = expected(case, dtype)
    with FAULTS[fault]() if fault else nullcontext():
        return _compared(case, wanted, Pipeline(sharded(case, schedule, dtype, **sizes), MICROBATCHES))


def _compared(case: FamilyCase, wanted: tuple[float, dict[str, torch.Tensor]], pipeline: Pipeline) -> dict[str, Any]:
    inputs, targets = batch(case)
    loss = float(pipeline.step(inputs, loss_of, targets))
    found = differences(pipeline.model, loss, wanted)
    again = float(pipeline.step(inputs, loss_of, targets))
    twice = differences(pipeline.model, again, (wanted[0], {name: 2 * grad for name, grad in wanted[1].items()}))
    missing = set(wanted[1]).difference(*all_gathered(found["names"]))
    return found | {"again": twice["gradients"], "missing": sorted(missing), "rank": rank_in(pipeline.mesh, "pp")}


def _wrong_layers(self: Stages, stage: int) -> dict[str, Any]:
    layers = LAYERS_OF(self, stage)
    own = [str(index) for index in self.cut.layers(stage)]
    return layers | dict(zip(own, [layers[name] for name in reversed(own)], strict=True))


LAYERS_OF = Stages._layers_of
FAULTS: dict[str, Any] = {
    "stages that run their layers in another order": lambda: mock.patch.object(Stages, "_layers_of", _wrong_layers),
    "tied gradients that are not summed": lambda: mock.patch.object(shared, "_sum_over"),
    "microbatches that are averaged": lambda: mock.patch.object(
        running, "get_schedule_class", lambda name: partial(_averaging, get_schedule_class(name))
    ),
}
"""What the comparison has to find."""


def _averaging(schedule: Any, *args: Any, **options: Any) -> Any:
    return schedule(*args, **options | {"scale_grads": True})


def all_gathered(value: Any) -> list[Any]:
    """A value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def loads_saves_and_exports(folder: str, schedule: str, config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """A checkpoint of one process, loaded over two stages: each rank reads its own, all export and save the whole."""
    case = case_of(architecture, config)
    place = Path(folder)
    if dist.get_rank() == 0:
        case.model().save_pretrained(place / "given")
    dist.barrier()
    whole = case.model_class.from_pretrained(place / "given")
    mesh = _mesh(pp=dist.get_world_size())
    model = case.model_class.from_pretrained(place / "given", mesh=mesh, plan=ParallelPlan(schedule=schedule))
    adapter = whole.state_dict_adapter
    for layout in ("hub", "transformers"):
        wanted = dict(adapter.iter_export(whole, layout=layout))
        exported = dict(model.state_dict_adapter.iter_export(model, 2**16, layout=layout))
        assert_same(exported, wanted)
        assert list(exported) == list(wanted)
        assert model.state_dict_adapter.export_plan(layout=layout) == adapter.export_plan(layout=layout)
        views = model.state_dict_adapter.hf_views(model, layout=layout)
        assert_same(views, {name: wanted[name] for name in views})
    model.save_pretrained(place / "stages", max_shard_size="100KB")
    if dist.get_rank() == 0:
        whole.save_pretrained(place / "one", max_shard_size="100KB")
    dist.barrier()
    for file in sorted((place / "one").iterdir()):
        assert (place / "stages" / file.name).read_bytes() == file.read_bytes(), file.name
    held = model.state_dict()
    whole_state = whole.state_dict()
    assert_same(dict(held), {name: whole_state[name] for name in held})
    stored = sum(tensor.nbytes for tensor in wanted.values())
    model.load_state_dict({name: 2 * tensor for name, tensor in whole_state.items()})
    assert_same(dict(model.state_dict()), {name: 2 * whole_state[name] for name in held})
    return {"read": model.sharding.loaded_bytes / stored, "held": sorted(held), "all": sorted(whole_state)}


def resumes(folder: str, architecture: str, config: dict[str, Any]) -> list[list[float]]:
    """Losses of steps, each after resuming at another layout; and those of one process without a stop."""
    case = case_of(architecture, config)
    layouts: list[tuple[dict[str, int], str]] = [
        ({"pp": 2}, "1F1B"),
        ({"pp": 2}, "ZBVZeroBubble"),
        ({"fsdp": 2}, "1F1B"),
        ({"pp": 2}, "Interleaved1F1B"),
        ({"tp": 2}, "1F1B"),
        ({"pp": 2}, "GPipe"),
    ]
    inputs, targets = batch(case)
    whole = copy.deepcopy(case.model(torch.float64)).train()
    optimizer = new_optimizer(whole)
    losses: list[list[float]] = [[], []]
    for number, (sizes, schedule) in enumerate(layouts):
        optimizer.zero_grad()
        loss = loss_of(whole(**inputs, use_cache=False).logits, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
        losses[0] += [loss.item(), norm.item()]
        model = sharded(case, schedule, **sizes)
        ours = new_optimizer(model)
        if number:
            assert load_checkpoint(folder, model, ours) == {"step": number}
        if "pp" in sizes:
            total = Pipeline(model, 4).step(inputs, loss_of, targets)
        else:
            total = loss_of(model(**inputs, use_cache=False).logits, targets)
            total.backward()
        losses[1] += [total.item(), clip_grad_norm_(model, 0.1).item()]
        ours.step()
        save_checkpoint(folder, model, ours, {"step": number + 1})
    return losses
