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
    replicas, replica_index = (1, 0) if mesh is None else (size_of(mesh, "fsdp"), rank_in(mesh, "fsdp"))
    losses = [0.0] * replicas
    for replica in range(replicas):
        inputs, targets = batch(case, packed, replica)
        for rows in torch.arange(SEQUENCES).chunk(MICROBATCHES):
            logits = model(**{name: value[rows] for name, value in inputs.items()}, use_cache=False).logits
            loss = loss_of(logits, {name: value[rows] for name, value in targets.items()})
            (loss / replicas).backward()
            losses[replica] += loss.item()
    return losses[replica_index], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(model: PreTrainedModel, loss: float, wanted: Expected) -> dict[str, Any]:
    """Return the differences of loss and gradients between this rank's stages and one process, with their names."""
    scale = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    packed = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    gradients = model.state_dict_adapter.to_hf(packed, layout="transformers")
    errors = [float((gradient - wanted[1][name]).abs().max()) / scale for name, gradient in gradients.items()]
    return {
        "loss": abs(loss - wanted[0]),
        "gradients": max(errors, default=0.0),
        "names": sorted(gradients),
        "scale": scale,
    }


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
        result = compared(case, wanted, pipeline)
        twice = wanted[0], {name: 2 * gradient for name, gradient in wanted[1].items()}
        again = compared(case, twice, pipeline)
    return result | {"again": again["gradients"], "rank": rank_in(pipeline.mesh, "pp")}


def compared(case: FamilyCase, wanted: Expected, pipeline: Pipeline, packed: bool = True) -> dict[str, Any]:
    """Return the differences of a step to one process, and the parameters that have gradients on no rank."""
    inputs, targets = batch(case, packed, rank_in(pipeline.mesh, "fsdp"))
    result = differences(pipeline.model, float(pipeline.step(inputs, loss_of, targets)), wanted)
    return result | {"missing": sorted(set(wanted[1]).difference(*all_gathered(result["names"])))}


def evaluates(schedule: str, config: dict[str, Any], **sizes: int) -> list[float]:
    """Return the differences of log-probabilities to one process: before a step, after it, and for another length."""
    case = case_of("LlamaForCausalLM", config)
    pipeline = Pipeline(sharded(case, schedule, **sizes), MICROBATCHES)
    unsharded = copy.deepcopy(case.model(torch.float64))
    inputs, targets = batch(case, replica=rank_in(pipeline.mesh, "fsdp"))
    errors = []
    for length in (LENGTH, LENGTH, LENGTH - 3):
        shortened = {name: value[:, :length] for name, value in inputs.items()}
        with torch.no_grad():
            wanted = logprobs_of(unsharded(**shortened, use_cache=False).logits, {"tokens": shortened["input_ids"]})
        actual = pipeline.evaluate(shortened, logprobs_of, {"tokens": shortened["input_ids"]})
        assert actual.shape == wanted.shape
        assert not actual.requires_grad
        assert all(parameter.grad is None for parameter in pipeline.model.parameters())
        errors.append(float((actual - wanted).abs().max()))
        pipeline.step(inputs, loss_of, targets)
        pipeline.model.zero_grad()
    return errors


def logprobs_of(logits: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each token in its own logits, which is enough to distinguish models."""
    return logits.log_softmax(-1).gather(-1, targets["tokens"][..., None])[..., 0]


def calls_outside_step() -> None:
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


def fails_in_the_loss(method: str, **sizes: int) -> str:
    """Return every rank's error for a loss that fails on the last rank, and for a nonscalar loss."""
    case = case_of("LlamaForCausalLM", {"num_hidden_layers": 4})
    pipeline, (inputs, targets) = Pipeline(sharded(case, "1F1B", torch.float32, **sizes), MICROBATCHES), batch(case)

    def fails(logits: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no such loss")
        return loss_of(logits, targets) if method == "step" else logprobs_of(logits, targets)

    with pytest.raises((ShardingError, ValueError)) as caught:
        getattr(pipeline, method)(inputs, fails, targets)
    with pytest.raises(ShardingError, match="a scalar"):
        pipeline.step(inputs, logprobs_of, targets)
    pipeline.step(inputs, loss_of, targets)  # a batch that is valid on all ranks
    return f"{type(caught.value).__name__}: {caught.value}"


def errors_of_invalid_batches() -> list[str]:
    """Return a step's errors for invalid batches, the same on every rank."""
    case = case_of("LlamaForCausalLM", {"num_hidden_layers": 4})
    model = sharded(case, "1F1B", torch.float32, pp=2)
    pipeline, (inputs, targets) = Pipeline(model, MICROBATCHES), batch(case)
    messages = []
    batches: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, targets),
        ({name: value[:6] for name, value in inputs.items()}, {name: value[:6] for name, value in targets.items()}),
        (inputs, {"tokens": targets["tokens"][:3]}),
        (inputs | {"labels": inputs["input_ids"]}, targets),
        ({"input_ids": inputs["input_ids"][:, : LENGTH - dist.get_rank()]}, targets),
    ]
    for inputs, targets in batches:
        with pytest.raises(ShardingError) as caught:
            pipeline.step(inputs, loss_of, targets)
        messages.append(str(caught.value))
    with pytest.raises(ShardingError) as caught:
        Pipeline(model, 1)
    messages.append(str(caught.value))
    case = case_of("BartForCausalLM", {"num_hidden_layers": 2})
    model = sharded(case, "1F1B", torch.float32, pp=2)
    with pytest.raises(ShardingError) as caught:
        Pipeline(model, MICROBATCHES).step(*batch(case)[:1], loss_of, batch(case)[1])
    return [*messages, str(caught.value)]


