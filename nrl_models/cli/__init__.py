"""The command line `nrl-models`. Has no heavy imports until a command runs."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from nrl_models import __version__
from nrl_models.cli import (
    certifying,
    checking,
    consistency_command,
    console,
    contributing,
    diagnose,
    replaying,
    train,
    using,
)

__all__ = ["app"]

PANELS = {
    "Use": (using.demo, using.inspect, using.convert, using.plan, using.quirks, train.train),
    "Check": (
        certifying.certify,
        checking.parity,
        consistency_command.consistency,
        replaying.replay,
        checking.refit_check,
    ),
    "Contribute": (contributing.new,),
}
"""Commands in the order of the help text. `diagnose` is a group of commands."""

app = typer.Typer(
    cls=console.Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Load Hugging Face models for RL post-training, and verify that trainer and engine compute the same "
    "log-probabilities.",
)
for panel, commands in PANELS.items():
    for command in commands:
        app.command(cls=console.Command, rich_help_panel=panel)(command)
app.add_typer(diagnose.app, name="diagnose", rich_help_panel="Check")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nrl_models {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only errors. The exit status shows the result.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Apply the options of all commands."""
    # By default OpenMP threads spin while they wait. With an engine on the same cores, generation took 6 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console.output.quiet = quiet
    context.call_on_close(console.output.reset)
    console.show_warnings()
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which logs missing CUDA libraries
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if quiet:
        os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
        logger = logging.getLogger("nrl_models")
        logger.setLevel(logging.ERROR)
        context.call_on_close(lambda: logger.setLevel(logging.NOTSET))
