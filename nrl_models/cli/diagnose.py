"""`nrl-models diagnose`: the five diagnostics of NeMo RL's guide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nrl_models.cli.arguments import (
    BOUNDS,
    ENGINE,
    INPUT,
    OUTPUT,
    CheckpointPath,
    Dtype,
    EngineName,
    EngineOption,
    EngineOptions,
    IgnoredConfigKeys,
    JsonFile,
    integer,
    number,
    output_folder,
    torch_dtype,
    vllm_argument,
)
from nrl_models.cli.checkpoint_paths import any_path
from nrl_models.cli.console import Command, CommandGroup, show, show_report, write_json
from nrl_models.common.trust.servers import is_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from nrl_models.consistency.prompts import Prompts
    from nrl_models.diagnostics.result import Diagnosis
    from nrl_models.engines import Engine

USUAL_COUNT, USUAL_NEW_TOKENS = 3_000, 2_048
"""Values of the guide for `prefix-caching`."""

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Run one of the five diagnostics of NeMo RL's guide 'Add New Models' (docs.nvidia.com/nemo/rl).",
)


def _show(result: Diagnosis, json_file: Path | None) -> None:
    """Print a diagnosis and write its JSON. Exit with status 1 if it failed and is not informative."""
    for line in result.lines:
        show(line)
    write_json(json_file, result.to_json())
    if not (result.passed or result.informative):
        raise typer.Exit(1)


def _engine(path: Path, name: str, dtype: str | None, options: list[EngineOption] | None, **more: Any) -> Engine:
    from nrl_models.engines import start_engine
    from nrl_models.engines.start import engine_keywords

    return start_engine(name, path, **engine_keywords(dict(options or ()), dtype=torch_dtype(dtype), **more))


def _limit(engine: str, tokens: int) -> dict[str, int]:
    """Return the length limit to start an engine with: the longest sequence, with room to score it."""
    from nrl_models.engines.start import room_to_score

    return {} if is_server(engine) else {"max_length": tokens + room_to_score(engine)}


def _prompt_source(path: Path) -> Prompts:
    from nrl_models.common.checkpoint.resolve_folder import resolve_folder
    from nrl_models.consistency.prompts import Prompts
    from nrl_models.loading.read_config import read_config

    folder = resolve_folder(path)
    return Prompts.of_checkpoint(folder, read_config(folder).get_text_config().vocab_size)


def _prompts(source: Prompts, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Make prompts of real text, or of random token IDs if there is no tokenizer."""
    from nrl_models.consistency.cells import Cell

    data = "dummy" if source.tokenizer is None else "real"
    return source.make(Cell(length, data, "sampling", count), length, seed)


