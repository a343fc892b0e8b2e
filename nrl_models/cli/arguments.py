"""Arguments shared by several commands. Parsers run before torch is imported, so mistakes are reported at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, overload

import typer

from nrl_models.cli.checkpoint_paths import any_path, checkpoint_path, existing_file, output_directory
from nrl_models.cli.console import STANDARD_OUTPUT, output
from nrl_models.common.mesh_sizes import parse_mesh
from nrl_models.common.trust.servers import VLLMS, is_secret, is_server, require_engine
from nrl_models.errors import DeviceError, EngineError, ShardingError, UnknownArgumentError

if TYPE_CHECKING:
    import torch

INT, FLOAT, TEXT, FILE, DIR, DTYPE, DEVICE = "INT", "FLOAT", "TEXT", "FILE", "DIR", "DTYPE", "DEVICE"
"""Metavars in help texts."""

ENGINE, TRAINER, MATRIX, SAMPLING = "Engine", "Trainer", "Matrix", "Sampling"
BOUNDS, INPUT, OUTPUT = "Bounds", "Input", "Output"
"""Panels in help texts."""

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
"""Dtypes and their short names, as `from_pretrained` accepts them."""


class EngineOption(NamedTuple):
    """A `KEY=VALUE` option of an engine."""

    key: str
    value: Any


def writable(file: Path | None) -> Path | None:
    """Raise if `file` cannot be written, before the command computes anything."""
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            is_new = not file.exists()
            file.open("a").close()
            if is_new:
                file.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written: {error.strerror}") from error
    return file


def saved_to(folder: Path | None) -> Path | None:
    """Raise if a model cannot be saved to `folder`, before the command computes anything."""
    if folder is not None:
        writable(folder / "config.json")
    return folder


def json_target(file: Path | None) -> Path | None:
    """Check a file as `writable` does. For `-`, reserve standard output for JSON."""
    if file == STANDARD_OUTPUT:
        output.json_only = True
        return file
    return writable(file)


def mesh_sizes(text: str) -> str:
    """Check a mesh such as `fsdp=16,tp=8`, and return it unchanged."""
    try:
        parse_mesh(text)
    except ShardingError as error:
        problems = (f"{problem.subject}: {problem.detail}; {problem.advice}" for problem in error.problems)
        raise typer.BadParameter("\n".join(problems)) from error
    return text


def parse_dtype(text: str) -> str:
    """Parse a dtype: `float32` or `fp32`, and so on. Returns torch's name.

    Raises:
        typer.BadParameter: An unknown dtype.
    """
    for name, short in DTYPES.items():
        if text in (name, short):
            return name
    expected = ", ".join(f"{name} ({short})" for name, short in DTYPES.items())
    raise typer.BadParameter(f"unknown dtype {text!r}: expected one of {expected}")


def dtype_or_auto(text: str) -> str:
    """Parse a dtype, or `auto` for the dtype of the checkpoint."""
    return text if text == "auto" else parse_dtype(text)


def complete_dtype(incomplete: str) -> list[str]:
    """Complete the name of a dtype in a shell."""
    return [name for name in DTYPES if name.startswith(incomplete)]


def dtype_argument(text: str, *, panel: str | None = None, parser: Callable[[str], str] = parse_dtype) -> Any:
    """Return a typer option for a dtype, with this help text."""
    return typer.Option(parser=parser, autocompletion=complete_dtype, metavar=DTYPE, help=text, rich_help_panel=panel)


def integer(text: str, *, panel: str | None = None, least: int | None = None, most: int | None = None) -> Any:
    """Return a typer option for a whole number, with this help text; see `number`."""
    return typer.Option(metavar=INT, help=text, rich_help_panel=panel, min=least, max=most)


def number(text: str, *, panel: str | None = None, least: float | None = None, most: float | None = None) -> Any:
    """Return a typer option for a finite number, with this help text.

    Args:
        text: The help text.
        panel: The option's group in help texts.
        least: The smallest value.
        most: The largest value.
    """
    return typer.Option(metavar=FLOAT, help=text, callback=finite, rich_help_panel=panel, min=least, max=most)


def finite(value: float | None) -> float | None:
    """Raise if `value` is infinite or NaN: every comparison with NaN is false, so no limit would hold."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def input_file(text: str, *, panel: str | None = None, metavar: str = FILE) -> Any:
    """Return a typer option for an existing file, with this help text."""
    return typer.Option(parser=existing_file, metavar=metavar, help=text, rich_help_panel=panel)


def output_file(text: str) -> Any:
    """Return a typer option for a file to write, with this help text."""
    return typer.Option(parser=any_path, metavar=FILE, help=text, callback=writable, rich_help_panel=OUTPUT)


def output_folder(text: str, *, panel: str | None = None, callback: Callable[..., Path | None] | None = None) -> Any:
    """Return a typer option for a directory to write, with this help text."""
    return typer.Option(parser=output_directory, metavar=DIR, help=text, callback=callback, rich_help_panel=panel)


