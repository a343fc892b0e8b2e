"""The command `consistency`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nrl_models.cli.arguments import (
    BOUNDS,
    ENGINE,
    INPUT,
    MATRIX,
    OUTPUT,
    SAMPLING,
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
    engine_argument,
    input_file,
    integer,
    number,
    output_file,
    output_folder,
    torch_dtype,
)
from nrl_models.cli.console import output, show, write_json
from nrl_models.cli.image_checking import ImageFiles, ImagePrompt, check_image_files
from nrl_models.common.trust.servers import shown_argument
from nrl_models.consistency import Data, Mode

if TYPE_CHECKING:
    from nrl_models.consistency.consistency_report import ConsistencyReport

NOT_ANALYZED = "cause not determined: only the first failing cells are analyzed"


def consistency(
    context: typer.Context,
    path: CheckpointPath,
    engine: EngineName = "vllm",
    length: Annotated[
        list[int] | None, integer("Sequence length in tokens. Repeatable. \\[default: 100 1000]", panel=MATRIX)
    ] = None,
    data: Annotated[
        list[Data] | None,
        typer.Option(
            metavar="KIND",
            help="Prompts: real (text) or dummy (counting numbers). Repeatable. \\[default: both]",
            rich_help_panel=MATRIX,
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            metavar="MODE", help="Decoding: greedy or sampling. Repeatable. \\[default: both]", rich_help_panel=MATRIX
        ),
    ] = None,
    batch: Annotated[list[int] | None, integer("Batch size. Repeatable. \\[default: 8]", panel=MATRIX)] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Compare all 36 cells of NeMo RL's guide: lengths 100, 1000 and 10000; batch sizes 1, 8 and 32; both "
            "kinds of prompts and both modes.",
            rich_help_panel=MATRIX,
        ),
    ] = False,
    repeats: Annotated[int, integer("Measurements per cell, each with new prompts.", panel=MATRIX, least=1)] = 1,
    new_tokens: Annotated[
        int,
        integer(
            "Number of tokens to generate per sequence. --length includes them. If INT is more than half of "
            "--length, half of --length is used.",
            panel=SAMPLING,
            least=1,
        ),
    ] = 128,
    temperature: Annotated[float, number("Sampling temperature.", panel=SAMPLING)] = 0.8,
    top_k: Annotated[int, integer("Top-k; 0 disables it.", panel=SAMPLING)] = 0,
    top_p: Annotated[float, number("Top-p; 1 disables it.", panel=SAMPLING)] = 0.95,
    strict: Annotated[
        bool,
        typer.Option(
            help="Compare in both directions: also score samples of the trainer with the engine. A cell fails if "
            "either comparison fails. Without this option, the trainer scores samples of the engine, but not the other "
            "way round.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    seed: Annotated[int, integer("Random seed for prompts and sampling.", panel=SAMPLING)] = 0,
    threshold: Threshold = 1.05,
    noise_factor: Annotated[
        float,
        number(
            "A cell also passes if its token_mult_prob_error is at most 1 + FLOAT * (noise floor - 1). The noise "
            "floor is the error that rounding alone causes. 0 disables this rule.",
            panel=BOUNDS,
            least=0.0,
        ),
    ] = 1.5,
    dtype: Dtype = None,
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(
            metavar="FORMAT",
            help="auto: the engine loads the checkpoint. dummy: it starts with random weights, then gets "
            "the trainer's weights.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto",
    engine_option: EngineOptions = None,
    witness: Annotated[
        str | None,
        engine_argument(
            "Also score failing cells with a third implementation, mlx or vllm-transformers. The report says whether "
            "it agrees with the trainer or with the engine.",
            panel=ENGINE,
        ),
    ] = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    second_trainer: Annotated[
        Literal["megatron"] | None,
        typer.Option(
            metavar="NAME",
            help="Also compare a second trainer with the engine in every cell. Supported: megatron (Megatron-Core).",
            rich_help_panel=TRAINER,
        ),
    ] = None,
    text: Annotated[
        Path | None, input_file("Text for real prompts. \\[default: Python's reference manual]", panel=INPUT)
    ] = None,
    images: ImageFiles = None,
    image_prompt: ImagePrompt = None,
    ignore_config_key: IgnoredConfigKeys = None,
    out: Annotated[
        Path | None,
        output_folder(
            "Directory for measurements and report.html. \\[default: consistency/MODEL-DIGEST]", panel=OUTPUT
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard earlier measurements.", rich_help_panel=OUTPUT)
    ] = False,
    verbose: Verbose = False,
    json_file: JsonFile = None,
    markdown: Annotated[Path | None, output_file("Write the report as Markdown.")] = None,
    html: Annotated[Path | None, output_file("Also write the HTML report to FILE.")] = None,
    capsule: Annotated[
        Path | None,
        output_file("If a cell fails, write a capsule to FILE: the evidence of the worst cell, for nrl-models replay."),
    ] = None,
    capsule_mb: Annotated[float, number("Maximum size of the capsule in MB.", panel=OUTPUT, least=0.1)] = 16.0,
    capsule_tokens: Annotated[
        int, integer("Leave activations of sequences longer than INT tokens out of the capsule.", panel=OUTPUT, least=1)
    ] = 1024,
) -> None:
    """Compare the log-probabilities of trainer and inference engine, for several lengths, prompts and decoding modes.

    The trainer is the model as nrl_models loads it. A cell is a combination of length, prompts, decoding mode and batch
    size. The 8 default cells take about 10 minutes for a model of 135M parameters on 2 cores; --full takes hours.
    Exit status: 0 all cells passed, 1 a cell failed, 2 could not run. Interrupted runs resume when you repeat the
    command.
    """
    from nrl_models.consistency.capsule.capsule_file import Limits
    from nrl_models.consistency.cells import BATCHES, DATA, GUIDE_BATCHES, GUIDE_LENGTHS, LENGTHS, MODES, Settings
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
            show(result.verdict.summary if result.verdict else NOT_ANALYZED)
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
    """Show progress: a table in a terminal that is wide enough, else a line per finished cell.

    On Ctrl-C, say how to resume.
    """
    from rich.live import Live

    from nrl_models.logprobs.metrics import shown_error
    from nrl_models.parity.parity_report import Outcome

    out: Path | None = None
    live: Live | None = None
    done = 0
    results, progress = output.console(), output.console(stderr=True)

    def update(report: ConsistencyReport) -> None:
        nonlocal out, live, done
        out = report.out
        if results.is_terminal and results.width >= report.table_width:
            live = live or shown.enter_context(Live(console=results, refresh_per_second=4, transient=True))
            live.update(report.table())
            return
        count = len(report.results)
        for result in report.results[done:]:
            comparison, error = result.worst
            progress.print(
                f"{count}/{count + len(report.running)} {result.cell}: {Outcome.of(result.passed).shown}, "
                f"token_mult_prob_error {shown_error(error)} against {comparison}, "
                f"noise floor {shown_error(result.noise)}",
                highlight=False,
                soft_wrap=True,
            )
        done = count

    try:
        with ExitStack() as shown:
            yield update
    except KeyboardInterrupt:
        measured = f"measurements are in {out}; the same command resumes" if out else "nothing was measured"
        show(f"interrupted: {measured}")
        raise typer.Exit(130) from None
