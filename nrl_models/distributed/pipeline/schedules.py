"""Assignment of pipeline stages to ranks, as torch's schedules expect it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from nrl_models.errors import Problem, ProblemKind, did_you_mean


class Schedule(StrEnum):
    """In which order ranks compute microbatches, by torch's names (`torch.distributed.pipelining`)."""

    GPIPE = "GPipe"
    ONE_FORWARD_ONE_BACKWARD = "1F1B"
    LOOPED_BREADTH_FIRST = "LoopedBFS"
    INTERLEAVED = "Interleaved1F1B"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZERO_BUBBLE_V = "ZBVZeroBubble"
    DUAL_PIPE_V = "DualPipeV"

    @property
    def has_one_stage(self) -> bool:
        """Whether a rank holds a single stage."""
        return self in (Schedule.GPIPE, Schedule.ONE_FORWARD_ONE_BACKWARD)

    @property
    def is_v(self) -> bool:
        """Whether stages run through the ranks forward and then backward: the first rank has the first and last one."""
        return self in (Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V)

    def stages_of(self, rank: int, ranks: int, per_rank: int | None) -> tuple[int, ...]:
        """Return the stages of a rank. If the schedule allows a choice, `per_rank` stages, or 2."""
        if self.is_v:
            return rank, 2 * ranks - 1 - rank
        return tuple(rank + turn * ranks for turn in range(1 if self.has_one_stage else per_rank or 2))


def schedule_problems(schedule: str, asked: int | None) -> Iterator[Problem]:
    """Yield the problems of a plan's schedule."""
    if schedule not in {*Schedule}:
        detail = f"is not a schedule{did_you_mean(schedule, Schedule)}; expected one of {', '.join(Schedule)}"
        yield Problem(ProblemKind.PLAN, repr(schedule), detail)
        return
    fixed = 1 if Schedule(schedule).has_one_stage else 2 if Schedule(schedule).is_v else None
    if asked is not None and (asked != (fixed or asked) or asked < (fixed or 2)):
        expected = f"{fixed} by {schedule}" if fixed else f"2 or more by {schedule}"
        yield Problem(ProblemKind.PLAN, "stages_per_rank", f"is {asked}; a rank has {expected}")
