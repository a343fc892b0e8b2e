"""The command that runs a training recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli.arguments import JsonFile, output_folder, saved_to
from nrl_models.cli.console import show, show_report, status


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="YAML file, or the name of a bundled recipe (see --list).")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides of recipe values, e.g. training.steps=10."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the bundled recipes and exit.")] = False,
    out: Annotated[
        Path | None,
        output_folder("Save the trained model and its tokenizer to DIR.", callback=saved_to),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --out: replace the checkpoint in DIR.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Run a training recipe.

    The exit status is 1 if a metric is outside the recipe's bounds, or if the check nrl_models.watch (docs/watch.md)
    stops the run because trainer and engine differ.

    A recipe file can only call the functions that the page docs/recipes.md lists. To use your own function, pass it on
    the command line, for example reward._target_=package.function.
    """
    if listed:
        _list()
        return
    if recipe is None:
        raise typer.BadParameter("missing. `nrl-models train --list` shows the bundled recipes", param_hint="RECIPE")
    with status("reading the recipe") as note:
        from nrl_models.recipes import read_recipe, recipe_file
        from nrl_models.recipes import train as run_recipe

        parsed = read_recipe(recipe_file(recipe), overrides or ())
        run = run_recipe(parsed, out=out, overwrite=overwrite, note=note)
    show(run.summary)
    show_report(run, json_file, *([] if out is None else [f"saved: {out}"]))


def _list() -> None:
    from rich.markup import escape
    from rich.table import Table

    from nrl_models.recipes.included import recipes, summary

    table = Table(title="Recipes", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("what it does")
    for name, file in recipes().items():
        table.add_row(escape(name), escape(summary(file)))
    show(table)
