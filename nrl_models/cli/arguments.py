"""Arguments that several commands take. They are checked before torch is imported, so that a mistake shows at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, overload

import typer

from nrl_models.cli.console import STANDARD_OUTPUT, output
from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import ADAPTER_CONFIG_NAME, CONFIG_NAME, is_gguf, is_local
from nrl_models.common.mesh_sizes import parse_mesh
from nrl_models.common.trust.servers import is_secret, require_engine
from nrl_models.errors import CheckpointError, EngineError, ShardingError, visible

if TYPE_CHECKING:
    import torch

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]


class EngineOption(NamedTuple):
    """A `KEY=VALUE` that an engine takes."""

    key: str
    value: Any


def checkpoint_path(text: str) -> Path:
    """A checkpoint's directory, a GGUF file, or the name of a hub repository.

    Raises:
        typer.BadParameter: there is no such directory, or its `config.json` is missing or damaged.
    """
    path = Path(text).expanduser()
    if path.is_file():
        if is_gguf(path):
            return path
        raise typer.BadParameter(f"{text} is a file, expected a checkpoint's directory or a GGUF file")
    if not is_local(text):
        return path
    if not path.is_dir():
        raise typer.BadParameter(f"no such directory: {text}")
    if (path / CONFIG_NAME).exists():
        _check_config(path / CONFIG_NAME)
    elif not (path / ADAPTER_CONFIG_NAME).exists() and not any(map(is_gguf, path.iterdir())):
        # of which loading has more to say
        raise typer.BadParameter(f"{text}: config.json is missing; expected a checkpoint's directory")
    return path


def config_path(text: str) -> Path:
    """As `checkpoint_path`, or a configuration's file."""
    path = Path(text).expanduser()
    if path.is_file() and not is_gguf(path):
        _check_config(path)
        return path
    return checkpoint_path(text)


def local_config_path(text: str) -> Path:
    """As `config_path`, but no hub repository."""
    if not Path(text).expanduser().exists():
        raise typer.BadParameter(f"no such file or directory: {text}")
    return config_path(text)


def _check_config(file: Path) -> None:
    try:
        read_object(file)
    except CheckpointError as error:
        detail = "; ".join(problem.detail for problem in error.problems)
        raise typer.BadParameter(visible(f"{file} {detail}: expected a model's configuration")) from error


def writable(file: Path | None) -> Path | None:
    """Make sure that a result can be written, before time is spent on it."""
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
    """Make sure that a model can be saved, before time is spent on it."""
    if folder is not None:
        writable(folder / "config.json")
    return folder


def json_target(file: Path | None) -> Path | None:
    """As `writable`, or standard output, on which nothing else is printed then."""
    if file == STANDARD_OUTPUT:
        output.json_only = True
        return file
    return writable(file)


def mesh_sizes(text: str) -> str:
    """A mesh such as `fsdp=16,tp=8`, as it is."""
    try:
        parse_mesh(text)
    except ShardingError as error:
        found = (f"{problem.subject}: {problem.detail}; {problem.advice}" for problem in error.problems)
        raise typer.BadParameter("\n".join(found)) from error
    return text


def engine_name(name: str) -> str:
    """The name of an engine, or the address of a server."""
    try:
        require_engine(name)
    except EngineError as error:
        raise typer.BadParameter(str(error)) from error
    return name


def engine_option(text: str) -> EngineOption:
    """`KEY=VALUE`, the value read as JSON where it is JSON."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r}: expected KEY=VALUE")
    if is_secret(key):
        return EngineOption(key, value)  # as it is, though it may look like a number
    try:
        return EngineOption(key, json.loads(value))
    except ValueError:
        return EngineOption(key, {"True": True, "False": False, "None": None}.get(value, value))


def ignored_keys(context: typer.Context, keys: list[str] | None) -> list[str] | None:
    """Ignore these configuration keys until the command ends."""
    from nrl_models.common.config.ignored import ignoring

    context.with_resource(ignoring(keys or ()))
    return keys


CheckpointPath = Annotated[
    Path, typer.Argument(parser=checkpoint_path, metavar="PATH", help="A checkpoint's directory, or a hub repository.")
]
IgnoredConfigKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-config-key",
        metavar="KEY",
        help="A key of config.json, by name or path, that may ask for what the model does not do; repeatable.",
        callback=ignored_keys,
    ),
]
"""For every command that builds a model; the callback does it all."""
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON, too; - is stdout.", callback=json_target),
]
Device = Annotated[str, typer.Option(help="Where the trainer runs, e.g. cuda:0.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        parser=engine_name,
        metavar="NAME",
        help="vllm, vllm-transformers, mlx, megatron, hf-generate, or a server's address.",
    ),
]
EngineOptions = Annotated[
    list[EngineOption] | None,
    typer.Option(
        "--engine-option",
        parser=engine_option,
        metavar="KEY=VALUE",
        help="What the engine itself takes, such as tensor_parallel_size=2; repeatable. Values are JSON, or text.",
    ),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(help="What the engine computes in, or a server was started with; the checkpoint's by default."),
]
TrainerDtype = Annotated[DtypeName | None, typer.Option(help="What the trainer computes in; the engine's by default.")]
Threshold = Annotated[float, typer.Option(help="Bound on token_mult_prob_error.")]


@overload
def torch_dtype(name: DtypeName) -> torch.dtype: ...
@overload
def torch_dtype(name: DtypeName | None) -> torch.dtype | None: ...
def torch_dtype(name: DtypeName | None) -> torch.dtype | None:
    """The dtype of that name."""
    import torch

    return None if name is None else getattr(torch, name)


def check_device(name: str) -> None:
    """Make sure that torch can put a tensor on a device.

    Raises:
        typer.BadParameter: it cannot.
    """
    import torch

    try:
        torch.empty(1, device=name)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise typer.BadParameter(f"{name}: {str(error).splitlines()[0]}", param_hint="'--device'") from error