def errors_of_changed_model(change: str, **sizes: int) -> list[str]:
    """Replace or add a parameter of the last stage after sharding. Returns the errors of a step and an evaluation."""
    case = case_of("LlamaForCausalLM", {"num_hidden_layers": 4})
    model: Any = sharded(case, "1F1B", torch.float32, **sizes)
    pipeline, (inputs, targets) = Pipeline(model, MICROBATCHES), batch(case)
    if pipeline.stages.cut.stages - 1 in pipeline.stages.held:
        if change == "replaced":
            model.lm_head.weight = torch.nn.Parameter(full(model.lm_head.weight) * 2)
        else:
            model.lm_head.extra = torch.nn.Parameter(torch.ones(1))
    messages = []
    for use in (pipeline.step, pipeline.evaluate):
        with pytest.raises(ShardingError) as caught:
            use(inputs, loss_of, targets)
        messages.append(str(caught.value))
    return messages


def _wrong_layers(self: Stages, stage: int) -> dict[str, Any]:
    layers = LAYERS_OF(self, stage)
    names = [str(index) for index in self.cut.layers(stage)]
    return layers | dict(zip(names, [layers[name] for name in reversed(names)], strict=True))


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
    root = Path(folder)
    if dist.get_rank() == 0:
        case.model().save_pretrained(root / "given")
    dist.barrier()
    unsharded = case.model_class.from_pretrained(root / "given")
    plan = ParallelPlan(schedule=schedule)
    model = case.model_class.from_pretrained(root / "given", mesh=_mesh(**sizes), plan=plan)
    adapter = unsharded.state_dict_adapter
    for layout in ("hub", "transformers"):
        wanted = dict(adapter.iter_export(unsharded, layout=layout))
        exported = dict(model.state_dict_adapter.iter_export(model, 2**16, layout=layout))
        assert_same(exported, wanted)
        assert list(exported) == list(wanted)
        assert model.state_dict_adapter.export_plan(layout=layout) == adapter.export_plan(layout=layout)
        views = model.state_dict_adapter.hf_views(model, layout=layout)
        assert_same(_full(views), {name: wanted[name] for name in views})
    model.save_pretrained(root / "stages", max_shard_size="100KB")
    if dist.get_rank() == 0:
        unsharded.save_pretrained(root / "one", max_shard_size="100KB")
    dist.barrier()
    for file in sorted((root / "one").iterdir()):
        assert (root / "stages" / file.name).read_bytes() == file.read_bytes(), file.name
    stage_state = model.state_dict()
    whole_state = unsharded.state_dict()
    assert_same(_full(stage_state), {name: whole_state[name] for name in stage_state})
    assert model.sharding.loaded_bytes == sum(local(parameter).nbytes for parameter in model.parameters())
    stored = sum(tensor.nbytes for tensor in wanted.values())
    model.load_state_dict({name: 2 * tensor for name, tensor in whole_state.items()})
    assert_same(_full(model.state_dict()), {name: 2 * whole_state[name] for name in stage_state})
    return {"read": model.sharding.loaded_bytes / stored, "held": sorted(stage_state), "all": sorted(whole_state)}


def _full(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    unsharded = copy.deepcopy(case.model(dtype)).train()
    optimizer = new_optimizer(unsharded)
    losses: list[list[float]] = [[], []]
    for number, (sizes, schedule) in enumerate(layouts):
        optimizer.zero_grad()
        loss = loss_of(unsharded(**inputs, use_cache=False).logits, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.1)
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
