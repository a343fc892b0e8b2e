"""Commands that compare a checkpoint with transformers and with an inference engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nrl_models.cli.arguments import (
    BOUNDS,
    DEVICE,
    DIR,
    ENGINE,
    FILE,
    FLOAT,
    INPUT,
    INT,
    MATRIX,
    OUTPUT,
    SAMPLING,
    TEXT,
    TRAINER,
    CheckpointPath,
    Device,
    Dtype,
    EngineName,
    EngineOptions,
    IgnoredConfigKeys,
    JsonFile,
    Threshold,
    TrainerDtype,
    Verbose,
    check_device,
    engine_name,
    input_size,
    torch_dtype,
    writable,
)
from nrl_models.cli.console import output, show, show_checks, show_report, status, write_json
from nrl_models.common.trust.servers import shown_argument

if TYPE_CHECKING:
    from nrl_models.consistency.consistency_report import ConsistencyReport


class Check(StrEnum):
    """A comparison of `parity`."""

    LEVEL_1 = "1"
    LEVEL_2 = "2"
    LEVEL_3 = "3"
    GRADIENTS = "gradients"


class Data(StrEnum):
    """A source of prompts."""

    REAL = "real"
    DUMMY = "dummy"


class Mode(StrEnum):
    """A decoding mode."""

    GREEDY = "greedy"
    SAMPLING = "sampling"


def parity(
    path: CheckpointPath,
    check: Annotated[
        list[Check] | None,
        typer.Option(metavar="CHECK", help="1, 2, 3 or gradients. Repeatable. \\[default: all]"),
    ] = None,
    device: Annotated[str, typer.Option(metavar=DEVICE, help="Device to run on.")] = "cpu",
    length: Annotated[int, typer.Option(metavar=INT, help="Sequence length in tokens.", min=8)] = 64,
    batch: Annotated[int, typer.Option(metavar=INT, help="Batch size.", min=2)] = 2,
    seed: Annotated[int, typer.Option(metavar=INT, help="Random seed for the inputs.")] = 42,
    second_trainer: Annotated[
        Literal["megatron"] | None,
        typer.Option(metavar="NAME", help="Compare another trainer at the same levels: megatron."),
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    verbose: Verbose = False,
    json_file: JsonFile = None,
) -> None:
    """Compare a checkpoint loaded with nrl_models and with transformers; name the first module that differs.

    Levels: 1 compares weights, 2 compares layers, 3 compares logits.
    """
    from nrl_models.parity import check_parity
    from nrl_models.parity.check import CHECKS

    check_device(device)
    if second_trainer is not None:
        from nrl_models.engines.processes.megatron_core import MegatronEngine

        MegatronEngine.require_installed()  # before anything is loaded
    report = check_parity(path, checks=check or CHECKS, device=device, length=length, batch=batch, seed=seed)
    if second_trainer is not None:
        from nrl_models.megatron.trainer_parity import check_megatron

        report.add(check_megatron(path, checks=check or CHECKS, length=length, batch=batch, seed=seed))
    show_checks(report, json_file, verbose=verbose)
    if not report.passed:
        raise typer.Exit(1)


def consistency(
    context: typer.Context,
    path: CheckpointPath,
    engine: EngineName = "vllm",
    length: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="Sequence length in tokens. \\[default: 100 1000]", rich_help_panel=MATRIX),
    ] = None,
    data: Annotated[
        list[Data] | None,
        typer.Option(metavar="KIND", help="Prompts: real, dummy. \\[default: both]", rich_help_panel=MATRIX),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(metavar="MODE", help="Decoding: greedy, sampling. \\[default: both]", rich_help_panel=MATRIX),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(metavar=INT, help="Batch size. \\[default: 8]", rich_help_panel=MATRIX),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="The 36 cells of NeMo RL's guide: lengths 100, 1000 and 10000; batch sizes 1, 8 and 32.",
            rich_help_panel=MATRIX,
        ),
    ] = False,
    repeats: Annotated[
        int,
        typer.Option(
            metavar=INT, help="Measurements per cell, each with other prompts.", min=1, rich_help_panel=MATRIX
        ),
    ] = 1,
    new_tokens: Annotated[
        int, typer.Option(metavar=INT, help="Most tokens to generate per sequence.", min=1, rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[
        float, typer.Option(metavar=FLOAT, help="Sampling temperature.", rich_help_panel=SAMPLING)
    ] = 0.8,
    top_k: Annotated[int, typer.Option(metavar=INT, help="Top-k; 0 disables it.", rich_help_panel=SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(metavar=FLOAT, help="Top-p; 1 disables it.", rich_help_panel=SAMPLING)] = 0.95,
    strict: Annotated[
        bool,
        typer.Option(help="Also score the trainer's samples, and average both errors.", rich_help_panel=SAMPLING),
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar=INT, help="Random seed for prompts and sampling.", rich_help_panel=SAMPLING)
    ] = 0,
    threshold: Threshold = 1.05,
    noise_factor: Annotated[
        float,
        typer.Option(
            metavar=FLOAT,
            help="Also pass errors up to this multiple of the noise floor, which rounding alone causes.",
            min=0.0,
            rich_help_panel=BOUNDS,
        ),
    ] = 1.5,
    dtype: Dtype = None,
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(
            metavar="FORMAT",
            help="auto: the engine reads the weights. dummy: it starts with random weights and is refitted.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto",
    engine_option: EngineOptions = None,
    witness: Annotated[
        str | None,
        typer.Option(
            parser=engine_name,
            metavar="NAME",
            help="Third engine for failing cells, to tell which side is wrong: mlx, vllm-transformers.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    second_trainer: Annotated[
        str | None,
        typer.Option(
            parser=engine_name,
            metavar="NAME",
            help="Compare another trainer with the engine: megatron.",
            rich_help_panel=TRAINER,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar=FILE,
            help="Text for real prompts. \\[default: Python's reference manual]",
            rich_help_panel=INPUT,
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar=FILE,
            help="Compare a prompt with this image instead of the matrix. Repeatable.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    image_prompt: Annotated[
        str | None,
        typer.Option(
            metavar=TEXT, help="Text after each image. \\[default: Describe the image.]", rich_help_panel=INPUT
        ),
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar=DIR,
            help="Measurements and report.html. \\[default: consistency/MODEL-DIGEST]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard earlier measurements.", rich_help_panel=OUTPUT)
    ] = False,
    verbose: Verbose = False,
    json_file: JsonFile = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar=FILE, help="Write the report as Markdown.", callback=writable, rich_help_panel=OUTPUT),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar=FILE, help="Write report.html to this file as well.", callback=writable, rich_help_panel=OUTPUT
        ),
    ] = None,
    capsule: Annotated[
        Path | None,
        typer.Option(
            metavar=FILE,
            help="Write the evidence of the worst failing cell to a file for nrl-models replay.",
            callback=writable,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    capsule_mb: Annotated[
        float, typer.Option(metavar=FLOAT, help="Largest size of the capsule in MB.", min=0.1, rich_help_panel=OUTPUT)
    ] = 16.0,
    capsule_tokens: Annotated[
        int,
        typer.Option(
            metavar=INT,
            help="Longest sequence whose activations are in the capsule.",
            min=1,
            rich_help_panel=OUTPUT,
        ),
    ] = 1024,
) -> None:
    """Compare log-probabilities of the trainer and an inference engine, over a matrix of settings or on images.

    The default 8 cells take about 10 minutes for a model of 135M parameters on 2 cores; --full takes hours.
    Interrupted runs resume when you repeat the command.
    """
    from nrl_models.consistency.capsule.capsule_file import Limits
    from nrl_models.consistency.cells import (
        BATCHES,
        DATA,
        GUIDE_BATCHES,
        GUIDE_LENGTHS,
        LENGTHS,
        MODES,
        Settings,
    )
    from nrl_models.consistency.html import write_html
    from nrl_models.consistency.matrix import check_consistency
    from nrl_models.consistency.prompts import load_tokenizer
    from nrl_models.errors import EngineError
    from nrl_models.logprobs.sampling import Sampling

    check_device(device)
    try:
        sampling = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if images:
        from nrl_models.cli.image_checking import check_image_files

        check_image_files(
            context,
            images,
            image_prompt or "Describe the image.",
            sampling=sampling,
            dtype=torch_dtype(dtype or "float32"),
            threshold=threshold,
            noise_factor=noise_factor,
            new_tokens=new_tokens,
            seed=seed,
            engine_options=dict(engine_option or ()),
        )
        return
    if image_prompt is not None:
        raise typer.BadParameter("--image-prompt needs --images")
    settings = Settings(
        lengths=tuple(length or (GUIDE_LENGTHS if full else LENGTHS)),
        data=tuple(data or DATA),
        modes=tuple(mode or MODES),
        batches=tuple(batch or (GUIDE_BATCHES if full else BATCHES)),
        repeats=repeats,
        sampling=sampling,
        new_tokens=new_tokens,
        strict=strict,
        threshold=threshold,
        noise_factor=noise_factor,
        seed=seed,
    )
    with _cells_as_they_finish() as progress:
        report = check_consistency(
            path,
            engine=engine,
            settings=settings,
            out=out,
            dtype=torch_dtype(dtype),
            trainer_dtype=torch_dtype(trainer_dtype),
            device=device,
            text_file=text,
            fresh=fresh,
            load_format=load_format,
            engine_options=dict(engine_option or ()),
            skip_too_long=length is None,
            witness=witness or "",
            second_trainer=second_trainer or "",
            capsule=capsule,
            capsule_limits=Limits(megabytes=capsule_mb, tokens=capsule_tokens),
            progress=progress,
        )
    show(report.summary)
    if verbose or report.skipped or not report.passed:
        show(report.table(failures_only=not verbose))
    for result in report.results:
        for line in result.notes:
            show(f"{result.cell}: {line}")
        if not result.passed:
            show(f"{result.cell}: {'; '.join(result.problems)}")
            show(result.verdict.summary if result.verdict else "not judged: earlier cells failed")
    write_json(json_file, report.to_json())
    if markdown is not None:
        from nrl_models.common.checkpoint.writing import write_whole

        write_whole(markdown, report.markdown())
    assert report.out is not None  # check_consistency keeps measurements
    pages = [report.out / "report.html", *([html] if html is not None else [])]
    for page in pages:
        write_html(report, page, load_tokenizer(path), command=shown_command(sys.argv[1:]))
    if report.error:
        raise EngineError(
            *report.error.splitlines(),
            f"Earlier measurements are in {report.out}; the same command resumes.",
        )
    show(f"report: {pages[0]}")
    if capsule is not None:
        show(capsule_line(capsule, report))
    if not report.passed:
        raise typer.Exit(1)


def refit_check(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    dtype: Dtype = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    length: Annotated[
        int | None,
        input_size("Length of the scored sequences. \\[default: 100, or the model's limit]", least=8),
    ] = None,
    batch: Annotated[int, input_size("Number of scored sequences.")] = 4,
    threshold: Threshold = 1.05,
    bucket_mb: Annotated[
        float | None,
        typer.Option(
            metavar=FLOAT,
            help="Largest bucket in MB. \\[default: all tensors at once]",
            min=1e-6,
            max=1e9,
            rich_help_panel=ENGINE,
        ),
    ] = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Check that new weights reach an engine: from random weights, and again after a training step."""
    from nrl_models.consistency.refit import check_refit, refit_settings

    check_device(device)
    with status("starting the engine") as note:
        check = check_refit(
            path,
            engine=engine,
            dtype=torch_dtype(dtype),
            trainer_dtype=torch_dtype(trainer_dtype),
            device=device,
            settings=refit_settings(path, engine, length, batch, threshold),
            bucket_bytes=None if bucket_mb is None else int(bucket_mb * 1e6),
            engine_options=dict(engine_option or ()),
            note=note,
        )
    for step in check.steps:
        for problem in (*step.problems, *step.result.problems, *step.result.notes):
            show(f"{step.name}: {problem}")
        if step.result.verdict:
            show(f"{step.name}: {step.result.verdict.summary}")
    show_report(check, json_file)


