"""Single-command command lines. They print errors of this library in red and exit with 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from nrl_models.errors import NRLModelsError

stderr = Console(stderr=True, highlight=False)


class _Command(typer.core.TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NRLModelsError as error:
            stderr.print(str(error), style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error


def command_line(command: Callable[..., None]) -> typer.Typer:
    """Create a command line that runs `command`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=_Command)(command)
    return app
