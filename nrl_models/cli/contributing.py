"""Commands for who adds a family (`new`), and for who maintains this repository (`dev`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli.arguments import local_config_path
from nrl_models.cli.console import show

dev = typer.Typer(no_args_is_help=True, help="Write what the repository records of every family; needs a checkout.")

Pages = Annotated[
    Path | None,
    typer.Option(help="The directory of the pages, with results/; docs/model-coverage of the checkout by default."),
]
Architectures = Annotated[list[str] | None, typer.Argument(help="All registered ones without.")]


def new(
    source: Annotated[
        Path,
        typer.Argument(
            parser=local_config_path, metavar="PATH_OR_CONFIG", help="A checkpoint's directory, or a config.json."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Of the package; else the model_type.")] = None,
    out_of_tree: Annotated[Path | None, typer.Option(help="Write an installable package to this directory.")] = None,
    again: Annotated[bool, typer.Option("--again", help="With --out-of-tree, also what is served already.")] = False,
) -> None:
    """Make a family: find out what combines, write it, run the generated tests, say what is left to decide."""
    from rich.table import Table

    from nrl_models.onboarding.new import new_family

    made = new_family(source, name=name, out_of_tree=out_of_tree, again=again and out_of_tree is not None)
    plan, passed = made.plan, sum(result["outcome"] == "passed" for result in made.results)
    table = Table(title="New family", title_justify="left", show_header=False)
    table.add_row("architectures", ", ".join(plan.architectures))
    table.add_row("kind", ", ".join(plan.kinds))
    table.add_row("nearest family", f"{plan.nearest[0]} ({plan.nearest[1]:.0%} of keys)" if plan.nearest else "none")
    for layer, groups in plan.detection.groups.items():
        table.add_row(layer.rpartition(":")[2], "; ".join(" + ".join(group) for group in groups))
    for feature, reason in made.limits.items():
        table.add_row(f"limit: {feature}", reason)
    table.add_row("generated tests", f"{passed} passed" if made.results else "not run")
    table.add_row("written", "\n".join(map(str, made.files)))
    for note in plan.notes:
        table.add_row("note", note)
    for undecided in made.undecided:
        table.add_row("to decide", undecided)
    show(table)
    if not made.ok:
        show("The family is written; a person has to go on from here.")
        raise typer.Exit(1)
    show("All generated tests pass.")


@dev.command()
def coverage(
    architectures: Annotated[
        list[str] | None, typer.Argument(help="Run the generated tests of these first, and record their outcomes.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run the generated tests of every architecture.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Record what pytest --nrl-results wrote here, and run nothing.")
    ] = None,
    out: Pages = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Write nothing; print the architectures of this kind, e.g. moe.")
    ] = None,
    feature: Annotated[
        list[str] | None, typer.Option(help="... and with this feature, e.g. TP; or TP=refused.")
    ] = None,
) -> None:
    """Write the model coverage pages from what is recorded of every architecture; or look something up in it."""
    from tempfile import TemporaryDirectory

    from nrl_models.devtools.checkout import pages_folder

    pages = out or pages_folder()
    from nrl_models.devtools import overview
    from nrl_models.devtools.coverage import overview_rows, write_pages
    from nrl_models.devtools.generated_tests import record_generated_tests, run_generated_tests
    from nrl_models.devtools.results import read_records

    if kind or feature:
        found, names = overview.chosen(overview_rows(read_records(pages)), kind or (), feature or ())
        show(overview.as_table(found, names))
        return
    with TemporaryDirectory() as folder:
        if results is None and (architectures or everything):
            results = Path(folder) / "results.json"
            run_generated_tests(architectures or (), results)
        if results is not None:
            show(f"recorded the generated tests of {len(record_generated_tests(results, pages))} architectures")
    show(f"wrote {len(write_pages(pages))} pages to {pages}")


@dev.command()
def ledger(
    architectures: Architectures = None,
    again: Annotated[bool, typer.Option("--again", help="Also those that are recorded already.")] = False,
    survey: Annotated[bool, typer.Option("--survey", help="Only say which keys nothing reads; try none.")] = False,
) -> None:
    """Change each key of each configuration, here and in transformers, and record what it does in the ledger."""
    from nrl_models.devtools.checkout import pages_folder

    pages_folder()  # raises where this is no checkout
    from nrl_models.common.config.ledger import KeyKind
    from nrl_models.devtools.record_ledger import write_ledger

    recorded, differs = 0, False
    for name, found in write_ledger(architectures or (), again=again, survey=survey):
        recorded += 1
        counts = {"consumed": found.consumed}
        counts |= {kind: found.count(kind) for kind in (KeyKind.INERT, KeyKind.DEFAULT_ONLY, KeyKind.UNTRIED)}
        show(f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
        for key, difference in found.departures.items():
            differs = True
            show(f"  {key} behaves differently from transformers: {difference}")
    show(f"{recorded} architectures recorded")
    if differs:
        raise typer.Exit(1)


@dev.command()
def mutate(
    architectures: Architectures = None,
    out: Pages = None,
    again: Annotated[bool, typer.Option("--again", help="Try those that are recorded, too.")] = False,
) -> None:
    """Plant bugs into every architecture, one by one, and see that the generated tests find each."""
    from nrl_models.devtools.checkout import pages_folder

    pages = out or pages_folder()
    from nrl_models.devtools.mutants.campaign import architectures_in_order, run_mutants

    killed = applicable = tried = 0
    for architecture, outcome in run_mutants(architectures_in_order(architectures), pages, again=again):
        tried, killed, applicable = tried + 1, killed + len(outcome.killed), applicable + outcome.applicable
        show(f"{architecture}: {len(outcome.killed)} of {outcome.applicable} killed")
        for mutant in outcome.survived:
            show(f"  survived: {mutant}")
    show(f"{killed:,} of {applicable:,} mutants killed in {tried} architectures")
    if killed < applicable:
        raise typer.Exit(1)


@dev.command(name="release-check", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def release_check(
    context: typer.Context,
    packages: Annotated[
        list[str] | None, typer.Argument(help="`newest`, or versions such as transformers==5.24.0.")
    ] = None,
) -> None:
    """Judge new releases of transformers, torch and other packages; other options as `tools.release_check` has them."""
    import os
    import subprocess
    import sys

    from nrl_models.devtools.checkout import ROOT, pages_folder

    pages_folder()  # raises outside a checkout
    arguments = [*(packages or ["--help"]), *context.args]
    command = [sys.executable, "-m", "tools.release_check", *arguments]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",
    }
    raise typer.Exit(subprocess.run(command, env=os.environ | variables, check=False).returncode)
