"""Commands that check a checkpoint: against transformers, and against an inference engine."""

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
    CheckpointPath,
    Device,
    Dtype,
    EngineName,
    EngineOptions,
    IgnoredConfigKeys,
    JsonFile,
    Threshold,
    TrainerDtype,
    check_device,
    engine_name,
    torch_dtype,
    writable,
)
from nrl_models.cli.console import output, show, show_report, status, write_json
from nrl_models.common.trust.servers import shown_argument

if TYPE_CHECKING:
    from nrl_models.consistency.consistency_report import ConsistencyReport


class Check(StrEnum):
    """What `parity` compares."""

    LEVEL_1 = "1"
    LEVEL_2 = "2"
    LEVEL_3 = "3"
    GRADIENTS = "gradients"


class Data(StrEnum):
    """What prompts are made of."""

    REAL = "real"
    DUMMY = "dummy"


class Mode(StrEnum):
    """How tokens are chosen."""

    GREEDY = "greedy"
    SAMPLING = "sampling"


def parity(
    path: CheckpointPath,
    check: Annotated[list[Check] | None, typer.Option(help="Level or gradients; repeatable. All by default.")] = None,
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    length: Annotated[int, typer.Option(help="Tokens in a sequence.", min=8)] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.", min=2)] = 2,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 42,
    second_trainer: Annotated[
        Literal["megatron"] | None, typer.Option(help="Another trainer, compared with ours at the same levels.")
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Compare a checkpoint loaded here with what transformers loads; name the first module that differs."""
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
    show_report(report, json_file)


def consistency(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a sequence; 100, 1000 and 10000 without.")] = None,
    data: Annotated[list[Data] | None, typer.Option(help="What prompts are; both without.")] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="How tokens are chosen; both without.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at a time; 1, 8 and 32 without.")] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each cell, with other prompts.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated at most, in each sequence.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Of mode sampling.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Of mode sampling; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of mode sampling; 1 is all.")] = 0.95,
    strict: Annotated[bool, typer.Option(help="Sample from the trainer, too, and average.")] = False,
    threshold: Threshold = 1.05,
    noise_factor: Annotated[
        float,
        typer.Option(
            help="An error above the threshold passes if it is at most so many times as far from 1 as the noise floor.",
            min=0.0,
        ),
    ] = 1.5,
    dtype: Dtype = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Real text; or Python's sources.")
    ] = None,
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(help="auto: the engine reads the weights; dummy: it starts on random ones and is refitted."),
    ] = "auto",
    engine_option: EngineOptions = None,
    witness: Annotated[
        str | None,
        typer.Option(
            parser=engine_name,
            metavar="NAME",
            help="Another engine, asked about cells that fail: mlx, vllm-transformers.",
        ),
    ] = None,
    second_trainer: Annotated[
        str | None,
        typer.Option(
            parser=engine_name, metavar="NAME", help="Another trainer, compared with the engine as well: megatron."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where measurements are kept; consistency/NAME by default.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard what was measured before.")] = False,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the report as Markdown.", callback=writable)] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page with plots.", callback=writable)] = None,
) -> None:
    """Check that training and inference give the same log-probabilities, over a matrix of settings.

    Options of the matrix (length, data, mode, batch) are repeatable. An interrupted run continues where it stopped, if
    the same command is given again.
    """
    from nrl_models.consistency.cells import BATCHES, DATA, LENGTHS, MODES, Settings
    from nrl_models.consistency.html import require_matplotlib, write_html
    from nrl_models.consistency.matrix import check_consistency
    from nrl_models.consistency.prompts import load_tokenizer
    from nrl_models.errors import EngineError
    from nrl_models.logprobs.sampling import Sampling

    check_device(device)
    if html is not None:
        require_matplotlib()
    try:
        sampling = Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = Settings(
        lengths=tuple(length or LENGTHS),
        data=tuple(data or DATA),
        modes=tuple(mode or MODES),
        batches=tuple(batch or BATCHES),
        repeats=repeats,
        sampling=sampling,
        new_tokens=new_tokens,
        strict=strict,
        threshold=threshold,
        noise_factor=noise_factor,
        seed=seed,
    )
    kept = out or Path("consistency") / path.resolve().name
    try:
        with _cells_as_they_finish() as progress:
            report = check_consistency(
                path,
                engine=engine,
                settings=settings,
                out=kept,
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
                progress=progress,
            )
    except KeyboardInterrupt:
        show(f"interrupted: what was measured is in {kept}; the same command continues from there")
        raise typer.Exit(130) from None
    if not output.console().is_terminal:
        show(report.table())
    for result in report.results:
        for line in result.notes:
            show(f"{result.cell}: {line}")
        if not result.passed:
            show(f"{result.cell}: {'; '.join(result.problems)}")
            show(result.verdict.summary if result.verdict else "not judged: others failed before it")
    write_json(json_file, report.to_json())
    if markdown is not None:
        from nrl_models.common.checkpoint.writing import write_whole

        write_whole(markdown, report.markdown())
    if html is not None:
        write_html(report, html, load_tokenizer(path), command=shown_command(sys.argv[1:]))
    if report.error:
        raise EngineError(
            *report.error.splitlines(),
            f"What was measured before is in {kept}; the same command continues from there.",
        )
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
        typer.Option(help="Tokens of the sequences that are compared; 100, or what the model takes, without.", min=8),
    ] = None,
    batch: Annotated[int, typer.Option(help="How many of them.", min=1)] = 4,
    threshold: Threshold = 1.05,
    bucket_mb: Annotated[
        float | None, typer.Option(help="MB to send at a time at most; everything without.", min=1e-6, max=1e9)
    ] = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Check that new weights reach an engine: from random ones, and again after a training step."""
    from nrl_models.consistency.refit import check_refit, refit_settings

    check_device(device)
    with status("starting") as note:
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


def shown_command(arguments: list[str]) -> str:
    """The command with these arguments, without the secrets among them: keys and passwords of servers."""
    return shlex.join(["nrl-models", *map(shown_argument, arguments)])


@contextmanager
def _cells_as_they_finish() -> Iterator[Callable[[ConsistencyReport], None]]:
    """A table that changes as cells are measured; where there is no terminal, a line for each cell that is done."""
    from rich.live import Live

    if output.console().is_terminal:
        with Live(console=output.console(), refresh_per_second=4, vertical_overflow="visible") as live:
            yield lambda report: live.update(report.table())
        return
    done = 0
    console = output.console(stderr=True)

    def tell(report: ConsistencyReport) -> None:
        nonlocal done
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

    yield tell
