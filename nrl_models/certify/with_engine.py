"""Checks of a running engine: refits, log-probabilities, decode against prefill."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch

from nrl_models.certify.certified import CheckpointUnderTest
from nrl_models.certify.check_result import (
    LOGPROBS,
    OTHER_CELLS,
    CheckResult,
    Side,
    Status,
    status_of,
    token_error,
)
from nrl_models.certify.sides import side_of_verdict
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.trust.servers import is_server
from nrl_models.consistency.cells import (
    BATCHES,
    DATA,
    GUIDE_BATCHES,
    GUIDE_LENGTHS,
    LENGTHS,
    THRESHOLD,
    Cell,
    Data,
    Settings,
    is_conclusive,
)
from nrl_models.consistency.consistency_report import CellResult, ConsistencyReport
from nrl_models.consistency.matrix import check_consistency
from nrl_models.consistency.measure import MAX_OUTSIDE
from nrl_models.consistency.prompts import load_tokenizer
from nrl_models.consistency.refit import check_refit, refit_settings
from nrl_models.engines.digests import NO_DIGESTS
from nrl_models.logprobs.metrics import shown_error, token_mult_prob_error
from nrl_models.parity.worst import last_if_nan
from nrl_models.quirks import VerdictKind

REFITS = ("refit from random weights", "refit after a training step")
"""Names of the checks of `check_refit`, in the order of its steps."""


IN_FP32 = "Repeat with --dtype float32."
"""Advice for errors that a lower precision explains."""


class OutOfTimeError(BaseException):
    """The budget is used up. Not an `Exception`, so that engines do not report it as their own failure."""


@contextmanager
def interrupting(deadline: float | None) -> Iterator[None]:
    """Raise `OutOfTimeError` at a deadline, between two operations. Only in the main thread, and not on Windows.

    Args:
        deadline: `time.monotonic()`; None for no limit.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if deadline is None or not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise OutOfTimeError("no time left: the budget ended during this check")

    started, handler = time.monotonic(), signal.signal(signal.SIGALRM, interrupt)
    before, _ = signal.setitimer(signal.ITIMER_REAL, max(deadline - started, 0.001))
    try:
        yield
    finally:
        rest = max(before - (time.monotonic() - started), 0.001) if before else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, rest)


