"""Inject bugs into every architecture: `python -m tools.mutants`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli.console import show
from tools.checkout import PAGES
from tools.commands import command_line
from tools.mutants.campaign import architectures_in_order, run_mutants


def mutate(
    architectures: Annotated[list[str] | None, typer.Argument(help="Default: all that are registered.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the coverage pages, with results/.")] = PAGES,
    again: Annotated[bool, typer.Option("--again", help="Also try those that are recorded.")] = False,
) -> None:
    """Inject bugs into every architecture, one by one, and check that the generated tests find each."""
    killed = applicable = tried = 0
    for architecture, outcome in run_mutants(
        architectures_in_order(architectures), out, again=again, progress=lambda line: show(f"  {line}")
    ):
        tried, killed, applicable = tried + 1, killed + len(outcome.killed), applicable + outcome.applicable
        show(f"{architecture}: {len(outcome.killed)} of {outcome.applicable} killed")
        for mutant in outcome.survived:
            show(f"  survived: {mutant}")
    show(f"{killed:,} of {applicable:,} mutants killed in {tried} architecture{'' if tried == 1 else 's'}")
    if killed < applicable:
        raise typer.Exit(1)


app = command_line(mutate)

if __name__ == "__main__":
    app(prog_name="mutants")
