"""Split a model into pipeline stages between layers, with the largest stage as small as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from nrl_models.common.modules import class_name
from nrl_models.distributed.pipeline.crossing import Crossing, NotALineError, crossing_of
from nrl_models.errors import Problem, ProblemKind, ShardingError


@dataclass(frozen=True)
class Cut:
    """A split of a model's layers into stages.

    Args:
        crossing: Values that pass between the layers.
        bounds: First layer of each stage, followed by the number of layers.
        dtype: Compute dtype; None uses the dtype of the parameters.
    """

    crossing: Crossing
    bounds: tuple[int, ...]
    dtype: torch.dtype | None = None

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def outside(self, stage: int) -> frozenset[str]:
        """Return the parameters outside layers that a stage needs, under all their names."""
        return _needed(self.crossing, *self.bounds[stage : stage + 2])

    @cached_property
    def shared(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Stages of each parameter that several stages hold, by all names of the parameter."""
        stages_by_names = {
            names: tuple(stage for stage in range(self.stages) if self.outside(stage) & {*names})
            for names in self.crossing.outside
        }
        return {names: stages for names, stages in stages_by_names.items() if len(stages) > 1}


def cut_into(model: PreTrainedModel, stages: int, dtype: torch.dtype | None = None) -> Cut:
    """Find where to split a model, which may be on meta. Does not modify the model.

    Args:
        model: The model.
        stages: Number of stages.
        dtype: Compute dtype. None uses the dtype of the parameters.

    Raises:
        ShardingError: If the model cannot be split into that many stages. The message has the reason.
    """
    try:
        if getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
            detail = "adds the routers' loss, but a stage lacks the routers of other stages' layers: set it to False"
            raise NotALineError(Problem(ProblemKind.PIPELINE, "output_router_logits", detail))
        crossing = crossing_of(model, dtype)
        return Cut(crossing, _balanced(crossing, stages), dtype)
    except NotALineError as error:
        raise ShardingError(
            f"{class_name(model)} cannot be sharded over the {stages} stages of a pipeline", error.problems
        ) from error


def _balanced(crossing: Crossing, stages: int) -> tuple[int, ...]:
    """Return the bounds whose largest stage has the fewest parameters."""
    count, allowed = crossing.count, [0, *_allowed(crossing), crossing.count]
    if len(allowed) <= stages:
        raise NotALineError(*_obstacles(crossing, stages))
    # For each bound: size of the largest stage before it in the best split, and the bounds of that split.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for _ in range(stages):
        best = {
            end: min(
                (max(largest, _size(crossing, start, end)), (*bounds, end))
                for start, (largest, bounds) in best.items()
                if start < end
            )
            for end in allowed
            if any(start < end for start in best)
        }
    return best[count][1]


def _allowed(crossing: Crossing) -> Iterator[int]:
    """Yield layers before which a model can be split: no later layer reads values of an earlier one directly."""
    for bound in range(1, crossing.count):
        if all(earlier >= bound for reads in crossing.reads[bound:] for earlier in reads):
            yield bound


def _obstacles(crossing: Crossing, stages: int) -> list[Problem]:
    if crossing.count < stages:
        detail = f"has {crossing.count} layers, which are not enough for {stages} stages"
        return [Problem(ProblemKind.PIPELINE, crossing.stack, detail)]
    names = [*(f"layer {index}" for index in range(crossing.count)), "the part after the last layer"]
    return [
        Problem(
            ProblemKind.PIPELINE,
            crossing.stack,
            f"{name} reads more of layer {', '.join(map(str, sorted(reads)))} than hidden states",
        )
        for name, reads in zip(names, crossing.reads, strict=True)
        if reads
    ]


def _needed(crossing: Crossing, start: int, end: int) -> frozenset[str]:
    follows = crossing.needs[end:] if end == crossing.count else ()
    return frozenset().union(*crossing.needs[start:end], *follows)


def _size(crossing: Crossing, start: int, end: int) -> int:
    """Return the number of elements of a stage's parameters."""
    needed = _needed(crossing, start, end)
    outside = sum(size for names, size in crossing.outside.items() if needed & {*names})
    return sum(crossing.inside[start:end]) + outside
