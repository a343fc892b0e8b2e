"""Open a checkpoint: find its directory, read its configuration, and notice when another process replaces it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from nrl_models.common.checkpoint import given_tensors
from nrl_models.common.checkpoint.generations import FileWatch, current, require_links_inside, was_replaced
from nrl_models.common.checkpoint.local_path import GENERATION_NAME, as_path, is_gguf
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.rope_keys import KEYS
from nrl_models.common.logs import get_logger
from nrl_models.distributed.mesh import agreed
from nrl_models.errors import (
    CheckpointError,
    ConfigurationError,
    NRLModelsError,
    ProblemKind,
    UnknownArgumentError,
)
from nrl_models.loading.options import LoadOptions
from nrl_models.loading.placement import on_cpu
from nrl_models.loading.read_config import override, read_config

logger = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to load, of which only the configuration has been read.

    Attributes:
        name: Directory or hub repository passed by the caller; `state_dict` if the call has no path.
        folder: Local directory; None if the call has no path.
        config: Configuration, with the values that were passed as keywords.
        options: Options of the load.
        overrides: Values of the configuration that were passed as keywords.
        watch: Detects that another process replaces the directory during the load; None if `folder` is None.
    """

    name: str
    folder: Path | None
    config: PreTrainedConfig
    options: LoadOptions
    overrides: Mapping[str, Any]
    watch: FileWatch | None


def with_source(
    path_or_id: str | Path | None,
    keywords: Mapping[str, Any],
    use: Callable[[Source], T],
    config_class: type[PreTrainedConfig] | None = None,
) -> T:
    """Open a checkpoint, and call `use` with it. Repeat once if another process replaced its files in the meantime.

    Args:
        path_or_id, keywords, config_class: See `open_source`.
        use: Loads from the source. Called a second time after the files were replaced, but never with a mesh, because
            one rank cannot start again alone.

    Raises:
        CheckpointError: If the checkpoint was replaced again.
        UnknownArgumentError: If no path was passed, or two.
    """
    path_or_id, keywords = _named_path(path_or_id, keywords)

    def attempt() -> T:
        with outside_inference_mode(), open_source(path_or_id, keywords, config_class) as source:
            return use(source)

    if path_or_id is None:
        return attempt()  # no files that another process could replace
    folder = as_path(path_or_id) / str(keywords.get("subfolder") or "")
    return again_if_replaced(folder, attempt, attempts=1 if keywords.get("mesh") is not None else 2)


def again_if_replaced(folder: str | Path, attempt: Callable[[], T], attempts: int = 2) -> T:
    """Call `attempt`, which reads a checkpoint. Repeat if it fails and another process replaced the files.

    Args:
        folder: The checkpoint.
        attempt: Reads the files, and raises if they change in the meantime (`FileWatch.check`).
        attempts: Maximum number of calls.

    Raises:
        CheckpointError: If the checkpoint was replaced during the last call.
    """
    folder = as_path(folder)
    for number in range(1, attempts + 1):
        is_last = number == attempts
        with FileWatch(folder) as watch:
            try:
                return attempt()
            except Exception as error:
                if not watch.changed() or (is_last and _stays(error)):
                    raise
                if is_last:
                    raise was_replaced(folder, watch.replaced() or [str(folder)]) from error  # or only moved
        logger.info(f"{folder} was replaced while it was read; it is read again")
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def one_generation(path: str | Path) -> Iterator[tuple[Path, FileWatch]]:
    """Watch a local checkpoint while another library reads it. Use within `again_if_replaced`.

    Yields the directory to read (or the GGUF file), and the watch. At the end of the context, the watch must find the
    files unchanged, so all of them were read from one generation.

    Raises:
        CheckpointError: If there is no checkpoint, or its files were replaced.
    """
    folder = resolve_folder(path)
    with FileWatch(folder.parent if is_gguf(folder) else folder) as watch:
        yield folder if is_gguf(folder) else watch.location, watch
        watch.require(GENERATION_NAME)
        watch.check()


