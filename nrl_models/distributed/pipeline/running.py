"""Training steps of a model split into pipeline stages, with torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.documents.layers import DecoderByDocument
from nrl_models.common.documents.packing import start_again
from nrl_models.common.modules import own_parameters
from nrl_models.distributed.batch_checks import exact_digest, require_same_batch
from nrl_models.distributed.mesh import agree, agreed, rank_in
from nrl_models.distributed.pipeline.fsdp_gradients import free_gathered, gradients_divided_once
from nrl_models.distributed.pipeline.schedules import Schedule
from nrl_models.distributed.pipeline.shared import shared_gradients_summed
from nrl_models.distributed.pipeline.stages import Stages
from nrl_models.distributed.sharding import sharding_of
from nrl_models.errors import Problem, ProblemKind, ShardingError, listed

WHAT = "run a step of the pipeline"

Value = TypeVar("Value")

Batch = Mapping[str, torch.Tensor]
MicrobatchLoss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""Function of a microbatch's logits `(batch, seq_len, vocab_size)` and its rows of the targets. Returns the
microbatch's share of the loss, a scalar. The batch's loss is the sum of the shares, so divide a mean over tokens by the
number of tokens of the complete batch."""
Reading = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""Function of the same arguments that returns a value per sequence, `(batch, ...)`, such as log-probabilities."""


class Pipeline:
    """Runs training steps of a model whose stages are on the ranks of `pp`.

    Clip gradients with `nrl_models.distributed.clip_grad_norm_`. `torch.nn.utils.clip_grad_norm_` would silently scale
    the stages of each rank by a different factor.

    Args:
        model: A model sharded over a mesh with `pp`.
        microbatches: Number of equal parts into which a batch is divided.

    Raises:
        ShardingError: If the model has no stages, got new parameters (LoRA adapters) after it was sharded, or its
            schedule does not support this number of microbatches.
    """

    def __init__(self, model: PreTrainedModel, microbatches: int) -> None:
        sharding = getattr(model, "sharding", None)
        if sharding is None or sharding.stages is None:
            problem = Problem(ProblemKind.MESH, type(model).__name__, "was not sharded over a mesh that has pp")
            raise ShardingError("the model has no stages", [problem])
        if added := [name for name, _ in own_parameters(model) if name not in sharding.holders]:
            detail = "is not a parameter that the model was sharded with: adapters are not supported with pp"
            raise ShardingError("the model has changed", [Problem(ProblemKind.UNEXPECTED, listed(added), detail)])
        self.model, self.microbatches = model, microbatches
        self.sharding = sharding_of(model)
        self.mesh = self.sharding.mesh
        self.stages: Stages = sharding.stages
        names = self.mesh.mesh_dim_names or ()
        self._replicas = self.mesh["fsdp"] if "fsdp" in names else None
        self._of_one_batch = self.mesh[tuple(name for name in names if name != "fsdp")]
        self._by_document = [type(part).__name__ for part in model.modules() if isinstance(part, DecoderByDocument)]
        self._shape: torch.Size | None = None
        self._schedule: Any = None
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        self._error: Exception | None = None
        if problems := list(self._microbatch_problems()):
            raise ShardingError("the schedule does not take these microbatches", problems)

    def step(self, inputs: Batch, loss: MicrobatchLoss, targets: Batch) -> torch.Tensor:
        """Run forward and backward of a batch. Gradients accumulate.

        Gradients of parameters that several stages hold are summed over those stages.

        Args:
            inputs: Inputs of the model, `(batch, ...)` each: `input_ids`, and optionally `position_ids` of packed rows
                and `attention_mask`. Ranks that differ only in `pp`, `ep` or `tp` pass the same inputs. Ranks that
                differ in `fsdp` pass different ones, and gradients are averaged over them.
            loss: See `MicrobatchLoss`.
            targets: Further inputs of the loss, `(batch, ...)` each.

        Returns:
            The loss of the batch, on every rank that has this batch.

        Raises:
            ShardingError: On every rank and before computing, if shapes differ between ranks, the batch cannot be
                divided into microbatches, or parameters were replaced or trainable ones added after sharding. Also if
                another rank failed: the message has its error, and that rank raises the error itself. Gradients are
                then invalid. Dropout on ranks with different random states also fails.
        """
        self._check(inputs, targets)
        losses: list[torch.Tensor] = []
        device = self.stages.device
        self._loss = lambda logits, rows: self._kept_going(
            lambda: _scalar(loss(logits, _rows(targets, rows)), logits), lambda: logits.sum() * 0
        )
        shape = inputs["input_ids"].shape
        if shape != self._shape:
            self._schedule, self._shape = self._new_schedule(shape), shape
        keep_gathered = len(self.stages.held) > 1
        once = gradients_divided_once(self.model, self.sharding.plan.reshard_after_forward, keep_gathered)
        draws = require_same_batch(self.mesh, {})  # the inputs were compared
        with self._running(), shared_gradients_summed(self.model, self.mesh):
            with once, draws.observed():
                first = (inputs["input_ids"],) if 0 in self.stages.held else ()
                rows = torch.arange(shape[0], device=device)
                self._schedule.step(*first, target=rows, losses=losses, return_outputs=False, **inputs)
            self._kept_going(draws.require_none_if_states_differ, lambda: None)
            agree(self.mesh, WHAT, {}, self._error, "the gradients are invalid now: set them to zero")
        total = torch.zeros((), dtype=torch.promote_types(torch.float32, self.stages.cut.crossing.dtype), device=device)
        for part in losses:  # empty except on the rank of the last stage
            total += part.detach()
        dist.broadcast(total, group=self.mesh.get_group("pp"), group_src=self._last_rank)
        return total

    def evaluate(self, inputs: Batch, reading: Reading, targets: Batch) -> torch.Tensor:
        """Run the forward of a batch without gradients. Stages process one microbatch after another in any schedule.

        Args:
            inputs: See `step`.
            reading: See `Reading`.
            targets: Further inputs of `reading`, `(batch, ...)` each.

        Returns:
            The results of `reading`, `(batch, ...)`, on every rank that has the batch.

        Raises:
            ShardingError: See `step`.
        """
        self._check(inputs, targets)
        parts = []
        with self._running(), torch.no_grad():
            for rows in torch.arange(len(inputs["input_ids"])).chunk(self.microbatches):
                if (logits := self._logits(_rows(inputs, rows))) is not None:
                    parts.append(self._kept_going(partial(reading, logits, _rows(targets, rows)), lambda: logits))
            # None except on the rank of the last stage.
            readings = self._kept_going(lambda: torch.cat(parts), lambda: parts[0]) if parts else None
            free_gathered(self.model)
            agree(self.mesh, WHAT, {}, self._error)
        group = self.mesh.get_group("pp")
        facts = [None if readings is None else (readings.shape, readings.dtype)]
        dist.broadcast_object_list(facts, group=group, group_src=self._last_rank)
        assert facts[0] is not None
        shape, dtype = facts[0]
        readings = (
            torch.empty(shape, dtype=dtype, device=self.stages.device) if readings is None else readings.contiguous()
        )
        dist.broadcast(readings, group=group, group_src=self._last_rank)
        return readings

    @property
    def _last_rank(self) -> int:
        return self.sharding.rank_of_stage(self.stages.cut.stages - 1)

    def _logits(self, inputs: Batch) -> torch.Tensor | None:
        """Run a microbatch through this rank's stages. Returns logits on the rank of the last stage, else None."""
        group, this_rank = self.mesh.get_group("pp"), rank_in(self.mesh, "pp")
        sent: torch.Tensor | None = None
        for stage in sorted(self.stages.held):
            if stage > 0 and (before := self.sharding.rank_of_stage(stage - 1)) != this_rank:
                shape = *inputs["input_ids"].shape, *self.stages.cut.crossing.features
                sent = torch.empty(shape, dtype=self.stages.cut.crossing.dtype, device=self.stages.device)
                dist.recv(sent, group=group, group_src=before)
            sent = self._computed(stage, sent, inputs)
            if stage == self.stages.cut.stages - 1:
                return sent
            if (after := self.sharding.rank_of_stage(stage + 1)) != this_rank:
                dist.send(sent.contiguous(), group=group, group_dst=after)
        return None

    def _computed(self, stage: int, received: torch.Tensor | None, inputs: Batch) -> torch.Tensor:
        """Return the output of a stage: hidden states, or logits for the last stage."""
        self.stages.running = stage
        compute = partial(self.model, received, **inputs)
        if self.mesh.ndim > 1:  # an error leaves other ranks of the stage waiting in any case
            return compute()
        return self._kept_going(compute, lambda: self._zeros(received, inputs["input_ids"].shape))

    def _zeros(self, received: torch.Tensor | None, tokens: torch.Size) -> torch.Tensor:
        """Return zero hidden states whose backward reaches the received ones."""
        if received is not None and received.is_floating_point():
            return received * 0
        shape, dtype = (*tokens, *self.stages.cut.crossing.features), self.stages.cut.crossing.dtype
        return torch.zeros(shape, dtype=dtype, device=self.stages.device, requires_grad=True)

    def _kept_going(self, compute: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Compute a value; after an error, compute `otherwise` instead, because other ranks wait for this one."""
        if self._error is None:
            try:
                return compute()
            except Exception as error:
                self._error = error
        return otherwise()

    def _new_schedule(self, tokens: torch.Size) -> Any:
        """Create torch's schedule for this batch shape. Buffers for communication are allocated once."""
        # Imported here, because importing it takes a tenth of the time to load a model.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        make: Any = get_schedule_class(self.sharding.plan.schedule)
        cut = self.stages.cut
        rows = tokens[0] // self.microbatches, tokens[1]
        shape = *rows, *cut.crossing.features
        hidden = torch.empty(shape, dtype=cut.crossing.dtype, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                _OneStage(self, stage),
                stage,
                cut.stages,
                self.stages.device,
                # With these shapes, torch does not run a forward to infer them.
                input_args=torch.empty(rows, dtype=torch.long, device="meta") if stage == 0 else hidden,
                output_args=hidden,
                group=self.mesh.get_group("pp"),
            )
            for stage in self.stages.held
        ]
        held: Any = stages[0] if Schedule(self.sharding.plan.schedule).has_one_stage else stages
        return make(held, self.microbatches, loss_fn=lambda *args: self._loss(*args), scale_grads=False)

    def _check(self, inputs: Batch, targets: Batch) -> None:
        """Check that ranks agree on a batch. Ranks that differ in `fsdp` may have different batches and shapes."""
        with agreed(self._replicas, WHAT) as known, agreed(self._of_one_batch, WHAT) as facts:
            known |= {"the microbatches": self.microbatches}
            # The forward of a stage also checks, but its error would leave the ranks of other stages waiting.
            self.sharding.slots.require_same_parameters(self.model)
            self.sharding.slots.require_no_later_parameters(self.model)
            if problems := list(self._problems(inputs, targets)):
                raise ShardingError("cannot run a step of the pipeline", problems)
            shapes = {name: tuple(value.shape) for name, value in (*inputs.items(), *targets.items())}
            values = {name: int(exact_digest(value)) for name, value in (*inputs.items(), *targets.items())}
            facts |= {"the shapes": shapes, "the values": values} | known

    def _microbatch_problems(self) -> Iterator[Problem]:
        """Yield conditions of torch's schedule that the microbatches violate."""
        stages, schedule = self.stages.cut.stages, Schedule(self.sharding.plan.schedule)
        subject = f"{self.microbatches} microbatches"
        fewest = stages if schedule in (Schedule.ONE_FORWARD_ONE_BACKWARD, Schedule.DUAL_PIPE_V) else 1
        if self.microbatches < fewest:
            detail = f"are too few: {schedule} takes {fewest} or more with {stages} stages"
            yield Problem(ProblemKind.INDIVISIBLE, subject, detail)
        rounds = max(1, self.microbatches // self.mesh["pp"].size())
        if schedule in (Schedule.INTERLEAVED, Schedule.INTERLEAVED_ZERO_BUBBLE) and self.microbatches % rounds:
            detail = f"do not divide into {rounds} rounds of as many each, as {schedule} needs"
            yield Problem(ProblemKind.INDIVISIBLE, subject, detail)

    def _problems(self, inputs: Batch, targets: Batch) -> Iterator[Problem]:
        tokens = inputs.get("input_ids")
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
            yield Problem(ProblemKind.MISSING, "input_ids", "of shape (sequences, length) are what a pipeline takes")
            return
        for name, value in (*inputs.items(), *targets.items()):
            if not isinstance(value, torch.Tensor) or value.shape[:1] != tokens.shape[:1]:
                detail = f"is not a tensor with {len(tokens)} rows, one per sequence"
                yield Problem(ProblemKind.SHAPE, name, detail)
        if "labels" in inputs:
            detail = "makes each stage compute a loss: give it among the targets, to the loss of the step"
            yield Problem(ProblemKind.UNEXPECTED, "labels", detail)
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask", torch.ones_like(tokens))
        # Check values last, because reading them waits for the GPU.
        if (
            self._by_document
            and positions is not None
            and positions.shape == mask.shape
            and start_again(mask, positions)
        ):
            detail = f"pack documents, and {listed(self._by_document)} takes each through all layers by itself: pad"
            yield Problem(ProblemKind.UNEXPECTED, "position_ids", detail)
        if len(tokens) % self.microbatches:
            detail = f"do not divide {len(tokens)} sequences"
            yield Problem(ProblemKind.INDIVISIBLE, f"{self.microbatches} microbatches", detail)
        if torch.is_autocast_enabled(self.stages.device.type):
            detail = "changes the dtype of tensors sent between stages: load the model in the compute dtype instead"
            yield Problem(ProblemKind.DTYPE, "torch.autocast", detail)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.stages.running, self._error = self.stages.held[0], None
        try:
            yield
        finally:
            self.stages.running = None


class _OneStage(nn.Module):
    """One stage of a rank in the form that torch's schedules expect. Its parameters are those of its layers."""

    pipeline: Pipeline
    stage: int

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self.__dict__.update(pipeline=pipeline, stage=stage)

    def forward(self, received: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return self.pipeline._computed(self.stage, received, inputs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        cut = self.pipeline.stages.cut
        outside = cut.outside(self.stage)
        layers = tuple(f"{cut.crossing.stack}.{index}." for index in cut.layers(self.stage))
        for name, parameter in own_parameters(self.pipeline.model):
            if name.startswith(layers) or name in outside:
                yield parameter


def _scalar(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the loss of a microbatch. Raises unless it is a scalar with a graph to the logits."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or loss.requires_grad < logits.requires_grad:
        description = f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        detail = f"is {description}; a scalar that is computed from the logits was expected"
        raise ShardingError("cannot take a step", [Problem(ProblemKind.SHAPE, "the loss of a microbatch", detail)])
    return loss


def _rows(batch: Batch, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value[rows.to(value.device)] for name, value in batch.items()}
