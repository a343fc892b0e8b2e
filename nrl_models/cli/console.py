"""What every command prints and writes, and how it fails: with a message, never with a traceback."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from nrl_models.errors import NRLModelsError, visible

if TYPE_CHECKING:
    from rich.table import Table

PROGRESS_SECONDS = 5.0
"""Where there is no terminal, how long to wait between two lines about the same step."""

STANDARD_OUTPUT = Path("-")
"""What `--json` takes for standard output."""


UNEXPECTED = (
    "nrl_models did not expect this error. If the checkpoint and its config.json are in order, please report it, with "
    "what the same command prints with --traceback."
)


class PlainConsole(Console):
    """A console that shows control characters in what it prints, a tensor's name say, escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text to print for a string or a table's cell."""
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


@dataclass
class Output:
    """Where this run of the command prints.

    Args:
        quiet: whether nothing but errors and the JSON of `--json -` is printed.
        json_only: whether standard output is for JSON alone; tables and messages then go to standard error.
    """

    quiet: bool = False
    json_only: bool = False

    def console(self, *, stderr: bool = False) -> PlainConsole:
        """The console for results or, with `stderr`, for progress."""
        console = PlainConsole(stderr=stderr or self.json_only, quiet=self.quiet)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 160  # a pipe or a log: wide enough that a table's rows stay one line each
        return console


output = Output()


class Commands(TyperGroup):
    """Commands whose errors are printed as messages: a mistake of the user's is answered without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the options of every command behind its name, too."""
        common = [argument for argument in args if argument in ("--quiet", "-q", "--traceback")]
        return super().parse_args(ctx, [*common, *(argument for argument in args if argument not in common)])

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with 2 if it failed."""
        try:
            return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):  # Ctrl-C, and a reader of the output who has gone
            raise
        except Exception as error:
            if ctx.params["traceback"] or hasattr(error, "exit_code"):  # which typer's own errors have
                raise
            console = PlainConsole(stderr=True, soft_wrap=True, highlight=False)
            console.print(f"[bold red]error:[/bold red] {type(error).__name__}")
            console.print(str(error), markup=False)
            if not isinstance(error, (NRLModelsError, OSError)):
                console.print(UNEXPECTED)
            raise typer.Exit(2) from error


def show(result: Table | str) -> None:
    """Print a table, whose cells may have markup, or a line as it is."""
    is_line = isinstance(result, str)
    output.console().print(result, highlight=False, markup=not is_line, soft_wrap=is_line)


def write_json(file: Path | None, content: Any) -> None:
    """Write what `--json` asks for, if it was given."""
    text = json.dumps(content, indent=2)
    if file == STANDARD_OUTPUT:
        typer.echo(text)
    elif file is not None:
        from nrl_models.common.checkpoint.writing import write_whole

        write_whole(file, text + "\n")


def show_report(report: Any, json_file: Path | None) -> None:
    """Print a report's table, write it as JSON where that is asked for, and exit with 1 if it did not pass."""
    show(report.table())
    write_json(json_file, report.to_json())
    if not report.passed:
        raise typer.Exit(1)


@contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """Tell on standard error what runs: beside a spinner in a terminal, else as lines, one in some seconds.

    Yields:
        What tells of the next step.
    """
    console = output.console(stderr=True)
    if console.is_terminal:
        with console.status(message) as spinner:
            yield spinner.update
        return
    console.print(message, highlight=False)
    shown = time.monotonic()

    def update(message: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            console.print(message, highlight=False)
            shown = time.monotonic()

    yield update