def outside_inference_mode() -> AbstractContextManager[None]:
    """Leave `torch.inference_mode`, in which parameters would be created that can never be trained."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _stays(error: Exception) -> bool:
    """Return True if an error is raised unchanged although the checkpoint was replaced.

    Errors about the contents are not: files of two checkpoints were read, and neither has a problem.
    """
    if isinstance(error, (CheckpointError, ConfigurationError)):
        return any(problem.kind is ProblemKind.REPLACED for problem in error.problems)
    return isinstance(error, NRLModelsError)


@contextmanager
def open_source(
    path_or_id: str | Path | None, keywords: Mapping[str, Any], config_class: type[PreTrainedConfig] | None = None
) -> Iterator[Source]:
    """Locate a checkpoint and read its configuration, to select a class. Watch the files until the context ends.

    Args:
        path_or_id: A directory, a GGUF file, or a hub repository. None if `keywords` have it under transformers' name,
            or have `config` and `state_dict`.
        keywords: Options, see `LoadOptions`, and values of the configuration.
        config_class: Class of a configuration without `model_type`.

    Raises:
        CheckpointError, UnknownArchitectureError, RemoteCodeError, UnknownArgumentError, DeviceError, ShardingError:
            See `nrl_models.AutoModelForCausalLM.from_pretrained`.
    """
    path_or_id, keywords = _named_path(path_or_id, keywords)
    options, overrides = LoadOptions.split(keywords)
    with ExitStack() as opened:
        with on_cpu(), agreed(options.mesh, "read the checkpoint's configuration"):
            asked = ("subfolder", "revision", "token", "cache_dir", "gguf_file", "local_files_only")
            folder: Path | None = None
            watch: FileWatch | None = None
            if path_or_id is not None:
                values = {name: getattr(options, name) for name in asked}
                folder = resolve_folder(path_or_id, needs_config=options.config is None, **values)
                watch = opened.enter_context(FileWatch(folder.parent if is_gguf(folder) else folder))
                if not is_gguf(folder):  # a publish may replace the directory; read the one that `watch` observes
                    folder = watch.location
                if not is_gguf(path_or_id):  # the path of a file is used unchanged
                    require_links_inside(folder.parent if is_gguf(folder) else folder)
            if isinstance(options.config, PreTrainedConfig):
                config = copy.deepcopy(options.config)
            else:
                config_path = as_path(options.config or folder or Path())
                config_path = current(config_path) if config_path.exists() else resolve_folder(config_path)
                ignored = (*KEYS, "rope_parameters") if "rope_parameters" in overrides else options.ignore_config_keys
                config = read_config(
                    config_path,
                    trust_remote_code=options.trust_remote_code,
                    ignored=ignored,
                    default_class=config_class,
                )
            override(config, overrides)
            if path_or_id is not None:
                config.name_or_path = str(path_or_id)
        yield Source(str(path_or_id or given_tensors.NAME), folder, config, options, overrides, watch)


PATH_NAME = "pretrained_model_name_or_path"
"""transformers' name of the first argument."""


def _named_path(path_or_id: str | Path | None, keywords: Mapping[str, Any]) -> tuple[str | Path | None, dict[str, Any]]:
    """Return the path from the first argument or from transformers' keyword, and the other keywords.

    The path is None if `config` and `state_dict` replace it.
    """
    paths = [path for path in (path_or_id, keywords.get(PATH_NAME)) if path is not None]
    complete = all(keywords.get(name) is not None for name in ("config", "state_dict"))
    if len(paths) > 1 or (not paths and not complete):
        raise UnknownArgumentError(
            f"expected a directory or the name of a hub repository, once: as the first argument, or as {PATH_NAME}. "
            "Without one, pass both config= and state_dict=, or call from_config(config) for a model with new weights"
        )
    rest = {name: value for name, value in keywords.items() if name != PATH_NAME}
    return (paths[0] if paths else None), rest
