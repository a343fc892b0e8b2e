"""The application, and what every command shares: its arguments, its output, and errors without tracebacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.table import Table


class Commands(TyperGroup):
    """Commands that print what this library raises on purpose, and what files make fail, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with 2 if it failed."""
        from rich.console import Console

        from nrl_models.errors import NRLModelsError

        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has gone
            raise
        except (NRLModelsError, OSError) as error:
            Console(stderr=True).print(f"[bold red]error:[/bold red] {type(error).__name__}", highlight=False)
            Console(stderr=True).print(str(error), markup=False, highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Prepares Hugging Face models for RL post-training and verifies that nothing changed.",
)

CheckpointPath = Annotated[Path, typer.Argument(help="A checkpoint folder.")]


def writable(file: Path | None) -> Path | None:
    """Make sure that a result can be written, before time is spent on it."""
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            is_new = not file.exists()
            file.open("a").close()
            if is_new:
                file.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written: {error.strerror}") from error
    return file


def existing_device(name: str) -> str:
    """Make sure that torch can put a tensor on a device."""
    import torch

    try:
        torch.empty(1, device=name)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise typer.BadParameter(f"{name}: {str(error).splitlines()[0]}") from error
    return name


JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result here as JSON, too.", callback=writable)]


def print_table(table: Table | str) -> None:
    """Print a table, whose cells may have markup, or a line as it is."""
    import os
    import sys

    from rich.console import Console

    # Where the width is not known (a pipe, a log), wide enough that a table's rows stay one line each.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    Console(width=width).print(table, highlight=False, markup=not isinstance(table, str))


def write_json(file: Path | None, content: Any) -> None:
    """Write what `--json` asks for, if it was given."""
    if file is not None:
        file.write_text(json.dumps(content, indent=2) + "\n")


def show_report(report: Any, json_file: Path | None) -> None:
    """Print a report's table, write it as JSON where that is asked for, and exit with 1 if it did not pass."""
    print_table(report.table())
    write_json(json_file, report.to_json())
    if not report.passed:
        raise typer.Exit(1)
