"""Write the model coverage pages: `python -m tools.coverage_pages`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nrl_models.cli.console import show
from tools.checkout import PAGES
from tools.commands import command_line
from tools.coverage_pages import overview
from tools.coverage_pages.generated_tests import record_generated_tests, run_generated_tests
from tools.coverage_pages.pages import overview_rows, write_pages
from tools.coverage_pages.results import read_records


def coverage(
    architectures: Annotated[
        list[str] | None, typer.Argument(help="Run the generated tests of these first, and record their outcomes.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run the generated tests of every architecture.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Record what pytest --nrl-results wrote here, and run nothing.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the pages, with results/.")] = PAGES,
    kind: Annotated[
        list[str] | None, typer.Option(help="Write nothing; print the architectures of this kind, e.g. moe.")
    ] = None,
    feature: Annotated[list[str] | None, typer.Option(help="... and with this feature, e.g. TP; or TP=raises.")] = None,
) -> None:
    """Write the model coverage pages from recorded outcomes, or print the architectures of a kind or with a feature."""
    if kind or feature:
        found, names = overview.chosen(overview_rows(read_records(out)), kind or (), feature or ())
        show(overview.as_table(found, names))
        return
    with TemporaryDirectory() as folder:
        if results is None and (architectures or everything):
            results = Path(folder) / "results.json"
            run_generated_tests(architectures or (), results)
        if results is not None:
            show(f"recorded the generated tests of {len(record_generated_tests(results, out))} architectures")
    show(f"wrote {len(write_pages(out))} pages to {out}")


app = command_line(coverage)

if __name__ == "__main__":
    app(prog_name="coverage_pages")
