"""What the matrix found, as a table in the guide's form, as JSON and as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from nrl_models.consistency.cells import Cell, Settings
from nrl_models.consistency.measure import COMPARISONS, Measurement
from nrl_models.consistency.verdict import Verdict
from nrl_models.logprobs.metrics import ConsistencyMetrics, finite_or_none
from nrl_models.parity.parity_report import VERDICTS

MAX_OUTSIDE = 0.01
"""Share of sampled tokens that the trainer's top-k and top-p may exclude: at the edge, roundings decide."""


@dataclass(frozen=True)
class CellResult:
    """What came of one cell.

    Args:
        cell: which.
        repeats: its measurements.
        threshold: bound on `token_mult_prob_error`.
        verdict: what is wrong; None if it passes.
    """

    cell: Cell
    repeats: tuple[Measurement, ...]
    threshold: float
    verdict: Verdict | None = None

    @property
    def comparisons(self) -> dict[str, list[ConsistencyMetrics]]:
        """Trainer against the engine, for each way the engine tells: `decode`, `prefill`, `strict`."""
        found = {
            name: [repeat.metrics[name] for repeat in self.repeats if name in repeat.metrics]
            for name in ("decode", "prefill", "strict")
        }
        return {name: metrics for name, metrics in found.items() if metrics}

    @property
    def errors(self) -> list[float]:
        """`token_mult_prob_error` of each repeat, against the engine's decoding."""
        return [metrics.token_mult_prob_error for metrics in self.comparisons["decode"]]

    @property
    def noise(self) -> float:
        """The noise floor: the same number for the trainer against itself, rounding otherwise."""
        return max(repeat.metrics["noise"].token_mult_prob_error for repeat in self.repeats)

    @property
    def problems(self) -> list[str]:
        """Why the cell does not pass; empty if it does."""
        problems = []
        for name, several in self.comparisons.items():
            worst = max((one.token_mult_prob_error for one in several), key=last_if_nan)
            if not worst <= self.threshold:
                problems.append(f"token_mult_prob_error {worst:.6g} against {name}, above {self.threshold:g}")
            for count, what in (
                (sum(one.nan for one in several), "NaN"),
                (sum(one.engine_infinite for one in several), "infinite in the engine"),
            ):
                if count:
                    problems.append(f"{count} log-probabilities of {name} are {what}")
            outside = sum(one.trainer_infinite for one in several)
            if outside > MAX_OUTSIDE * sum(one.tokens + one.trainer_infinite for one in several):
                problems.append(f"{outside} tokens of {name} are outside what the trainer's top-k and top-p leave")
        return problems

    @property
    def explanation(self) -> list[str]:
        """The problems, and the verdict on them."""
        return [*self.problems, *([self.verdict.summary] if self.verdict else [])]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The cell, its worst numbers, and every repeat's."""
        worst = max(self.errors, key=last_if_nan)
        finite = all(map(math.isfinite, self.errors))
        strict = [metrics.token_mult_prob_error for metrics in self.comparisons.get("strict", ())]
        return {
            **asdict(self.cell),
            "verdict": "pass" if self.passed else "fail",
            "token_mult_prob_error": finite_or_none(worst),
            "token_mult_prob_error_mean": finite_or_none(statistics.fmean(self.errors)),
            "token_mult_prob_error_deviation": statistics.pstdev(self.errors) if finite else None,
            "token_mult_prob_error_strict": finite_or_none((worst + max(strict)) / 2) if strict else None,
            "noise_floor": finite_or_none(self.noise),
            "threshold": self.threshold,
            "problems": self.problems,
            "explanation": None if self.verdict is None else self.verdict.to_json(),
            "repeats": [
                dict.fromkeys(COMPARISONS) | {name: metrics.to_json() for name, metrics in repeat.metrics.items()}
                for repeat in self.repeats
            ],
        }


def last_if_nan(value: float) -> float:
    """A key to sort by that puts NaN last."""
    return math.inf if math.isnan(value) else value


