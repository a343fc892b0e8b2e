"""Compare a pipeline with one process on the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional
from transformers import PreTrainedModel

from jobs.setting import assert_same, case_of, full, local, mesh_of, new_optimizer
from nrl_models.distributed import (
    ParallelPlan,
    Pipeline,
    clip_grad_norm_,
    load_checkpoint,
    parallelize,
    save_checkpoint,
)
from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.distributed.pipeline import shared
from nrl_models.distributed.pipeline.stages import Stages
from nrl_models.errors import ShardingError
from nrl_models.logprobs import token_logprobs
from nrl_models.testing.case import FamilyCase

SEQUENCES, LENGTH, MICROBATCHES = 8, 12, 4

Expected = tuple[float, dict[str, torch.Tensor]]

_mesh = lru_cache(maxsize=None)(mesh_of)


def sharded(case: FamilyCase, schedule: str, dtype: torch.dtype = torch.float64, **sizes: int) -> PreTrainedModel:
    """Shard the tiny model over pipeline stages, in training mode."""
    return parallelize(copy.deepcopy(case.model(dtype)).train(), _mesh(**sizes), ParallelPlan(schedule=schedule))


def without_gradients(model: PreTrainedModel, frozen: tuple[str, ...]) -> PreTrainedModel:
    """Freeze the parameters with these names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return model