def capsule_line(capsule: Path, report: ConsistencyReport) -> str:
    """Describe the capsule of a report, or why there is none."""
    if report.capsule is None:
        older = f" ({capsule} is from an earlier run)" if capsule.exists() else ""
        return f"capsule: not written, because no cell failed{older}"
    size = capsule.stat().st_size / 1e6
    return f"capsule: {capsule} ({size:.1f} MB). To compute its verdict again: nrl-models replay {capsule}"


def shown_command(arguments: list[str]) -> str:
    """Return the command with these arguments, without keys and passwords of servers."""
    return shlex.join(["nrl-models", *map(shown_argument, arguments)])


@contextmanager
def _cells_as_they_finish() -> Iterator[Callable[[ConsistencyReport], None]]:
    """Show progress: a table in a terminal, else a line per finished cell. On Ctrl-C, say how to resume."""
    from rich.live import Live

    out: Path | None = None
    done = 0
    console = output.console(stderr=True)

    def print_new(report: ConsistencyReport) -> None:
        nonlocal done, out
        out = report.out
        results = report.results
        for result in results[done:]:
            comparison, error = result.worst
            console.print(
                f"{len(results)}/{len(results) + len(report.running)} {result.cell}: "
                f"{'pass' if result.passed else 'FAIL'}, token_mult_prob_error {error:.7f} against {comparison}, "
                f"noise floor {result.noise:.7f}",
                highlight=False,
                soft_wrap=True,
            )
        done = len(results)

    def update(report: ConsistencyReport) -> None:
        nonlocal out
        out = report.out
        live.update(report.table())

    try:
        if output.console().is_terminal:
            with Live(console=output.console(), refresh_per_second=4, transient=True) as live:
                yield update
        else:
            yield print_new
    except KeyboardInterrupt:
        measured = f"measurements are in {out}; the same command resumes" if out else "nothing was measured"
        show(f"interrupted: {measured}")
        raise typer.Exit(130) from None
