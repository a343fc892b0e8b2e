"""Results of checks, and the answer that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from enum import StrEnum
from typing import Any

from nrl_models.common.value_checks import finite_or_none
from nrl_models.parity.parity_report import Unit

LOGPROBS = "log-probabilities"
"""Name of the check over a matrix of lengths, prompts, decoding modes and batch sizes."""

OTHER_CELLS = "log-probabilities of the other cells"
"""Name of the result that lists cells for which there was no time."""


class Status(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_DECIDED = "not decided"
    """It ran, and its bound is too wide or its sample empty; or it could not run."""
    LEFT_OUT = "left out"
    """It applies, and did not run: no engine, no time, or not selected."""
    NOT_COVERED = "not covered"
    """Further cells of a check that ran: the budget ended before them. The certificate is narrower."""
    NOT_APPLICABLE = "not applicable"
    """The model has nothing to check."""


class Answer(StrEnum):
    """The answer for a checkpoint."""

    READY = "ready"
    NOT_READY = "not ready"
    NOT_DECIDED = "not decided"


class Side(StrEnum):
    """The source of a failure."""

    FILES = "files"
    CONFIG = "config"
    TOKENIZER = "tokenizer"
    MODEL = "model"
    """The trainer's model class: its loading, forward, gradients or saving."""
    ENGINE = "engine"
    """The engine, its options, or the weights that it received."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    Args:
        name: name of the check.
        status: its outcome.
        summary: the outcome in one line: measured values, or what is wrong.
        value: the measured number, or None.
        bound: the largest `value` that passes, or None.
        unit: unit of both.
        compared: number of compared tensors, tokens or cells. A check that compared nothing cannot pass.
        advice: what to do, if it did not pass.
        seconds: time it took.
        side: the source of a failure; None if it is unknown, or the check did not fail.
        length: length of the longest compared sequence in tokens; 0 if it compares no sequences with an engine.
        is_error: it stopped with an error instead of a measurement, and the next run tries it again.

    Raises:
        ValueError: `status` is `PASSED` and `compared` is 0.
    """

    name: str
    status: Status
    summary: str
    _: KW_ONLY
    value: float | None = None
    bound: float | None = None
    unit: Unit | None = None
    compared: int | None = None
    advice: str = ""
    seconds: float = 0.0
    side: Side | None = None
    length: int = 0
    is_error: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        problems: Sequence[str],
        passed: str,
        *,
        compared: int,
        side: Side | None = None,
        advice: str = "",
        **more: Any,
    ) -> CheckResult:
        """Return the result of a check that fails if there are problems.

        Args:
            name: name of the check.
            problems: what is wrong; empty if the check passes.
            passed: the summary without problems.
            compared: number of compared tensors, tokens or cells. Without any, the check is not decided.
            side: the source of the problems.
            advice: what to do about the problems.
            more: further fields.
        """
        status = status_of(failed=bool(problems), compared=compared)
        if not problems:
            side, advice = None, ""
        summary = "; ".join(problems) or passed
        return cls(name, status, summary, compared=compared, side=side, advice=advice, **more)

    @property
    def is_final(self) -> bool:
        """Whether the next run keeps it. Otherwise there may be an engine, more time, or no error then."""
        return not self.is_error and self.status not in (Status.LEFT_OUT, Status.NOT_COVERED)

    def __post_init__(self) -> None:
        """Check that the result is based on something."""
        if self.status is Status.PASSED and self.compared == 0:
            raise ValueError(f"{self.name}: compared nothing, and cannot pass")

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name. Numbers that are not finite are None."""
        values: dict[str, Any] = finite_or_none(asdict(self))
        return values


def token_error(value: float | None, bound: float) -> dict[str, Any]:
    """Return the fields of a result that compares a `token_mult_prob_error` with its bound."""
    return {"value": value, "bound": bound, "unit": Unit.TOKEN_MULT_PROB_ERROR}


def status_of(*, failed: bool, compared: int) -> Status:
    """Return the status of a check that compared something, or nothing."""
    return Status.FAILED if failed else Status.PASSED if compared else Status.NOT_DECIDED


def answer_of(results: Iterable[CheckResult]) -> Answer:
    """Return the answer that follows from results.

    A failure means not ready. Otherwise a check that was left out or not decided, or no check that passed, means not
    decided.
    """
    statuses = {result.status for result in results}
    if Status.FAILED in statuses:
        return Answer.NOT_READY
    if statuses & {Status.NOT_DECIDED, Status.LEFT_OUT} or Status.PASSED not in statuses:
        return Answer.NOT_DECIDED
    return Answer.READY
