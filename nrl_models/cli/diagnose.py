"""`nrl-models diagnose`: the numbered diagnostics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nrl_models.cli.arguments import (
    CheckpointPath,
    Dtype,
    DtypeName,
    EngineName,
    EngineOption,
    EngineOptions,
    JsonFile,
    torch_dtype,
)
from nrl_models.cli.console import show, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from nrl_models.consistency.prompts import Prompts
    from nrl_models.diagnostics.result import Diagnosis
    from nrl_models.engines import Engine

app = typer.Typer(no_args_is_help=True, help="Targeted checks for known failure modes.")


def _show(result: Diagnosis, json_file: Path | None) -> None:
    """Print a diagnosis, write it, and exit with 1 if it failed and is not informative."""
    for line in result.lines:
        show(line)
    write_json(json_file, result.to_json())
    if not (result.passed or result.informative):
        raise typer.Exit(1)


def _engine(path: Path, name: str, dtype: DtypeName | None, options: list[EngineOption] | None, **more: Any) -> Engine:
    from nrl_models.engines import start_engine

    return start_engine(name, path, dtype=torch_dtype(dtype), **(more | dict(options or ())))


def _prompt_source(path: Path) -> Prompts:
    from nrl_models.common.checkpoint.files import resolve_folder
    from nrl_models.consistency.prompts import Prompts
    from nrl_models.loading.read_config import read_config

    folder = resolve_folder(path)
    return Prompts.of_checkpoint(folder, read_config(folder).get_text_config().vocab_size)


def _prompts(source: Prompts, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of real text where there is a tokenizer, else of numbers."""
    from nrl_models.consistency.cells import Cell

    data = "dummy" if source.tokenizer is None else "real"
    return source.make(Cell(length, data, "sampling", count), length, seed)


@app.command()
def max_model_len(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    limit: Annotated[int, typer.Option(help="max_model_len to start the engine with.", min=2)] = 20,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    json_file: JsonFile = None,
) -> None:
    """1: the engine keeps to the longest sequence it was told."""
    from nrl_models.diagnostics.engine_checks import PROMPT_TOKENS, diagnose_max_model_len

    prompt = _prompts(_prompt_source(path), PROMPT_TOKENS, 1)[0]
    # A server has its own limit, chosen where it was started.
    asked = {} if engine.startswith("http") else {"max_length": limit}
    with _engine(path, engine, dtype, engine_option, **asked) as started:
        result = diagnose_max_model_len(started, str(path), prompt)
    _show(result, json_file)


@app.command()
def decode_vs_prefill(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    prompts: Annotated[int, typer.Option(help="How many.", min=1)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.", min=1)] = 512,
    threshold: Annotated[float, typer.Option(help="Bound on the mean of exp(abs(difference)).")] = 1.05,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    json_file: JsonFile = None,
) -> None:
    """2: decoding gives the log-probabilities of one prefill."""
    from nrl_models.diagnostics.engine_checks import diagnose_decode_vs_prefill

    made = _prompts(_prompt_source(path), length, prompts, seed)
    with _engine(path, engine, dtype, engine_option, seed=seed) as started:
        result = diagnose_decode_vs_prefill(
            started, str(path), made, new_tokens=new_tokens, threshold=threshold, seed=seed
        )
    _show(result, json_file)


@app.command()
def embeddings(
    path: CheckpointPath,
    near_zero_threshold: Annotated[float, typer.Option(help="On the largest absolute value of a row.")] = 1e-10,
    identical_threshold: Annotated[float, typer.Option(help="On the standard deviation of a row.")] = 1e-8,
    reinitialise: Annotated[Path | None, typer.Option(help="Write it here with such rows reinitialised.")] = None,
    seed: Annotated[int, typer.Option(help="Of the new rows.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """3: no embedding row is zero or constant. Reads the embeddings alone, and needs no engine."""
    from nrl_models.diagnostics.embeddings import diagnose_embeddings

    result = diagnose_embeddings(
        path, near_zero=near_zero_threshold, identical=identical_threshold, reinitialise=reinitialise, seed=seed
    )
    _show(result, json_file)


@app.command()
def precision(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    prompts: Annotated[int, typer.Option(help="How many.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.", min=2)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens that eager mode generates for each.", min=1)] = 64,
    tolerance: Annotated[float, typer.Option(help="Absolute and relative.")] = 1e-3,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    json_file: JsonFile = None,
) -> None:
    """4: compiled modes give eager's log-probabilities. Informative: failures are common, and exit with 0."""
    from nrl_models.diagnostics.engine_checks import diagnose_precision

    def start(mode: dict[str, Any]) -> Any:
        return _engine(path, engine, dtype, engine_option, **mode)

    made = _prompts(_prompt_source(path), length, prompts)
    result = diagnose_precision(start, str(path), made, new_tokens=new_tokens, tolerance=tolerance)
    _show(result, json_file)


@app.command()
def prefix_caching(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    count: Annotated[int, typer.Option(help="The prompt counts so far.", min=1)] = 3000,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate, twice.", min=1)] = 2048,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    json_file: JsonFile = None,
) -> None:
    """5: no NaN once an answer is part of the next prompt."""
    from nrl_models.diagnostics.engine_checks import diagnose_prefix_caching

    source = _prompt_source(path)
    prompt = source.counting(count)
    # One more token, because the engine samples one when it scores.
    options: dict[str, Any] = {"enable_prefix_caching": True} if engine == "vllm" else {}
    if not engine.startswith("http"):
        options["max_length"] = len(prompt) + 2 * new_tokens + 1
    decode: Callable[..., str] | None = None if source.tokenizer is None else source.text
    with _engine(path, engine, dtype, engine_option, **options) as started:
        result = diagnose_prefix_caching(started, str(path), prompt, new_tokens=new_tokens, decode=decode)
    _show(result, json_file)
