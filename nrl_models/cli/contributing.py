"""The command that onboards an architecture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli.arguments import output_folder
from nrl_models.cli.checkpoint_paths import local_config_path
from nrl_models.cli.console import show


def new(
    source: Annotated[
        Path,
        typer.Argument(
            parser=local_config_path, metavar="PATH_OR_CONFIG", help="Local checkpoint directory or config.json."
        ),
    ],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Package name. \\[default: the model_type]")] = None,
    out_of_tree: Annotated[
        Path | None,
        output_folder("Write an installable package to DIR. \\[default: write into your clone of nrl_models]"),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="With --out-of-tree: also accept an architecture that nrl_models already supports."
        ),
    ] = False,
) -> None:
    """Generate and test a family: a Python package with the classes that nrl_models needs for an architecture.

    The command detects groups of linears that can be fused into one matmul (Q, K and V; gate and up). By default, it
    writes the package into your clone of nrl_models, with a page of test results (docs/model-coverage) and a list of
    the configuration keys that the model reads. To detect groups, the command runs a tiny model. If some linears are
    not called in this run, the output ends with a question to you: do they belong to a group? The generated tests need
    pytest: install the extra `test`. Exit status: 0 all tests passed; 1 a test failed or a question is open; 2 the
    command could not run, or the model has no linears to fuse.
    """
    from rich.table import Table

    from nrl_models.onboarding.new import new_family

    made = new_family(source, name=name, out_of_tree=out_of_tree, again=again and out_of_tree is not None)
    plan, outcomes = made.plan, Counter(result["outcome"] for result in made.results)
    table = Table(title="New family", title_justify="left", show_header=False)
    table.add_row("architectures", ", ".join(plan.architectures))
    table.add_row("kind", ", ".join(plan.kinds))
    table.add_row("nearest family", f"{plan.nearest[0]} ({plan.nearest[1]:.0%} of keys)" if plan.nearest else "none")
    for layer, groups in plan.detection.groups.items():
        table.add_row(layer.rpartition(":")[2], "; ".join(" + ".join(group) for group in groups))
    for feature, reason in made.limits.items():
        table.add_row(f"limit: {feature}", reason)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    table.add_row("generated tests", counts or "not run")
    table.add_row("written", "\n".join(map(str, made.files)))
    for note in plan.notes:
        table.add_row("note", note)
    for undecided in made.undecided:
        table.add_row("to decide", undecided)
    for failure in dict.fromkeys(made.upstream):
        table.add_row("transformers", f"{failure}. Its own class fails in the same way")
    show(table)
    if made.upstream and not made.undecided:
        show(
            "The family is written, and computes what transformers' own class computes. That class also fails the "
            "generated tests listed above, so decide whether you can use the model."
        )
        raise typer.Exit(1)
    if not made.ok:
        show("The family is written, but not all generated tests pass. Continue by hand.")
        raise typer.Exit(1)
    show("All generated tests pass.")
