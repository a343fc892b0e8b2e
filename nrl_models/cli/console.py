"""Output of all commands: results, progress, warnings, and errors without tracebacks."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from nrl_models.common.value_checks import finite_or_none
from nrl_models.errors import DriftError, NRLModelsError, did_you_mean, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nrl_models.parity.parity_report import ParityReport

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""Names of pydantic's bounds, in words."""

PROGRESS_SECONDS = 5.0
"""Seconds between two progress lines if standard error is not a terminal."""

STANDARD_OUTPUT = Path("-")
"""Value of `--json` for standard output."""


UNEXPECTED = (
    "nrl_models did not expect this error. If the checkpoint and its config.json are valid, please report it with the "
    "output of the same command with --traceback."
)


class PlainConsole(Console):
    """A console that escapes control characters, which may occur in tensor names."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a string or a table cell."""
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


@dataclass
class Output:
    """Where a command prints.

    Args:
        quiet: Print only errors and the JSON of `--json -`.
        json_only: Reserve standard output for JSON. Tables and messages go to standard error.
    """

    quiet: bool = False
    json_only: bool = False

    def reset(self) -> None:
        """Restore the defaults. A command that the same process runs next must not inherit `--quiet`."""
        self.quiet = self.json_only = False

    def console(self, *, stderr: bool = False) -> PlainConsole:
        """Return the console for results or, with `stderr`, for progress."""
        console = PlainConsole(stderr=stderr or self.json_only, quiet=self.quiet)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 160  # In a pipe or a log file, rows of a table stay on one line.
        return console


output = Output()


def _without_types(params: list[Any]) -> list[Any]:
    """Return parameters without the Python types that typer shows for flags and arguments (`<bool>`, `<Path>`)."""
    for param in params:
        if param.param_type_name == "argument" or param.is_flag:
            param.display_type_rich = lambda ctx: None
    return params


class Command(TyperCommand):
    """A command whose help text has no Python types, and wraps paragraphs at the width of the terminal."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = (help or "").split("\n\n")
        super().__init__(*args, help="\n\n".join(text.replace("\n", " ") for text in paragraphs), **options)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, and `--help`."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Errors of pydantic, which typer calls, are stated as this library's."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            errors = getattr(error.__cause__, "errors", None)  # pydantic is not imported until a value is wrong
            error.message = _expectation(errors()[0]) if errors else error.message
            raise


class CommandGroup(TyperGroup):
    """A group of commands whose help text has no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, and `--help`."""
        return _without_types(super().get_params(ctx))


def open_closed_streams() -> None:
    """Open the null device for standard streams that the caller closed (`2>&-`), which Python sets to None.

    They must be open before any other file: a file with the descriptor of standard error would receive the output of
    native code. `print(file=None)` would write to standard output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # open() returns the lowest free descriptor: that of the closed stream.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - open as long as the process
            os.set_inheritable(stream.fileno(), stream.fileno() <= 2)
            setattr(sys, name, stream)


class Commands(CommandGroup):
    """Commands that print errors as messages, without a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line. Exit with status 2 if standard output or standard error cannot be written."""
        open_closed_streams()
        try:
            return super().main(*args, **options)
        except OSError as error:  # outside of `invoke`: `--help` on a full disk
            _print_error(error)
            raise SystemExit(2) from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept the options of all commands also after the command name, up to `--`."""
        end = args.index("--") if "--" in args else len(args)
        common = [argument for argument in args[:end] if argument in ("--quiet", "-q", "--traceback")]
        others = [argument for argument in args[:end] if argument not in common]
        return super().parse_args(ctx, [*common, *others, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Exit with status 2 if it raises, with 1 if a check stopped a training run."""
        try:
            return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):  # Ctrl-C, and a closed pipe
            raise
        except Exception as error:
            if ctx.params["traceback"] or hasattr(error, "exit_code"):  # typer's own errors
                raise
            _print_error(error)
            raise typer.Exit(1 if isinstance(error, DriftError) else 2) from error


def _print_error(error: Exception) -> None:
    """Print an error as a message, unless standard error cannot be written. The exit status does not depend on that."""
    with suppress(OSError):
        console = PlainConsole(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]error:[/bold red] {type(error).__name__}")
        console.print(str(error), markup=False)
        if not isinstance(error, (NRLModelsError, OSError)):
            console.print(UNEXPECTED)


def _expectation(problem: Mapping[str, Any]) -> str:
    """Return the value of an option and what was expected, from an error of pydantic."""
    value, context, kind = problem["input"], problem.get("ctx") or {}, str(problem["type"])
    if bounds := [f"{word} {context[name]:g}" for name, word in _BOUNDS.items() if name in context]:
        return f"{value}: expected {' and '.join(bounds)}"
    if kind.startswith(("int_", "float_")):
        return f"{value!r}: expected {'an integer' if kind.startswith('int_') else 'a number'}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if " is not one of " not in message:
        return message
    choices = re.findall("'([^']*)'", message.rpartition(" is not one of ")[2])
    return f"{value!r}{did_you_mean(value, choices)}: expected {'one of ' * (len(choices) > 1)}{', '.join(choices)}"


def show(result: RenderableType) -> None:
    """Print a renderable, whose cells may have markup, or a line unchanged."""
    is_line = isinstance(result, str)
    output.console().print(result, highlight=False, markup=not is_line, soft_wrap=is_line)


def write_json(file: Path | None, content: Any) -> None:
    """Write the file of `--json`, if the option was used. NaN and infinite values are null."""
    text = json.dumps(finite_or_none(content), indent=2, allow_nan=False)
    if file == STANDARD_OUTPUT:
        typer.echo(text)
    elif file is not None:
        from nrl_models.common.checkpoint.writing import write_whole

        write_whole(file, text + "\n")


def show_warnings() -> None:
    """Print warnings of this process as `warning: MESSAGE` on standard error, without a source line."""

    def print_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        console = output.console(stderr=True)
        console.print(f"[yellow]warning:[/yellow] {escape(str(message))}", highlight=False, soft_wrap=True)

    warnings.showwarning = print_warning
    # PEFT reads the old name when it adds an adapter.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def show_checks(report: ParityReport, json_file: Path | None, *, verbose: bool) -> None:
    """Print the summary of a report, then its failures, or every check with `verbose`; write it as JSON."""
    show(report.summary)
    if verbose:
        show(report.table())
    else:
        if report.failed:
            show(report.failures())
        show("--verbose shows every check.")
    write_json(json_file, report.to_json())


def show_report(report: Any, json_file: Path | None, *lines: str) -> None:
    """Print the table of a report and further lines, write its JSON, and exit with status 1 if it did not pass."""
    show(report.table())
    for line in lines:
        show(line)
    write_json(json_file, report.to_json())
    if not report.passed:
        raise typer.Exit(1)


@contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error: a spinner in a terminal, else a line every few seconds.

    Yields:
        A function that shows the next step.
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
