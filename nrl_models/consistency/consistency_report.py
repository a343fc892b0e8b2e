"""The results of the matrix, as a table in the guide's form, as JSON and as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.value_checks import finite_or_none
from nrl_models.consistency.cells import NOISE_FACTOR, THRESHOLD, Cell, Settings, largest_error
from nrl_models.consistency.measure import Comparison, Measurement, not_finite
from nrl_models.consistency.verdict import Verdict
from nrl_models.logprobs.metrics import ConsistencyMetrics, shown_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.parity_report import Outcome, Unit
from nrl_models.parity.result_table import ResultTable
from nrl_models.parity.worst import last_if_nan, worst_of
from nrl_models.quirks import VerdictKind

CELL = ("length", "data", "mode", "batch")

WITH_ENGINE = (Comparison.DECODE, Comparison.PREFILL, Comparison.STRICT, Comparison.SECOND)
"""Comparisons of a trainer with the engine."""


@dataclass(frozen=True)
class CellResult:
    """Result of one cell.

    Args:
        cell: The cell.
        repeats: Measurements of the cell.
        sampling: Sampling parameters of the tokens, see `Settings.sampling_of`.
        threshold: Bound of `token_mult_prob_error`, unless the noise floor allows more.
        noise_factor: Allowed distance from 1 as a multiple of the noise floor's distance.
        verdict: Source of the disagreement; None if the cell passes or was not judged.
    """

    cell: Cell
    repeats: tuple[Measurement, ...]
    sampling: Sampling
    threshold: float
    noise_factor: float = NOISE_FACTOR
    verdict: Verdict | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.cell}: {Outcome.of(self.passed)}>"

    @classmethod
    def of(cls, cell: Cell, repeats: tuple[Measurement, ...], settings: Settings) -> CellResult:
        """Return the result of measurements with these settings."""
        return cls(cell, repeats, settings.sampling_of(cell), settings.threshold, settings.noise_factor)

    @property
    def comparisons(self) -> dict[Comparison, list[ConsistencyMetrics]]:
        """All comparisons of trainer and engine, by repeat."""
        comparisons = {
            name: [repeat.metrics[name] for repeat in self.repeats if name in repeat.metrics] for name in WITH_ENGINE
        }
        return {name: metrics for name, metrics in comparisons.items() if metrics}

    @property
    def errors(self) -> list[float]:
        """`token_mult_prob_error` of each repeat, compared with the engine's decoding."""
        return [metrics.token_mult_prob_error for metrics in self.comparisons[Comparison.DECODE]]

    @property
    def noise(self) -> float:
        """The noise floor: `token_mult_prob_error` of one model under other roundings, in the lower precision."""
        return worst_of(repeat.metrics[Comparison.NOISE].token_mult_prob_error for repeat in self.repeats)

    @property
    def bound(self) -> float:
        """The largest `token_mult_prob_error` that passes."""
        return largest_error(self.threshold, self.noise_factor, self.noise)

    @property
    def worst(self) -> tuple[Comparison, float]:
        """The comparison with the largest `token_mult_prob_error`, and the error."""
        errors = {
            name: worst_of(metrics.token_mult_prob_error for metrics in repeats)
            for name, repeats in self.comparisons.items()
        }
        name = max(errors, key=lambda name: last_if_nan(errors[name]))
        return name, errors[name]

    @property
    def notes(self) -> list[str]:
        """Notes on a passing cell, such as an error above the threshold that precision explains."""
        name, error = self.worst
        if not self.passed or error <= self.threshold:
            return []
        floor = f"the noise floor of {dtype_name(self.repeats[0].noise_dtype)}: {shown_error(self.noise)}"
        above = f"above {shown_error(self.threshold)}"
        return [f"token_mult_prob_error {shown_error(error)} against {name}, {above}, is within {floor}"]

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the only problem, an error above `THRESHOLD`. Such an error shows no fault."""
        is_explained = self.verdict is not None and self.verdict.kind is VerdictKind.ROUNDING
        return is_explained and self.worst[1] > THRESHOLD and not self._not_finite

    @property
    def problems(self) -> list[str]:
        """Reasons why the cell does not pass; empty if it passes."""
        problems = []
        for name, repeats in self.comparisons.items():
            worst = worst_of(metrics.token_mult_prob_error for metrics in repeats)
            if not worst <= self.bound:
                above = f"above {shown_error(self.threshold)}"
                if self.bound > self.threshold:
                    explained = f"explains ({shown_error(self.bound)})"
                    above += f" and what the noise floor of {shown_error(self.noise)} {explained}"
                problems.append(f"token_mult_prob_error {shown_error(worst)} against {name}, {above}")
        return problems + self._not_finite

    @property
    def faults(self) -> list[str]:
        """The problems; empty if only rounding explains them."""
        return [] if self.is_rounding else self.problems

    @property
    def _not_finite(self) -> list[str]:
        return not_finite(self.comparisons, truncates=self.sampling.truncates)

    @property
    def explanation(self) -> list[str]:
        """The problems, and the verdict on them."""
        return [*self.problems, *([self.verdict.summary] if self.verdict else [])]

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the cell, its worst numbers, and the numbers of every repeat."""
        worst = worst_of(self.errors)
        finite = all(map(math.isfinite, self.errors))
        strict = [metrics.token_mult_prob_error for metrics in self.comparisons.get(Comparison.STRICT, ())]
        return {
            **asdict(self.cell),
            "verdict": Outcome.of(self.passed),
            "value": finite_or_none(self.worst[1]),
            "bound": self.bound,
            "unit": Unit.TOKEN_MULT_PROB_ERROR,
            "comparison": self.worst[0],
            "token_mult_prob_error": finite_or_none(worst),
            "token_mult_prob_error_mean": finite_or_none(statistics.fmean(self.errors)),
            "token_mult_prob_error_deviation": statistics.pstdev(self.errors) if finite else None,
            "token_mult_prob_error_strict": finite_or_none((worst + worst_of(strict)) / 2) if strict else None,
            "noise_floor": finite_or_none(self.noise),
            "noise_dtype": dtype_name(self.repeats[0].noise_dtype),
            "threshold": self.threshold,
            "problems": self.problems,
            "notes": self.notes,
            "explanation": None if self.verdict is None else self.verdict.to_json(),
            "repeats": [
                dict.fromkeys(Comparison) | {name: metrics.to_json() for name, metrics in repeat.metrics.items()}
                for repeat in self.repeats
            ],
        }


