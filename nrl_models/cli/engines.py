"""Commands that need an inference engine: consistency, refit, diagnostics."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import typer

from nrl_models.cli.console import CheckpointPath, JsonFile, app, existing_device, print_table, writable, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from nrl_models.consistency.consistency_report import ConsistencyReport

EngineName = Annotated[str, typer.Option("--engine", help="vllm, hf-generate, or the address of a server.")]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="KEY=VALUE",
        help="What the engine itself takes, such as tensor_parallel_size=2; repeatable. Values are JSON, or text.",
    ),
]
Dtype = Annotated[str | None, typer.Option(help="What the engine computes in; the checkpoint's by default.")]
TrainerDtype = Annotated[str | None, typer.Option(help="What the trainer computes in; the engine's by default.")]
Threshold = Annotated[float, typer.Option(help="Bound on token_mult_prob_error.")]
Device = Annotated[str, typer.Option(help="Where the trainer runs.", callback=existing_device)]


@overload
def dtype_of(name: None, option: str = "--dtype") -> None: ...
@overload
def dtype_of(name: str, option: str = "--dtype") -> torch.dtype: ...
@overload
def dtype_of(name: str | None, option: str = "--dtype") -> torch.dtype | None: ...
def dtype_of(name: str | None, option: str = "--dtype") -> torch.dtype | None:
    """The dtype of that name.

    Raises:
        typer.BadParameter: there is none.
    """
    if name is None:
        return None
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise typer.BadParameter(f"{name!r}: expected float32, bfloat16 or float16", param_hint=option)
    return found


def options_of(given: list[str] | None) -> dict[str, Any]:
    """`KEY=VALUE` pairs, values read as JSON where they are JSON.

    Raises:
        typer.BadParameter: something without a `=`.
    """
    result: dict[str, Any] = {}
    for one in given or []:
        key, equals, value = one.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{one!r}: expected KEY=VALUE", param_hint="--engine-option")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return result


@app.command()
def consistency(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence; repeatable. 100, 1000 and 10000 by default.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="real or dummy; repeatable. Both by default.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="greedy or sampling; repeatable. Both by default.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences generated together; repeatable. 1, 8 and 32 by default.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each cell, with other prompts.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated at most, in each sequence.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Of mode sampling.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Of mode sampling; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of mode sampling; 1 is all.")] = 0.95,
    strict: Annotated[bool, typer.Option(help="Sample from the trainer, too, and average.")] = False,
    threshold: Threshold = 1.05,
    dtype: Dtype = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    text: Annotated[Path | None, typer.Option(help="Real text; that of this machine's Python by default.")] = None,
    load_format: Annotated[
        str, typer.Option(help="auto: the engine reads the weights; dummy: it starts on random ones and is refitted.")
    ] = "auto",
    engine_option: EngineOptions = None,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where measurements are kept; consistency/NAME by default.")] = None,
    fresh: Annotated[bool, typer.Option(help="Discard what was measured before.")] = False,
    json_file: JsonFile = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the report here as Markdown, too.", callback=writable)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report here as one HTML page with plots, too.")] = None,
) -> None:
    """Check that training and inference give the same log-probabilities, over the guide's matrix.

    An interrupted run goes on where it stopped: give the same command again.
    """
    from nrl_models.consistency.cells import BATCHES, DATA, LENGTHS, MODES, Settings
    from nrl_models.logprobs.sampling import Sampling

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
        seed=seed,
    )
    folder = out or Path("consistency") / path.resolve().name
    if html is not None:
        from nrl_models.consistency.html import require_matplotlib

        require_matplotlib()
    from nrl_models.consistency.matrix import check_consistency

    try:
        with _live_table() as progress:
            report = check_consistency(
                path,
                engine=engine,
                settings=settings,
                out=folder,
                dtype=dtype_of(dtype),
                trainer_dtype=dtype_of(trainer_dtype, "--trainer-dtype"),
                device=device,
                text_file=text,
                fresh=fresh,
                load_format=load_format,
                engine_options=options_of(engine_option),
                skip_too_long=length is None,
                progress=progress,
            )
    except KeyboardInterrupt:
        print_table(f"interrupted: what was measured is in {folder}; the same command goes on from there")
        raise typer.Exit(130) from None
    if not sys.stdout.isatty():
        print_table(report.table())
    for result in report.results:
        if not result.passed:
            print_table(f"{result.cell}: {'; '.join(result.problems)}")
            print_table(result.verdict.summary if result.verdict else "not judged: others failed before it")
    write_json(json_file, report.to_json())
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(report.markdown())
    if html is not None:
        from nrl_models.consistency.html import write_html
        from nrl_models.consistency.prompts import load_tokenizer

        write_html(report, html, load_tokenizer(path), command=_command(sys.argv[1:]))
    if report.error:
        from nrl_models.errors import EngineError

        raise EngineError(
            f"{report.error}\nWhat was measured before is in {folder}; the same command goes on from there."
        )
    if not report.passed:
        raise typer.Exit(1)


@app.command("refit-check")
def refit_check(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    dtype: Dtype = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    length: Annotated[int, typer.Option(help="Tokens of the sequences that are compared.", min=8)] = 100,
    batch: Annotated[int, typer.Option(help="How many of them.", min=1)] = 4,
    threshold: Threshold = 1.05,
    bucket_mb: Annotated[
        float | None, typer.Option(help="Send so many MB at a time at most; where no copy is needed, all at once.")
    ] = None,
    engine_option: EngineOptions = None,
    json_file: JsonFile = None,
) -> None:
    """Check that new weights reach an engine: from random ones, and again after a training step."""
    from rich.console import Console

    from nrl_models.consistency.cells import Settings
    from nrl_models.consistency.refit import check_refit

    with Console(stderr=True).status("starting") as status:
        check = check_refit(
            path,
            engine=engine,
            dtype=dtype_of(dtype),
            trainer_dtype=dtype_of(trainer_dtype, "--trainer-dtype"),
            device=device,
            settings=Settings((length,), ("dummy",), ("sampling",), (batch,), threshold=threshold),
            bucket_bytes=None if bucket_mb is None else int(bucket_mb * 1e6),
            engine_options=options_of(engine_option),
            note=status.update,
        )
    print_table(check.table())
    for step in check.steps:
        for problem in (*step.problems, *step.result.problems):
            print_table(f"{step.name}: {problem}")
        if step.result.verdict:
            print_table(f"{step.name}: {step.result.verdict.summary}")
    write_json(json_file, check.to_json())
    if not check.passed:
        raise typer.Exit(1)


def _command(arguments: list[str]) -> str:
    """The command with these arguments, without the secrets among them: keys and passwords of servers."""
    hidden = [re.sub(r"(?i)((?:key|secret|password|[_-]token)=).+", r"\1...", argument) for argument in arguments]
    return shlex.join(["nrl-models", *(re.sub(r"//[^/@]+@", "//...@", argument) for argument in hidden)])


@contextmanager
def _live_table() -> Iterator[Callable[[ConsistencyReport], None]]:
    """A table that changes as cells are measured; where there is no terminal, a line for each cell that is done."""
    from rich.console import Console
    from rich.live import Live

    if sys.stdout.isatty():
        with Live(console=Console(), refresh_per_second=4, vertical_overflow="visible") as live:
            yield lambda report: live.update(report.table())
        return
    done = 0

    def tell(report: ConsistencyReport) -> None:
        nonlocal done
        results = report.results
        for result in results[done:]:
            Console(stderr=True, soft_wrap=True).print(
                f"{len(results)}/{len(results) + len(report.running)} {result.cell}: "
                f"{'pass' if result.passed else 'FAIL'}, token_mult_prob_error {max(result.errors):.7f}, "
                f"noise floor {result.noise:.7f}",
                highlight=False,
            )
        done = len(results)

    yield tell
