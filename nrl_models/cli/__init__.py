"""`nrl-models`: the library from the command line. Imports nothing heavy before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli import diagnose as _diagnose  # noqa: F401 (its commands join `app`)
from nrl_models.cli.console import CheckpointPath, JsonFile, app, existing_device, print_table, show_report, write_json
from nrl_models.cli.engines import dtype_of  # whose commands join, too


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 150,
    json_file: JsonFile = None,
) -> None:
    """Train a small Llama on text of this machine, load it here, and check everything about it."""
    from nrl_models.cli.demo import run_demo

    report = run_demo(out, steps=steps)
    show_report(report, json_file)


@app.command()
def inspect(path: CheckpointPath, json_file: JsonFile = None) -> None:
    """Say what a checkpoint is, from its configuration and its files' headers alone."""
    from dataclasses import asdict

    from rich.markup import escape
    from rich.table import Table

    from nrl_models.onboarding.inspect import inspect as look

    found = look(path)
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_row("architecture", found.architecture)
    table.add_row("family", found.family or "none: loads as transformers' own class")
    table.add_row("kind", ", ".join(found.kinds))
    table.add_row("sizes", ", ".join(f"{key}={value:,}" for key, value in found.sizes.items()))
    table.add_row("tied embeddings", "yes" if found.tied else "no")
    table.add_row("flags", ", ".join(found.flags) or "none")
    table.add_row("combined", "\n".join(f"{count} x {group}" for group, count in found.groups.items()) or "nothing")
    table.add_row("parameters", f"{found.parameters:,}")
    if found.stored_tensors is None or found.stored_bytes is None:
        table.add_row("files", "no weights here")
    else:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
        table.add_row("files", f"{found.stored_tensors:,} tensors ({dtypes}), {found.stored_bytes / 1e9:.3f} GB")
    print_table(table)
    write_json(json_file, asdict(found))


@app.command()
def parity(
    path: CheckpointPath,
    check: Annotated[list[str] | None, typer.Option(help="1, 2, 3 or gradients; repeatable. All by default.")] = None,
    device: Annotated[str, typer.Option(help="Where to run.", callback=existing_device)] = "cpu",
    length: Annotated[int, typer.Option(help="Tokens in a sequence.", min=8)] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.", min=2)] = 2,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 42,
    json_file: JsonFile = None,
) -> None:
    """Compare a checkpoint loaded here with what transformers loads; name the first module that departs."""
    from nrl_models.parity import check_parity
    from nrl_models.parity.check import CHECKS

    if check and (unknown := sorted(set(check) - set(CHECKS))):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(CHECKS)}", param_hint="--check")
    report = check_parity(path, checks=check or CHECKS, device=device, length=length, batch=batch, seed=seed)
    show_report(report, json_file)


@app.command()
def quirks(
    path: Annotated[
        Path | None, typer.Argument(help="A checkpoint folder, or its config.json; all quirks without.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List the known quirks, or those that concern a checkpoint: symptom, handling, how to switch it off, expiry."""
    from nrl_models.quirks import Subject
    from nrl_models.quirks.listing import as_json, as_table, quirks_of

    subject = None if path is None else Subject.of_checkpoint(path)
    found = quirks_of(subject)
    title = "Known quirks" if subject is None else f"{path}: quirks of {type(subject.model).__name__}"
    print_table(as_table(found, title))
    write_json(json_file, as_json(found, subject))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The checkpoint to read.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto keeps the checkpoint's.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
) -> None:
    """Write a checkpoint again, in another dtype or with other shards; tokenizer and other files come along."""
    from nrl_models.onboarding.convert import convert as write

    written = write(source, target, dtype=dtype, max_shard_size=max_shard_size)
    print_table(f"{target}: {written}")


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(help="A folder with config.json; no weights are needed.")],
    mesh: Annotated[str, typer.Option(help="Ranks by dimension: some of fsdp, ep, tp, e.g. fsdp=16,tp=8.")],
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences of a forward on a rank.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="In which parameters, gradients and states are kept.")] = "float32",
    compute: Annotated[str, typer.Option(help="In which the model computes.")] = "bfloat16",
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward.")] = True,
    memory: Annotated[float, typer.Option(help="GiB of a device.", min=0.0)] = 80.0,
    json_file: JsonFile = None,
) -> None:
    """Say what training a model takes on every rank of a mesh, and what to change if that is too much."""
    from dataclasses import asdict

    from nrl_models.onboarding.estimate_report import plan_report

    report = plan_report(
        path, mesh, seq_len=seq_len, micro_batch=micro_batch, dtype=dtype_of(dtype),
        compute=dtype_of(compute, "--compute"), checkpointing=checkpointing, memory=memory,
    )  # fmt: skip
    print_table(report.table())
    print_table(report.verdict)
    write_json(json_file, asdict(report))
    if not report.fits:
        raise typer.Exit(1)