def engine_argument(text: str, *flags: str, panel: str = ENGINE) -> Any:
    """Return a typer option for the name of an engine, with this help text."""
    return typer.Option(*flags, parser=engine_name, metavar="NAME", help=text, rich_help_panel=panel)


def vllm_argument(reason: str, *, or_server: bool = False) -> Any:
    """Return a typer option for the name of an engine that must be vLLM.

    Args:
        reason: Why other engines are not supported, for the error.
        or_server: Whether the URL of a server is also supported.
    """
    supported = " or ".join((", ".join(VLLMS), "a server URL (http://HOST:PORT)") if or_server else VLLMS)

    def parse(name: str) -> str:
        if engine_name(name) in VLLMS or (or_server and is_server(name)):
            return name
        raise typer.BadParameter(f"{name} {reason}: expected {supported} (`make engine` installs vLLM)")

    return typer.Option("--engine", parser=parse, metavar="NAME", help=f"{supported}.", rich_help_panel=ENGINE)


def engine_name(name: str) -> str:
    """Parse the name of an engine, or the URL of a server."""
    try:
        require_engine(name)
    except EngineError as error:
        raise typer.BadParameter(str(error)) from error
    return name


def engine_option(text: str) -> EngineOption:
    """Parse `KEY=VALUE`. The value is parsed as JSON if it is JSON."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r}: expected KEY=VALUE")
    if is_secret(key):
        return EngineOption(key, value)  # never parsed: a key may look like a number
    try:
        return EngineOption(key, json.loads(value))
    except ValueError:
        return EngineOption(key, {"True": True, "False": False, "None": None}.get(value, value))


def require_only(context: typer.Context, applicable: Collection[str], option: str) -> None:
    """Raise if the user passed a parameter that has no effect together with `option`.

    Args:
        context: Context of the command.
        applicable: Names of the parameters that have an effect.
        option: The option, for the error.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in applicable and source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(f"{parameter.opts[0]} does not apply to {option}")


def ignored_keys(context: typer.Context, keys: list[str] | None) -> list[str] | None:
    """Ignore these configuration keys until the command ends."""
    from nrl_models.common.config.ignored import ignoring

    context.with_resource(ignoring(keys or ()))
    return keys


CheckpointPath = Annotated[
    Path,
    typer.Argument(parser=checkpoint_path, metavar="PATH", help="Checkpoint directory, GGUF file or Hub repository."),
]
IgnoredConfigKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-config-key",
        metavar="KEY",
        help="Accept the checkpoint although this config.json key is not supported, and ignore the key. Repeatable.",
        callback=ignored_keys,
        rich_help_panel=INPUT,
    ),
]
"""An option of every command that builds a model. Its callback applies it."""
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        parser=any_path,
        metavar=FILE,
        help="Write the result as JSON to FILE, or to stdout if FILE is '-'.",
        callback=json_target,
        rich_help_panel=OUTPUT,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show all results, not only failures.", rich_help_panel=OUTPUT)
]
Device = Annotated[
    str, typer.Option(metavar=DEVICE, help="Device of the trainer's model, e.g. cuda:0.", rich_help_panel=TRAINER)
]
_ENGINE_NAME = engine_argument(
    "vllm, vllm-transformers (vLLM with transformers' classes), mlx, megatron, hf-generate (transformers' "
    "generate), or the URL of a server.",
    "--engine",
)
EngineName = Annotated[str, _ENGINE_NAME]
OptionalEngineName = Annotated[str | None, _ENGINE_NAME]
EngineOptions = Annotated[
    list[EngineOption] | None,
    typer.Option(
        "--engine-option",
        parser=engine_option,
        metavar="KEY=VALUE",
        help="Option passed to the engine, e.g. tensor_parallel_size=2. Repeatable. VALUE is JSON, "
        "or text if it is not valid JSON.",
        rich_help_panel=ENGINE,
    ),
]
Dtype = Annotated[
    str | None, dtype_argument("Compute dtype of the engine. \\[default: the checkpoint's]", panel=ENGINE)
]
TrainerDtype = Annotated[
    str | None, dtype_argument("Compute dtype of the trainer. \\[default: the engine's]", panel=TRAINER)
]
Threshold = Annotated[
    float,
    number(
        "A cell passes if its token_mult_prob_error is at most FLOAT. This metric is the mean over tokens of (larger "
        "probability / smaller probability); the two probabilities are the trainer's and the engine's. It is 1 if all "
        "probabilities are equal. See also --noise-factor.",
        panel=BOUNDS,
    ),
]


@overload
def torch_dtype(name: str) -> torch.dtype: ...
@overload
def torch_dtype(name: str | None) -> torch.dtype | None: ...
def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype that torch calls `name`; None for None."""
    import torch

    return None if name is None else getattr(torch, name)


def check_device(name: str) -> None:
    """Raise if torch has no such device.

    Raises:
        typer.BadParameter: It has none.
    """
    from nrl_models.loading.placement import present_device

    try:
        present_device(name, keyword="")  # typer names the option
    except (DeviceError, UnknownArgumentError) as error:
        raise typer.BadParameter(str(error), param_hint="'--device'") from error