@app.command(cls=Command)
def max_model_len(
    path: CheckpointPath,
    engine: Annotated[str, vllm_argument("does not enforce a length limit", or_server=True)] = "vllm",
    limit: Annotated[
        int, integer("max_model_len to start the engine with. Not used for a server.", panel=INPUT, least=2)
    ] = 20,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Check that the engine respects max_model_len (NeMo RL's diagnostic 1)."""
    from nrl_models.diagnostics.engine_checks import PROMPT_TOKENS, diagnose_max_model_len

    prompt = _prompts(_prompt_source(path), PROMPT_TOKENS, 1)[0]
    # The limit of a server is set when it is started.
    asked = {} if is_server(engine) else {"max_length": limit}
    with _engine(path, engine, dtype, engine_option, **asked) as started:
        result = diagnose_max_model_len(started, str(path), prompt)
    _show(result, json_file)


@app.command(cls=Command)
def decode_vs_prefill(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    prompts: Annotated[int, integer("Number of prompts.", panel=INPUT, least=1)] = 8,
    length: Annotated[
        int | None,
        integer("Prompt length. \\[default: 64, or less if the model's maximum is shorter]", panel=INPUT, least=1),
    ] = None,
    new_tokens: Annotated[
        int | None,
        integer(
            "Tokens to generate per prompt. \\[default: 512, or fewer if the model's maximum is shorter]",
            panel=INPUT,
            least=1,
        ),
    ] = None,
    threshold: Annotated[
        float,
        number(
            "The check passes if token_mult_prob_error, the mean of exp(|decode - prefill|), is at most FLOAT. decode "
            "and prefill are log-probabilities of the same token.",
            panel=BOUNDS,
        ),
    ] = 1.05,
    seed: Annotated[int, integer("Random seed for prompts and sampling.", panel=INPUT)] = 0,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Check that decoding and prefill give the same log-probabilities (NeMo RL's diagnostic 2)."""
    from nrl_models.diagnostics.engine_checks import diagnose_decode_vs_prefill
    from nrl_models.diagnostics.lengths import fitting_lengths
    from nrl_models.engines.start import longest_sequence

    size, new = fitting_lengths(longest_sequence(path, engine), length, new_tokens, usual=(64, 512))
    made = _prompts(_prompt_source(path), size, prompts, seed)
    with _engine(path, engine, dtype, engine_option, seed=seed, **_limit(engine, size + new)) as started:
        result = diagnose_decode_vs_prefill(started, str(path), made, new_tokens=new, threshold=threshold, seed=seed)
    _show(result, json_file)


@app.command(cls=Command)
def embeddings(
    path: CheckpointPath,
    near_zero_threshold: Annotated[
        float,
        number("A row is near zero if the absolute values of its elements are below FLOAT.", panel=BOUNDS, least=0),
    ] = 1e-10,
    identical_threshold: Annotated[
        float,
        number(
            "A row is constant if the standard deviation of its values is below FLOAT. (Rows are not "
            "compared with each other. NeMo RL's option has the same name and meaning.)",
            panel=BOUNDS,
            least=0,
        ),
    ] = 1e-8,
    reinitialize: Annotated[
        Path | None,
        output_folder(
            "Write the checkpoint to DIR with new values for rows that are near zero, constant or close to the mean of "
            "all rows, and for rows with NaN or infinity. Rows that only duplicate or resemble other rows keep their "
            "values.",
            panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="With --reinitialize: replace the checkpoint in DIR.", rich_help_panel=OUTPUT),
    ] = False,
    seed: Annotated[int, integer("With --reinitialize: random seed for the new rows.", panel=OUTPUT)] = 0,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Find embedding rows that look untrained (NeMo RL's diagnostic 3). Needs no engine."""
    if overwrite and reinitialize is None:
        raise typer.BadParameter("--overwrite needs --reinitialize")
    from nrl_models.common.checkpoint.resolve_folder import resolve_folder
    from nrl_models.consistency.prompts import load_tokenizer
    from nrl_models.diagnostics.embeddings import diagnose_embeddings

    folder = resolve_folder(path)
    result = diagnose_embeddings(
        folder,
        near_zero=near_zero_threshold,
        identical=identical_threshold,
        reinitialize=reinitialize,
        overwrite=overwrite,
        seed=seed,
        tokenizer=load_tokenizer(folder),
    )
    _show(result, json_file)


@app.command(cls=Command)
def precision(
    path: CheckpointPath,
    engine: Annotated[str, vllm_argument("has no compiled modes that can be selected")] = "vllm",
    prompts: Annotated[int, integer("Number of prompts.", panel=INPUT, least=1)] = 4,
    length: Annotated[
        int | None,
        integer("Prompt length. \\[default: 64, or less if the model's maximum is shorter]", panel=INPUT, least=2),
    ] = None,
    new_tokens: Annotated[
        int | None,
        integer(
            "Tokens that eager mode generates per prompt. \\[default: 64, or fewer if the model's maximum is shorter]",
            panel=INPUT,
            least=1,
        ),
    ] = None,
    tolerance: Annotated[
        float,
        number(
            "Report log-probabilities that differ from eager mode's by more than FLOAT * (1 + |eager|).", panel=BOUNDS
        ),
    ] = 1e-3,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Compare vLLM's log-probabilities in compiled modes with those in eager mode (NeMo RL's diagnostic 4).

    The exit status is 0 even if they differ, because rounding alone can cause differences.
    """
    from nrl_models.diagnostics.engine_checks import diagnose_precision
    from nrl_models.diagnostics.lengths import fitting_lengths
    from nrl_models.engines.start import longest_sequence

    size, new = fitting_lengths(longest_sequence(path, engine), length, new_tokens, usual=(64, 64))

    def start(mode: dict[str, Any]) -> Any:
        return _engine(path, engine, dtype, engine_option, **_limit(engine, size + new), **mode)

    made = _prompts(_prompt_source(path), size, prompts)
    result = diagnose_precision(start, str(path), made, new_tokens=new, tolerance=tolerance)
    _show(result, json_file)


@app.command(cls=Command)
def prefix_caching(
    path: CheckpointPath,
    engine: Annotated[str, vllm_argument("runs without prefix caching")] = "vllm",
    engine_python: Annotated[
        list[Path] | None,
        typer.Option(
            parser=any_path,
            metavar="ENVIRONMENT",
            help="Run the vLLM of this Python environment (directory or interpreter). Repeat it to compare versions of "
            "vLLM. \\[default: the environment of this command]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    count: Annotated[
        int | None,
        integer(
            "Prompt: the numbers from 1 to INT. \\[default: 3000, or fewer if the model's maximum is shorter]",
            panel=INPUT,
            least=1,
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        integer(
            "Tokens to generate in each of two turns. \\[default: 2048, or fewer if the model's maximum is shorter]",
            panel=INPUT,
            least=1,
        ),
    ] = None,
    threshold: Annotated[
        float,
        number(
            "The check passes if token_mult_prob_error, the mean of exp(|cached - prefill|), is at most FLOAT. "
            "cached and prefill are the log-probabilities of the same token, computed with the prefix cache and by a "
            "prefill without it.",
            panel=BOUNDS,
        ),
    ] = 1.05,
    dtype: Dtype = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Check that prefix caching does not change a second turn's log-probabilities (NeMo RL's diagnostic 5).

    The prompt of the second turn is the first prompt and its completion.

    The check compares the second completion's log-probabilities with those of one prefill without the prefix cache. The
    check fails if a log-probability is NaN, or if token_mult_prob_error, the mean ratio of the larger to the smaller
    probability, exceeds --threshold.
    """
    from nrl_models.diagnostics.engine_checks import diagnose_prefix_caching
    from nrl_models.diagnostics.lengths import counting_prompt, fitting_lengths
    from nrl_models.diagnostics.versions import diagnose_versions
    from nrl_models.engines.start import longest_sequence

    if engine_python and engine != "vllm":
        raise typer.BadParameter(f"--engine-python needs --engine vllm, not {engine}")
    source, longest = _prompt_source(path), longest_sequence(path, engine)
    asked = None if count is None else len(source.counting(count))
    usual = len(source.counting(USUAL_COUNT)), USUAL_NEW_TOKENS
    length, new = fitting_lengths(longest, asked, new_tokens, usual=usual, turns=2)
    prompt, reached = counting_prompt(source.counting, count or USUAL_COUNT, length)
    if (count is None and reached < USUAL_COUNT) or (new_tokens is None and new < USUAL_NEW_TOKENS):
        show(f"The model is limited to {longest:,} tokens: counting to {reached:,}, generating {new:,} tokens.")
    options: dict[str, Any] = _limit(engine, len(prompt) + 2 * new)
    options |= {"enable_prefix_caching": True}
    decode: Callable[..., str] | None = None if source.tokenizer is None else source.text

    def diagnose(**environment: Any) -> Diagnosis:
        with _engine(path, engine, dtype, engine_option, **options, **environment) as started:
            return diagnose_prefix_caching(
                started, str(path), prompt, new_tokens=new, threshold=threshold, decode=decode
            )

    if not engine_python:
        _show(diagnose(), json_file)
        return
    versions = diagnose_versions(engine_python, lambda python: diagnose(python=str(python)), show)
    show(versions.summary)
    show_report(versions, json_file)