class MatrixRow(NamedTuple):
    """A table row of a cell: values, numbers, outcome or reason for its absence, and the result if it has one."""

    cell: tuple[str, ...]
    numbers: tuple[str, ...]
    status: str
    result: CellResult | None


@dataclass
class ConsistencyReport:
    """The matrix of results.

    Args:
        path: The checkpoint.
        settings: Settings of the check.
        engine, trainer: Descriptions of engine and trainer.
        second: Description of the second trainer; empty if there is none.
        results: Results so far, in order.
        running: Unfinished cells with their current step.
        skipped: Cells that cannot be checked, with the reason.
        error: Reason why the run ended early; empty if it did not.
        out: Directory of the measurements; None if they are not saved.
        capsule: File with the capsule of the worst failing cell; None if none was written.
    """

    path: str
    settings: Settings
    engine: dict[str, Any]
    trainer: dict[str, Any]
    results: list[CellResult] = field(default_factory=list)
    running: dict[Cell, str] = field(default_factory=dict)
    skipped: dict[Cell, str] = field(default_factory=dict)
    error: str = ""
    second: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None
    capsule: Path | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.summary}>"

    @property
    def verdict(self) -> Outcome:
        """Result of the complete matrix."""
        if any(not result.passed for result in self.results):
            return Outcome.FAIL
        return Outcome.INCOMPLETE if self.error or not self.results else Outcome.PASS

    @property
    def passed(self) -> bool:
        """Whether all cells that can be checked were checked and passed."""
        return self.verdict == Outcome.PASS

    def to_json(self) -> dict[str, Any]:
        """Return `{"verdict", "cells": [{"length", "data", "mode", "batch", "token_mult_prob_error", ...}], ...}`."""
        return {
            "verdict": self.verdict,
            "checkpoint": self.path,
            "engine": self.engine,
            "trainer": self.trainer,
            "second_trainer": self.second or None,
            "settings": asdict(self.settings),
            "cells": [result.to_json() for result in self.results],
            "skipped": [{"cell": str(cell), "reason": reason} for cell, reason in self.skipped.items()],
            "error": self.error or None,
        }

    @property
    def title(self) -> str:
        """Engine and trainer, with their precisions."""
        engine = f"{self.engine.get('engine')} ({self.engine.get('dtype', 'precision unknown')})"
        trainers = f"trainer ({self.trainer.get('dtype')})"
        if self.second:
            trainers += f" and {self.second.get('engine')} ({self.second.get('dtype')})"
        return f"{self.path}: {trainers} against {engine}"

    @property
    def summary(self) -> str:
        """The result in one line: the number of cells that passed, and the worst one."""
        passed = sum(result.passed for result in self.results)
        line = f"{self.verdict.upper()}: {passed} of {len(self.results)} cells passed: {self.title}"
        if self.results:
            worst = max(self.results, key=lambda result: last_if_nan(result.worst[1]))
            comparison, error = worst.worst
            line += f". Worst: {worst.cell}: token_mult_prob_error {shown_error(error)} ({comparison}), "
            line += f"bound {shown_error(worst.bound)}"
        return line

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers that each row shows."""
        asked = {Comparison.STRICT: self.settings.strict, Comparison.SECOND: bool(self.second)}
        return (*(name for name in WITH_ENGINE if asked.get(name, True)), "worst sequence", "max |diff|", "noise floor")

    def rows(self) -> Iterator[MatrixRow]:
        """Yield a row per cell; unfinished and skipped cells come last.

        Numbers are `token_mult_prob_error`, except the maximum difference, which is in nats.
        """
        for result in self.results:
            comparisons = result.comparisons
            numbers = [
                _worst(comparisons[name], "token_mult_prob_error") if name in comparisons else "-"
                for name in WITH_ENGINE
                if name in self.columns
            ]
            decode = comparisons[Comparison.DECODE]
            largest = f"{worst_of(metrics.max for metrics in decode):.1e}"
            numbers += [_worst(decode, "worst_sequence"), largest, shown_error(result.noise, aligned=True)]
            yield MatrixRow(_values(result.cell), tuple(numbers), Outcome.of(result.passed).shown, result)
        for cell, status in (self.running | self.skipped).items():
            yield MatrixRow(_values(cell), ("",) * len(self.columns), status, None)

    @property
    def table_width(self) -> int:
        """Width that the table needs."""
        return 100 + 10 * (len(self.columns) - 5)

    def table(self, *, failures_only: bool = False) -> ResultTable:
        """Return the guide's table, with the step of each running cell. It fits `table_width` columns.

        Args:
            failures_only: Whether to leave out cells that passed.
        """
        rows = [row for row in self.rows() if not (failures_only and row.result and row.result.passed)]
        table = ResultTable(title=escape(self.title), heading=len(CELL), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in (*CELL, *self.columns):
            table.add_column(name, justify="left" if name in ("data", "mode") else "right")
        table.add_column("verdict")
        for row in rows:
            status = Outcome.of(row.result.passed).markup if row.result else f"[dim]{escape(row.status)}[/dim]"
            table.add_row(*row.cell, *row.numbers, status)
        return table

    def markdown(self) -> str:
        """Return the guide's table, and the problems, as Markdown."""
        lines = [f"# {self.title}", "", f"Verdict: **{self.verdict}**, threshold {self.settings.threshold:g}.", ""]
        lines += [f"The run ended early: {self.error}", ""] if self.error else []
        engine = f"trainer vs {self.engine.get('engine')}"
        names = {
            "decode": f"{engine}, decode",
            "prefill": f"{engine}, prefill",
            "second trainer": f"{self.second.get('engine')} vs {self.engine.get('engine')}, decode",
            "max |diff|": "max abs diff",
        }
        cell = ("Sequence Length", "Data Type", "Generation Method", "Batch Size")
        table = [(*cell, *(names.get(name, name) for name in self.columns), "verdict")]
        table.append(("---",) * len(table[0]))
        table += [
            (*row.cell, *row.numbers, f"**{row.status}**" if row.result and not row.result.passed else row.status)
            for row in self.rows()
        ]
        lines += [f"| {' | '.join(row)} |" for row in table]
        for result in self.results:
            if lines_of_cell := [*result.explanation, *result.notes]:
                lines += ["", f"**{result.cell}**", "", *(f"- {line}" for line in lines_of_cell)]
        lines += ["", f"Engine: {described(self.engine)}.", f"Trainer: {settings_text(self.trainer)}."]
        lines += [f"Second trainer: {described(self.second)}."] if self.second else []
        return "\n".join([*lines, ""])


def described(settings: Mapping[str, Any]) -> str:
    """Describe an engine in one line: its name, then its versions and settings."""
    return ", ".join([str(settings.get("engine", "unknown")), settings_text(settings)])


def settings_text(settings: Mapping[str, Any]) -> str:
    """Describe versions and settings in one line, without the engine's name."""
    return ", ".join(f"{key} {value}" for key, value in settings.items() if key != "engine" and value is not None)


def _values(cell: Cell) -> tuple[str, ...]:
    return f"{cell.length:,}", cell.data, cell.mode, str(cell.batch)


def _worst(repeats: Sequence[ConsistencyMetrics], name: str) -> str:
    return shown_error(worst_of(getattr(metrics, name) for metrics in repeats), aligned=True)
