"""Commands for who adds a family (`new`), and for who maintains this repository (`dev`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli.arguments import local_config_path
from nrl_models.cli.console import show

dev = typer.Typer(no_args_is_help=True, help="Write what the repository records of every family; needs a checkout.")

Architectures = Annotated[list[str] | None, typer.Argument(help="All registered ones without.")]


def new(
    source: Annotated[
        Path,
        typer.Argument(
            parser=local_config_path, metavar="PATH_OR_CONFIG", help="A checkpoint's directory, or a config.json."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Of the package; else the model_type.")] = None,
    out_of_tree: Annotated[
        Path | None, typer.Option(help="Write an installable package to this new directory, not into this repository.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also for what is served already, with --out-of-tree.")
    ] = False,
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
    for decision in made.undecided:
        table.add_row("to decide", decision.message)
    show(table)
    if not made.ok:
        show("The family is written; a person has to go on from here.")
        raise typer.Exit(1)
    show("All generated tests pass.")


@dev.command()
def coverage(
    results: Annotated[
        Path | None, typer.Option(help="Test results to use; without, the generated tests run now.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the pages go, or are.")] = Path("docs/model-coverage"),
    kind: Annotated[
        list[str] | None, typer.Option(help="Write nothing; print the architectures of this kind, e.g. moe.")
    ] = None,
    feature: Annotated[
        list[str] | None, typer.Option(help="... and with this feature, e.g. TP; or TP=refused.")
    ] = None,
) -> None:
    """Write the model coverage pages from the results of the generated tests; or look something up in them."""
    if kind or feature:
        from nrl_models.devtools import overview

        found, names = overview.chosen(overview.read(out / overview.FILE), kind or (), feature or ())
        show(overview.as_table(found, names))
        return
    from nrl_models.devtools.coverage import run_generated_tests, write_pages

    pages = write_pages(results or run_generated_tests(out / "results.json"), out)
    show(f"wrote {len(pages)} pages to {out}")


@dev.command()
def ledger(
    architectures: Architectures = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also those that are recorded with this transformers.")
    ] = False,
    survey: Annotated[bool, typer.Option("--survey", help="Only say which keys nothing reads; try none.")] = False,
) -> None:
    """Change each key of each configuration, here and in transformers, and record what it does in the ledger."""
    from nrl_models.common.config.ledger import DEFAULT_ONLY, INERT, UNTRIED, read_ledgers
    from nrl_models.devtools.record_ledger import write_ledger

    differs = False
    for name, found in write_ledger(architectures or (), again=again, survey=survey):
        counts = ((kind, found.count(kind)) for kind in ("consumed", INERT, DEFAULT_ONLY, UNTRIED))
        show(f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in counts if count))
        for key, difference in found.departures.items():
            differs = True
            show(f"  {key} acts otherwise than in transformers: {difference}")
    ledgers = read_ledgers()
    show(f"{len(ledgers.of)} architectures recorded with transformers {ledgers.transformers}")
    if differs:
        raise typer.Exit(1)


@dev.command()
def mutate(
    architectures: Architectures = None,
    results: Annotated[Path, typer.Option(help="Where outcomes are kept; a run goes on from there.")] = Path(
        "docs/model-coverage/mutants.json"
    ),
    again: Annotated[bool, typer.Option("--again", help="Try those that are in the results, too.")] = False,
) -> None:
    """Plant bugs into every architecture, one by one, and see that the generated tests find each."""
    from nrl_models.devtools.mutants.campaign import architectures_in_order, run_mutants

    killed = applicable = tried = 0
    for architecture, outcome in run_mutants(architectures_in_order(architectures), results, again=again):
        tried, killed, applicable = tried + 1, killed + len(outcome.killed), applicable + outcome.applicable
        show(f"{architecture}: {len(outcome.killed)} of {outcome.applicable} killed")
        for mutant in outcome.survived:
            show(f"  survived: {mutant}")
    show(f"{killed:,} of {applicable:,} mutants killed in {tried} architectures; see {results}")
    if killed < applicable:
        raise typer.Exit(1)