def refits(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Start the engine on random weights, refit it, train a step, refit it again; compare log-probabilities."""
    options = subject.options
    assert options.engine is not None
    subject.release_model()
    subject.release_engine()

    def note(step: str) -> None:
        if subject.deadline is not None and time.monotonic() > subject.deadline:
            raise OutOfTimeError(f"no time left: the budget ended before this step: {step}")

    checker = check_refit(
        subject.folder,
        engine=options.engine,
        dtype=options.dtype,
        device=options.device,
        settings=refit_settings(subject.folder, options.engine),
        engine_options=dict(options.engine_options),
        note=note,
    )
    for name, step in zip(REFITS, checker.steps, strict=False):
        verdict = step.result.verdict
        side = (None if step.problems else side_of_verdict(verdict)) or Side.ENGINE
        result = of_cells(subject, name, [step.result], step.faults, verdict.summary if verdict else "", side)
        unseen = checker.unseen if name == REFITS[-1] else ""
        notes = [result.summary, "" if step.report.digests else NO_DIGESTS, unseen]
        yield replace(result, summary="; ".join(filter(None, notes)))
    for name in REFITS[len(checker.steps) :]:
        yield CheckResult(name, Status.NOT_DECIDED, "not reached: the first refit failed")


def log_probabilities(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Compare log-probabilities over a matrix of lengths, prompts, decoding modes and batch sizes."""
    report = _matrix(subject)
    count, total = len(report.results), len(report.settings.cells())
    failed = [result for result in report.results if result.faults]
    problems = [f"{result.cell}: {'; '.join(result.faults)}" for result in failed]
    judged = [result.verdict for result in (*failed, *report.results) if result.verdict]
    verdict = judged[0] if judged else None
    side = side_of_verdict(verdict)
    if report.error:
        problems.append(report.error)
        side = side or Side.ENGINE
    yield of_cells(subject, LOGPROBS, report.results, problems, verdict.summary if verdict else "", side)
    yield _decode_against_prefill(report.results)
    if count < total:
        summary = f"{total - count} of {total} cells: {', '.join(map(str, report.settings.cells()[count:]))}"
        yield CheckResult(OTHER_CELLS, Status.NOT_COVERED, summary, advice="Pass a larger --budget.")


def _matrix(subject: CheckpointUnderTest) -> ConsistencyReport:
    options = subject.options
    assert options.engine is not None
    subject.release_model()
    subject.release_engine()
    has_tokenizer = load_tokenizer(subject.folder) is not None
    settings = Settings(
        lengths=GUIDE_LENGTHS if options.full else LENGTHS,
        batches=GUIDE_BATCHES if options.full else BATCHES,
        data=DATA if has_tokenizer else (Data.DUMMY,),
        threshold=subject.threshold,
        seed=options.seed,
    )
    last: list[ConsistencyReport] = []
    ends: list[float] = []
    rates: list[float] = []

    def progress(report: ConsistencyReport) -> None:
        last[:] = [report]
        now = time.monotonic()
        ends[:] = ends or [now]
        needed = 0.0
        if len(report.results) > len(rates):  # a cell has ended: estimate the time of the next
            rates.append((now - ends[-1]) / _tokens(report.results[-1].cell))
            ends.append(now)
            needed = max(rates) * max(map(_tokens, list(report.running)[:1]), default=0)
        if subject.deadline is not None and report.results and now + needed > subject.deadline:
            raise OutOfTimeError

    try:
        return check_consistency(
            subject.folder,
            engine=options.engine,
            settings=settings,
            out=subject.measurements,
            fresh=subject.fresh or is_server(options.engine),
            dtype=options.dtype,
            device=options.device,
            engine_options=dict(options.engine_options),
            skip_too_long=True,
            progress=progress,
        )
    except OutOfTimeError:
        if not last or not last[0].results:
            raise
        return last[0]


def _tokens(cell: Cell) -> int:
    return cell.length * cell.batch


def of_cells(
    subject: CheckpointUnderTest,
    name: str,
    results: list[CellResult],
    problems: list[str],
    verdict: str,
    side: Side | None,
) -> CheckResult:
    """Summarize cells. An error above the guide's bound that the noise floor or rounding explains decides nothing.

    The log-probabilities of the worst cell are saved for the plots of the report.

    Args:
        subject: the checkpoint.
        name: name of the check.
        results: the cells.
        problems: why it fails; empty if it does not.
        verdict: the source of the failure in words.
        side: the source of the failure, if it fails.
    """
    if not results:
        return CheckResult(name, Status.NOT_DECIDED, "; ".join(problems) or "no cell", compared=0)
    worst = max(results, key=lambda result: last_if_nan(result.worst[1]))
    comparison, error = worst.worst
    errors = worst.errors
    subject.save_plotted(name, worst.repeats[max(range(len(errors)), key=lambda index: last_if_nan(errors[index]))])
    tokens = sum(metrics.tokens for result in results for kind in result.comparisons.values() for metrics in kind)
    wide = [result for result in results if result.passed and not is_conclusive(result.worst[1])]
    rounding = [result for result in results if result.is_rounding]
    status = Status.FAILED if problems else Status.NOT_DECIDED if wide or rounding or not tokens else Status.PASSED
    cells = "1 cell:" if len(results) == 1 else f"{len(results)} cells; worst:"
    summary = f"{cells} {worst.cell}: token_mult_prob_error {shown_error(error)} ({comparison})"
    if wide:
        precision = dtype_name(wide[0].repeats[0].noise_dtype)
        summary += f"; cells above {THRESHOLD} that agree only within the noise floor of {precision}: {len(wide)}"
    if rounding:
        summary += f"; cells above the bound with the verdict {VerdictKind.ROUNDING}: {len(rounding)}"
    return CheckResult(
        name,
        status,
        "; ".join([*problems, summary]),
        **token_error(error, min(worst.bound, THRESHOLD)),
        compared=tokens,
        side=side if problems else None,
        length=max(result.cell.length for result in results),
        advice=" ".join(filter(None, (verdict, IN_FP32 if wide or rounding else ""))),
    )


def _compared(prefill: torch.Tensor, result: CellResult) -> torch.Tensor:
    """Return a mask of tokens, without the few that the prefill's top-k and top-p exclude, see `MAX_OUTSIDE`."""
    outside = prefill == -math.inf
    is_usual = result.sampling.truncates and outside.double().mean() <= MAX_OUTSIDE
    return ~outside if is_usual else torch.ones_like(outside)


def _decode_against_prefill(results: list[CellResult]) -> CheckResult:
    """Compare the engine's log-probabilities while sampling with its own prefill of the same tokens."""
    errors: list[tuple[float, bool]] = []
    tokens = 0
    for result in results:
        for repeat in result.repeats:
            if repeat.prefill is not None:
                error = token_mult_prob_error(repeat.prefill, repeat.decode, _compared(repeat.prefill, result))
                errors.append((error, result.is_rounding or error <= result.bound))
                tokens += int(torch.isfinite(repeat.decode).sum())
    name = "decode against prefill"
    if not errors:
        return CheckResult(name, Status.NOT_DECIDED, "the engine cannot score existing tokens", compared=0)
    error = max((error for error, _ in errors), key=last_if_nan)
    threshold = min(result.threshold for result in results)
    is_wrong = any(not error <= threshold and not is_explained for error, is_explained in errors)
    status = status_of(failed=is_wrong, compared=tokens)
    advice = "The engine disagrees with itself: check its cache, positions and prefix caching." if is_wrong else ""
    if status is Status.PASSED and not is_conclusive(error):
        status, advice = Status.NOT_DECIDED, IN_FP32
    return CheckResult(
        name,
        status,
        f"token_mult_prob_error {shown_error(error)} between decoding and prefill of the same tokens",
        **token_error(error, threshold),
        compared=tokens,
        side=Side.ENGINE if is_wrong else None,
        advice=advice,
    )