@dataclass
class ConsistencyReport:
    """The matrix.

    Args:
        path: the checkpoint.
        settings: what was to be checked.
        engine, trainer: what they say of themselves.
        results: what came of the cells so far, in order.
        running: cells that are not done, and what is being done for them.
        skipped: cells that cannot be checked, and why.
        error: what ended the run early; empty if it came to its end.
    """

    path: str
    settings: Settings
    engine: dict[str, Any]
    trainer: dict[str, Any]
    results: list[CellResult] = field(default_factory=list)
    running: dict[Cell, str] = field(default_factory=dict)
    skipped: dict[Cell, str] = field(default_factory=dict)
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether every cell was checked that can be, and passes."""
        return not self.error and bool(self.results) and all(result.passed for result in self.results)

    @property
    def verdict(self) -> str:
        """`pass`, `fail`, or `incomplete` if the run ended early and nothing had failed."""
        if any(not result.passed for result in self.results):
            return "fail"
        return "pass" if self.passed else "incomplete"

    def to_json(self) -> dict[str, Any]:
        """`{"verdict", "cells": [{"length", "data", "mode", "batch", "token_mult_prob_error", ...}], ...}`."""
        return {
            "verdict": self.verdict,
            "checkpoint": self.path,
            "engine": self.engine,
            "trainer": self.trainer,
            "settings": asdict(self.settings),
            "cells": [result.to_json() for result in self.results],
            "skipped": [{"cell": str(cell), "reason": reason} for cell, reason in self.skipped.items()],
            "error": self.error or None,
        }

    def table(self) -> Table:
        """The guide's table, with what is being done for the cells that are not done."""
        table = Table(title=escape(self.title), title_justify="left")
        for name in (*CELL, *self.columns, "verdict"):
            table.add_column(name, justify="left" if name in ("data", "mode", "verdict") else "right")
        for result in self.results:
            table.add_row(*shown(result.cell), *self.numbers(result), VERDICTS[result.passed])
        for cell, text in (self.running | self.skipped).items():
            table.add_row(*shown(cell), *[""] * len(self.columns), f"[dim]{escape(text)}[/dim]")
        return table

    @property
    def title(self) -> str:
        """What is held against what."""
        engine = f"{self.engine.get('engine')} ({self.engine.get('dtype', 'precision unknown')})"
        return f"{self.path}: trainer ({self.trainer.get('dtype')}) against {engine}"

    @property
    def columns(self) -> tuple[str, ...]:
        """What is shown of each cell."""
        return (*self.comparisons, "worst sequence", "max |diff|", "noise floor")

    @property
    def comparisons(self) -> tuple[str, ...]:
        """What the trainer is held against."""
        return ("decode", "prefill", "strict") if self.settings.strict else ("decode", "prefill")

    def numbers(self, result: CellResult) -> list[str]:
        """A cell's numbers: `token_mult_prob_error` but for the largest difference, which is in nats."""
        found = result.comparisons
        decode = found["decode"]
        return [
            *("-" if name not in found else _worst(found[name], "token_mult_prob_error") for name in self.comparisons),
            _worst(decode, "worst_sequence"),
            f"{max(metrics.max for metrics in decode):.1e}",
            _text(result.noise),
        ]

    def markdown(self) -> str:
        """The guide's table, and what is wrong."""
        lines = [f"# {self.title}", "", f"Verdict: **{self.verdict}**, threshold {self.settings.threshold:g}.", ""]
        lines += [f"The run ended early: {self.error}", ""] if self.error else []
        engine = f"trainer vs {self.engine.get('engine')}"
        names = {"decode": f"{engine}, decode", "prefill": f"{engine}, prefill", "max |diff|": "max abs diff"}
        cell = ("Sequence Length", "Data Type", "Generation Method", "Batch Size")
        rows = [[*cell, *(names.get(name, name) for name in self.columns), "verdict"]]
        rows.append(["---"] * len(rows[0]))
        for result in self.results:
            rows.append([*shown(result.cell), *self.numbers(result), "pass" if result.passed else "**FAIL**"])
        rows += [[*shown(cell), *["-"] * len(self.columns), reason] for cell, reason in self.skipped.items()]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        for result in self.results:
            if not result.passed:
                lines += ["", f"**{result.cell}**", "", *(f"- {line}" for line in result.explanation)]
        return "\n".join([*lines, "", f"Engine: {in_a_line(self.engine)}.", f"Trainer: {in_a_line(self.trainer)}.", ""])


CELL = ("length", "data", "mode", "batch")


def shown(cell: Cell) -> tuple[str, str, str, str]:
    """What tables show of a cell."""
    return f"{cell.length:,}", cell.data, cell.mode, str(cell.batch)


def in_a_line(about: Mapping[str, Any]) -> str:
    """What an engine says of itself."""
    return ", ".join(f"{key} {value}" for key, value in about.items())


def _worst(several: Sequence[ConsistencyMetrics], name: str) -> str:
    return _text(max(getattr(metrics, name) for metrics in several))


def _text(value: float) -> str:
    """A `token_mult_prob_error` with as many digits as tell it from 1."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.7f}" if value < 1.001 else f"{value:.4f}"
