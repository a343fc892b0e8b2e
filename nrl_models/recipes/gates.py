"""Bounds on metrics of a run, as written in a recipe: `median(token_mult_prob_error) < 1.05`."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nrl_models.common.config.spelling import misspellings_of
from nrl_models.errors import UnknownArgumentError, suggestion

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
"""Statistics of a metric over all steps."""

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_GATE = re.compile(r"\s*(\w+)\(\s*(\w+)\s*\)\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound on a statistic of a metric over the steps of a run."""

    statistic: str
    metric: str
    relation: str
    bound: float

    @classmethod
    def parse(cls, text: str, metrics: Sequence[str]) -> Gate:
        """Parse a gate.

        Args:
            text: `STATISTIC(METRIC) RELATION NUMBER`.
            metrics: Metrics that the run measures.

        Raises:
            UnknownArgumentError: If the text is not a gate. The message lists the valid names.
        """
        match = _GATE.fullmatch(text)
        if match is None:
            raise UnknownArgumentError(f"{text!r}: expected a gate such as 'median({metrics[0]}) < 1.05'")
        statistic, metric, relation, number = match.groups()
        wrong = []
        if statistic not in STATISTICS:
            wrong.append(f"unknown statistic {statistic}: expected one of {', '.join(STATISTICS)}")
        if metric not in metrics:
            hint = suggestion(misspellings_of(metric, metrics))
            wrong.append(f"unknown metric {metric}{hint}: this run measures {', '.join(metrics)}")
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if not math.isfinite(bound):
            wrong.append(f"the bound {number} is not a finite number")
        if wrong:
            raise UnknownArgumentError(f"{text!r}: {'; '.join(wrong)}")
        return cls(statistic, metric, relation, bound)

    @property
    def measure(self) -> str:
        """The statistic and its metric, as in a recipe: `last(loss)`."""
        return f"{self.statistic}({self.metric})"

    def __str__(self) -> str:
        return f"{self.measure} {self.relation} {self.bound:g}"

    def check(self, history: Sequence[Mapping[str, float]]) -> GateResult:
        """Check the metrics of all steps. A metric that was not measured, or is NaN in any step, fails the gate."""
        values = [step[self.metric] for step in history if self.metric in step]
        value = STATISTICS[self.statistic](values) if values and not any(map(math.isnan, values)) else math.nan
        return GateResult(self, value, RELATIONS[self.relation](value, self.bound))


@dataclass(frozen=True, slots=True)
class GateResult:
    """Result of a gate: the value of its statistic (NaN if there is none), and whether it is within the bound."""

    gate: Gate
    value: float
    passed: bool