@app.command()
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
        print_table(overview.as_table(found, names))
        return
    from nrl_models.devtools.coverage import run_generated_tests, write_pages

    pages = write_pages(results or run_generated_tests(out / "results.json"), out)
    print_table(f"wrote {len(pages)} pages to {out}")


@app.command()
def ledger(
    architectures: Annotated[list[str] | None, typer.Argument(help="Which; all registered ones without.")] = None,
    again: Annotated[bool, typer.Option(help="Also those that are recorded with this transformers.")] = False,
    survey: Annotated[bool, typer.Option(help="Only say which keys nothing reads; try none.")] = False,
) -> None:
    """Change each key of each configuration, here and in transformers, and record what it does in the ledger."""
    from nrl_models.common.config.ledger import DEFAULT_ONLY, INERT, UNTRIED, read_ledgers
    from nrl_models.devtools.record_ledger import write_ledger

    departing = False
    for name, found in write_ledger(architectures or (), again=again, survey=survey):
        counts = ((kind, found.count(kind)) for kind in ("consumed", INERT, DEFAULT_ONLY, UNTRIED))
        print_table(f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in counts if count))
        for key, difference in found.departures.items():
            departing = True
            print_table(f"  {key} moves otherwise than in transformers: {difference}")
    ledgers = read_ledgers()
    print_table(f"{len(ledgers.of)} architectures recorded with transformers {ledgers.transformers}")
    if departing:
        raise typer.Exit(1)


@app.command()
def mutate(
    architectures: Annotated[
        list[str] | None, typer.Argument(help="Those to try; all that are registered without.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Where outcomes are kept; a run goes on from there.")] = Path(
        "docs/model-coverage/mutants.json"
    ),
    again: Annotated[bool, typer.Option("--again", help="Try those that are in the results, too.")] = False,
) -> None:
    """Plant bugs into every architecture, one by one, and see that the generated tests find each."""
    from nrl_models.devtools.mutants.campaign import architectures_in_order, run_mutants

    outcomes = {}
    for architecture, outcome in run_mutants(architectures_in_order(architectures), results, again=again):
        outcomes[architecture] = outcome
        print_table(f"{architecture}: {len(outcome.killed)} of {outcome.applicable} killed")
        for mutant in outcome.survived:
            print_table(f"  survived: {mutant}")
    killed = sum(len(one.killed) for one in outcomes.values())
    applicable = sum(one.applicable for one in outcomes.values())
    print_table(f"{killed:,} of {applicable:,} mutants killed in {len(outcomes)} architectures; see {results}")
    if killed < applicable:
        raise typer.Exit(1)


@app.command()
def new(
    source: Annotated[Path, typer.Argument(metavar="PATH_OR_CONFIG", help="A checkpoint folder or a config.json.")],
    name: Annotated[str | None, typer.Option(help="Of the package; else the model_type.")] = None,
    out_of_tree: Annotated[
        Path | None, typer.Option(help="Write an installable package to this new folder, not into this repository.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also for what is served already, with --out-of-tree.")
    ] = False,
) -> None:
    """Make a family: find out what combines, write it, run the generated tests, say what is left to decide."""
    from rich.table import Table

    from nrl_models.onboarding.new import new_family

    made = new_family(source, name=name, out_of_tree=out_of_tree, again=again and out_of_tree is not None)
    plan, passed = made.plan, sum(one["outcome"] == "passed" for one in made.results)
    table = Table(title="New family", title_justify="left", show_header=False)
    table.add_row("architectures", ", ".join(plan.architectures))
    table.add_row("kind", ", ".join(plan.kinds))
    table.add_row("nearest family", f"{plan.nearest[0]} ({plan.nearest[1]:.0%} of keys)" if plan.nearest else "none")
    for layer, groups in plan.detection.groups.items():
        table.add_row(layer.rpartition(":")[2], "; ".join(" + ".join(one) for one in groups))
    for feature, reason in made.limits.items():
        table.add_row(f"limit: {feature}", reason)
    table.add_row("generated tests", f"{passed} passed" if made.results else "not run")
    table.add_row("written", "\n".join(map(str, made.files)))
    for note in plan.notes:
        table.add_row("note", note)
    for decision in made.undecided:
        table.add_row("to decide", decision.message)
    print_table(table)
    if not made.ok:
        print_table("The family is written; a person has to go on from here.")
        raise typer.Exit(1)
    print_table("All generated tests pass.")