def batch(
    case: FamilyCase, packed: bool = True, replica: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the inputs and labels of a rank of `fsdp`, with two packed documents or one document per row."""
    tokens = case.inputs(batch=SEQUENCES, length=LENGTH, seed=replica)["input_ids"]
    parts = (7, LENGTH - 7) if packed else (LENGTH,)
    positions = torch.cat([torch.arange(part) for part in parts]).expand(SEQUENCES, -1)
    weights = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": positions.contiguous()}, {"tokens": tokens, "weights": weights}


def loss_of(logits: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return this microbatch's share of the mean over all tokens of the batch."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets["tokens"].flatten(), reduction="none")
    return (losses * targets["weights"].flatten()).sum() / (SEQUENCES * LENGTH)


def expected(
    case: FamilyCase,
    dtype: torch.dtype = torch.float64,
    frozen: tuple[str, ...] = (),
    packed: bool = True,
    mesh: DeviceMesh | None = None,
) -> Expected:
    """Compute the loss of one process on this rank's batch, and gradients averaged over ranks of `fsdp`."""
    model = without_gradients(copy.deepcopy(case.model(dtype)).train(), frozen)
    replicas, own = (1, 0) if mesh is None else (size_of(mesh, "fsdp"), rank_in(mesh, "fsdp"))
    losses = [0.0] * replicas
    for replica in range(replicas):
        inputs, targets = batch(case, packed, replica)
        for rows in torch.arange(SEQUENCES).chunk(MICROBATCHES):
            logits = model(**{name: value[rows] for name, value in inputs.items()}, use_cache=False).logits
            loss = loss_of(logits, {name: value[rows] for name, value in targets.items()})
            (loss / replicas).backward()
            losses[replica] += loss.item()
    return losses[own], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(model: PreTrainedModel, loss: float, wanted: Expected) -> dict[str, Any]:
    """Return the differences of loss and gradients between this rank's stages and one process, with their names."""
    scale = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    packed = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    own = model.state_dict_adapter.to_hf(packed, layout="transformers")
    off = [float((gradient - wanted[1][name]).abs().max()) / scale for name, gradient in own.items()]
    return {"loss": abs(loss - wanted[0]), "gradients": max(off, default=0.0), "names": sorted(own), "scale": scale}


def equals_one_process(
    architecture: str,
    schedule: str,
    config: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    fault: str = "",
    frozen: tuple[str, ...] = (),
    recompute: bool = False,
    **sizes: int,
) -> dict[str, Any]:
    """Return the differences of one step, and of the gradients of two, to one process. Optionally plants a fault."""
    case = case_of(architecture, config)
    wanted = expected(case, dtype, frozen, mesh=_mesh(**sizes))
    with FAULTS[fault]() if fault else nullcontext():
        model = without_gradients(sharded(case, schedule, dtype, **sizes), frozen)
        if recompute:
            model.gradient_checkpointing_enable()
        pipeline = Pipeline(model, MICROBATCHES)
        found = compared(case, wanted, pipeline)
        twice = wanted[0], {name: 2 * gradient for name, gradient in wanted[1].items()}
        again = compared(case, twice, pipeline)
    return found | {"again": again["gradients"], "rank": rank_in(pipeline.mesh, "pp")}


def compared(case: FamilyCase, wanted: Expected, pipeline: Pipeline, packed: bool = True) -> dict[str, Any]:
    """Return the differences of a step to one process, and the parameters that have gradients on no rank."""
    inputs, targets = batch(case, packed, rank_in(pipeline.mesh, "fsdp"))
    found = differences(pipeline.model, float(pipeline.step(inputs, loss_of, targets)), wanted)
    return found | {"missing": sorted(set(wanted[1]).difference(*all_gathered(found["names"])))}


def evaluates(schedule: str, config: dict[str, Any], **sizes: int) -> list[float]:
    """Return the differences of log-probabilities to one process: before a step, after it, and for another length."""
    case = case_of("LlamaForCausalLM", config)
    pipeline = Pipeline(sharded(case, schedule, **sizes), MICROBATCHES)
    whole = copy.deepcopy(case.model(torch.float64))
    inputs, targets = batch(case, replica=rank_in(pipeline.mesh, "fsdp"))
    off = []
    for length in (LENGTH, LENGTH, LENGTH - 3):
        given = {name: value[:, :length] for name, value in inputs.items()}
        with torch.no_grad():
            wanted = logprobs_of(whole(**given, use_cache=False).logits, {"tokens": given["input_ids"]})
        actual = pipeline.evaluate(given, logprobs_of, {"tokens": given["input_ids"]})
        assert actual.shape == wanted.shape
        assert not actual.requires_grad
        assert all(parameter.grad is None for parameter in pipeline.model.parameters())
        off.append(float((actual - wanted).abs().max()))
        pipeline.step(inputs, loss_of, targets)
        pipeline.model.zero_grad()
    return off


def logprobs_of(logits: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each token in its own logits, which is enough to distinguish models."""
    return logits.log_softmax(-1).gather(-1, targets["tokens"][..., None])[..., 0]


def called_outside_of_a_step() -> None:
    """Calls that run the model outside of a step raise an error with advice."""
    case = case_of("LlamaForCausalLM", {"num_hidden_layers": 4})
    model, tokens = sharded(case, "1F1B", torch.float32, pp=2), case.inputs()["input_ids"]
    for call in (
        lambda: model(tokens),
        lambda: model.model(tokens),
        lambda: token_logprobs(model, tokens),
        lambda: token_logprobs(model, tokens, chunk_size=None),
        lambda: model.generate(tokens, max_new_tokens=2),
    ):
        with pytest.raises(ShardingError, match="Pipeline"):
            call()


def fails_in_the_loss(where: str, **sizes: int) -> str:
    """Return every rank's error for a loss that fails on the last rank, and for a nonscalar loss."""
    case = case_of("LlamaForCausalLM", {"num_hidden_layers": 4})
    pipeline, (inputs, targets) = Pipeline(sharded(case, "1F1B", torch.float32, **sizes), MICROBATCHES), batch(case)

    def fails(logits: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no such loss")
        return loss_of(logits, targets) if where == "step" else logprobs_of(logits, targets)

    with pytest.raises((ShardingError, ValueError)) as caught:
        getattr(pipeline, where)(inputs, fails, targets)
    with pytest.raises(ShardingError, match="a scalar"):
        pipeline.step(inputs, logprobs_of, targets)
    pipeline.step(inputs, loss_of, targets)  # a batch that is valid on all ranks
    return f"{type(caught.value).__name__}: {caught.value}"


def refused_batches() -> list[str]:
    """Return a step's errors for invalid batches, the same on every rank."""
    case = case_of("LlamaForCausalLM", {"num_hidden_layers": 4})
    model = sharded(case, "1F1B", torch.float32, pp=2)
    pipeline, (inputs, targets) = Pipeline(model, MICROBATCHES), batch(case)
    said = []
    batches: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, targets),
        ({name: value[:6] for name, value in inputs.items()}, {name: value[:6] for name, value in targets.items()}),
        (inputs, {"tokens": targets["tokens"][:3]}),
        (inputs | {"labels": inputs["input_ids"]}, targets),
        ({"input_ids": inputs["input_ids"][:, : LENGTH - dist.get_rank()]}, targets),
    ]
    for given, beside in batches:
        with pytest.raises(ShardingError) as caught:
            pipeline.step(given, loss_of, beside)
        said.append(str(caught.value))
    with pytest.raises(ShardingError) as caught:
        Pipeline(model, 1)
    said.append(str(caught.value))
    case = case_of("BartForCausalLM", {"num_hidden_layers": 2})
    model = sharded(case, "1F1B", torch.float32, pp=2)
    with pytest.raises(ShardingError) as caught:
        Pipeline(model, MICROBATCHES).step(*batch(case)[:1], loss_of, batch(case)[1])
    return [*said, str(caught.value)]


def _wrong_layers(self: Stages, stage: int) -> dict[str, Any]:
    layers = LAYERS_OF(self, stage)
    own = [str(index) for index in self.cut.layers(stage)]
    return layers | dict(zip(own, [layers[name] for name in reversed(own)], strict=True))


LAYERS_OF = Stages._layers_of
FAULTS: dict[str, Any] = {
    "stages that run their layers in another order": lambda: mock.patch.object(Stages, "_layers_of", _wrong_layers),
    "tied gradients that are not summed": lambda: mock.patch.object(shared, "_sum_over"),
    "microbatches that are averaged": lambda: mock.patch.object(
        schedules, "get_schedule_class", lambda name: partial(_averaging, get_schedule_class(name))
    ),
}
"""Faults that the comparison must find."""


def _averaging(schedule: Any, *args: Any, **options: Any) -> Any:
    return schedule(*args, **options | {"scale_grads": True})


def all_gathered(value: Any) -> list[Any]:
    """Gather a value from every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def loads_saves_and_exports(
    folder: str, schedule: str, config: dict[str, Any], architecture: str, **sizes: int
) -> dict[str, Any]:
    """Load a one-process checkpoint over stages. Each rank reads its shares; all export complete tensors."""
    case = case_of(architecture, config)
    place = Path(folder)
    if dist.get_rank() == 0:
        case.model().save_pretrained(place / "given")
    dist.barrier()
    whole = case.model_class.from_pretrained(place / "given")
    plan = ParallelPlan(schedule=schedule)
    model = case.model_class.from_pretrained(place / "given", mesh=_mesh(**sizes), plan=plan)
    adapter = whole.state_dict_adapter
    for layout in ("hub", "transformers"):
        wanted = dict(adapter.iter_export(whole, layout=layout))
        exported = dict(model.state_dict_adapter.iter_export(model, 2**16, layout=layout))
        assert_same(exported, wanted)
        assert list(exported) == list(wanted)
        assert model.state_dict_adapter.export_plan(layout=layout) == adapter.export_plan(layout=layout)
        views = model.state_dict_adapter.hf_views(model, layout=layout)
        assert_same(_whole(views), {name: wanted[name] for name in views})
    model.save_pretrained(place / "stages", max_shard_size="100KB")
    if dist.get_rank() == 0:
        whole.save_pretrained(place / "one", max_shard_size="100KB")
    dist.barrier()
    for file in sorted((place / "one").iterdir()):
        assert (place / "stages" / file.name).read_bytes() == file.read_bytes(), file.name
    held = model.state_dict()
    whole_state = whole.state_dict()
    assert_same(_whole(held), {name: whole_state[name] for name in held})
    assert model.sharding.loaded_bytes == sum(local(parameter).nbytes for parameter in model.parameters())
    stored = sum(tensor.nbytes for tensor in wanted.values())
    model.load_state_dict({name: 2 * tensor for name, tensor in whole_state.items()})
    assert_same(_whole(model.state_dict()), {name: 2 * whole_state[name] for name in held})
    return {"read": model.sharding.loaded_bytes / stored, "held": sorted(held), "all": sorted(whole_state)}


def _whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in tensors.items()}


def resumes(
    folder: str,
    architecture: str,
    config: dict[str, Any],
    layouts: list[tuple[dict[str, int], str]],
    dtype: torch.dtype = torch.float64,
) -> list[list[float]]:
    """Return losses and norms of steps that resume on another mesh each time, and those of one process."""
    case = case_of(architecture, config)
    inputs, targets = batch(case)
    whole = copy.deepcopy(case.model(dtype)).train()
    optimizer = new_optimizer(whole)
    losses: list[list[float]] = [[], []]
    for number, (sizes, schedule) in enumerate(layouts):
        optimizer.zero_grad()
        loss = loss_of(whole(**inputs, use_cache=False).logits, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
        losses[0] += [loss.item(), norm.item()]
        model = sharded(case, schedule, dtype, **sizes)
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
