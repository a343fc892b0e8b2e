"""Record the effects of configuration keys: `python -m tools.ledger`."""

from __future__ import annotations

from typing import Annotated

import typer

from nrl_models.cli.console import show
from tools.commands import command_line
from tools.ledger import record
from tools.ledger.ledger import FOLDER, KeyKind, read_ledgers
from tools.ledger.loading_table import write_loading_table


def ledger(
    architectures: Annotated[list[str] | None, typer.Argument(help="Default: all that are registered.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also those that are recorded already.")] = False,
    survey: Annotated[bool, typer.Option("--survey", help="Only say which keys nothing reads; try none.")] = False,
) -> None:
    """Change each key of each configuration, here and in transformers, and record its effect in the ledger."""
    recorded, differs = 0, False
    for name, found in record.write_ledger(architectures or (), again=again, survey=survey):
        recorded += 1
        counts = {"consumed": found.consumed}
        counts |= {kind: found.count(kind) for kind in (KeyKind.INERT, KeyKind.DEFAULT_ONLY, KeyKind.UNTRIED)}
        show(f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
        for key, difference in found.departures.items():
            differs = True
            show(f"  {key} behaves differently from transformers: {difference}")
    write_loading_table(read_ledgers(FOLDER))
    show(f"{recorded} architectures recorded")
    if differs:
        raise typer.Exit(1)


app = command_line(ledger)

if __name__ == "__main__":
    app(prog_name="ledger")
