"""`nrl-models`: the library from the command line. Imports nothing heavy before a command runs."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from nrl_models import __version__
from nrl_models.cli import checking, console, contributing, diagnose, train, using

PANELS = {
    "Use": (using.demo, using.inspect, using.convert, using.plan, using.quirks, train.train),
    "Check": (checking.parity, checking.consistency, checking.refit_check),
    "Contribute": (contributing.new,),
}
"""The commands, in the order of the help text; `diagnose` is a group of commands."""

app = typer.Typer(
    cls=console.Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Prepares Hugging Face models for RL post-training and verifies that nothing changed.",
)
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(diagnose.app, name="diagnose", rich_help_panel="Check")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nrl_models {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print errors only; the exit status says whether checks passed.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What holds for every command."""
    # Threads that wait would spin, on cores that an engine and a trainer share: generating took six times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console.output.quiet, console.output.json_only = quiet, False
    if quiet:
        os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
        logger = logging.getLogger("nrl_models")
        logger.setLevel(logging.ERROR)
        context.call_on_close(lambda: logger.setLevel(logging.NOTSET))
