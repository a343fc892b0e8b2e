"""Write the measurements of a watch to JSON lines, or to a trainer's logger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.writing import path_to_write
from nrl_models.common.logs import get_logger
from nrl_models.common.value_checks import finite_or_none
from nrl_models.errors import UnknownArgumentError, one_line, shown
from nrl_models.watch.finding import Finding, Severity

logger = get_logger(__name__)

Log = str | Path | Callable[..., None]
"""A file for JSON lines, or a function of `(values, step)` that receives names and numbers."""

PREFIX = "watch/"
"""Prefix of metric names in a logger."""


class Recorder:
    """Sends every event to all logs.

    Args:
        log: a file, a function, or a list of them.

    Attributes:
        files: the files, with `~` expanded.

    Raises:
        UnknownArgumentError: `log` has another type, or no file can have that path.
    """

    def __init__(self, log: Log | Sequence[Log]) -> None:
        is_single = isinstance(log, (str, Path)) or callable(log)
        logs: list[Any] = [log] if is_single or not isinstance(log, Iterable) else list(log)
        if wrong := [one for one in logs if not isinstance(one, (str, Path)) and not callable(one)]:
            expected = "a file, a function of (values, step), or a list of them"
            raise UnknownArgumentError(f"log={shown(log)}: {shown(wrong[0])} is not a log; expected {expected}")
        self.files = [path_to_write("log", one) for one in logs if isinstance(one, (str, Path))]
        self._functions = [one for one in logs if callable(one)]

    def write(
        self,
        event: str,
        step: int,
        version: int,
        values: Mapping[str, float],
        findings: Sequence[Finding],
        versions: Sequence[int] | None = None,
    ) -> None:
        """Write one event.

        Args:
            event: `sync` or `step`.
            step, version: number of the step and of the weights.
            values: measured numbers.
            findings: problems that were found.
            versions: version of the weights that sampled each row.
        """
        record = {
            "event": event,
            "step": step,
            "version": version,
            **finite_or_none(values),
            "findings": [finding.to_json() for finding in findings],
        }
        if versions is not None:
            record["rows_by_version"] = {str(number): count for number, count in sorted(Counter(versions).items())}
        for file in self.files:
            with warning_of_errors(f"log {file}"):
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(record) + "\n")
        failures = sum(finding.level is Severity.FAILURE for finding in findings)
        numbers = {**values, "version": float(version), "failures": float(failures)}
        for function in self._functions:
            with warning_of_errors(f"log {getattr(function, '__name__', function)}"):
                function({PREFIX + name: value for name, value in numbers.items()}, step=step)


@contextmanager
def warning_of_errors(subject: str) -> Iterator[None]:
    """Log errors inside a `with` block as a warning, so that failed writes neither end a run nor hide a failure.

    Args:
        subject: Name of the log or capsule, for the warning.
    """
    try:
        yield
    except Exception as error:  # loggers and disks fail in many ways
        logger.warning_once(f"the watch could not write its {subject}: {one_line(error)}")
