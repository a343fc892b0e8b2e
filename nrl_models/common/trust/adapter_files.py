"""Check the files of a PEFT adapter before another library reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.checkpoint.local_path import (
    ADAPTER_CONFIG_NAME,
    as_path,
    may_be_repository,
    similar_checkpoint,
    similar_in_current_directory,
)
from nrl_models.common.checkpoint.publication.publishing import ADAPTER_WEIGHTS_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArgumentError, one_line


def require_adapter_files(folder: Path) -> None:
    """Check that an adapter's weights are in safetensors, and no file is a link to a file outside the directory.

    Without `adapter_model.safetensors`, transformers and vLLM read a pickle.

    Raises:
        CheckpointError: If either is not the case.
    """
    require_links_inside(folder)
    if (folder / ADAPTER_WEIGHTS_NAME).is_file():
        return
    others = sorted(path.name for path in folder.glob("adapter_model.*"))
    detail = f"is missing; only {', '.join(others)} found, and only safetensors are read" if others else "is missing"
    problem = Problem(ProblemKind.FORMAT if others else ProblemKind.FILE, ADAPTER_WEIGHTS_NAME, detail)
    raise CheckpointError(f"cannot load {folder}", [problem], ["save the adapter again with PEFT's save_pretrained"])


def _missing(source: str | Path, error: Exception | None = None) -> CheckpointError:
    """Return the error for an adapter that is not a directory. `error` is that of the hub, for a repository's name."""
    detail = f"no such directory{similar_checkpoint(as_path(source))}"
    if error is not None:
        similar = similar_in_current_directory(str(source)) or similar_checkpoint(as_path(source))
        detail = f"is not a directory{similar}, and no adapter can be fetched from the hub: {one_line(error)}"
    advice = "pass a directory with adapter_config.json, or check the repository's name, your token and the network"
    return CheckpointError(f"cannot load {source}", [Problem(ProblemKind.FILE, str(source), detail)], [advice])


def _require_on_hub(source: str, options: Mapping[str, Any]) -> None:
    """Check that a name is a hub repository with an adapter. It may be a misspelled path.

    transformers would send several requests, each with retries, before it raises.

    Raises:
        CheckpointError: If the first request fails.
    """
    names = ("subfolder", "revision", "token", "cache_dir", "local_files_only")
    keywords = {name: options[name] for name in names if options.get(name) is not None}
    try:
        hf_hub_download(source, ADAPTER_CONFIG_NAME, **keywords)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _missing(source, error) from error


def require_safe_adapter(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of transformers' `load_adapter`: a local adapter has to pass `require_adapter_files`.

    Args:
        arguments: The arguments by name; further keywords in `kwargs`.

    Raises:
        CheckpointError: If the files do not pass, or do not exist. With `adapter_state_dict` they are not read.
        UnknownArgumentError: If `use_safetensors=False` requests a pickle.
    """
    more = arguments.get("kwargs", {})
    if more.get("use_safetensors") is False:
        raise UnknownArgumentError("use_safetensors=False: requests pickled weights, which can run code. Leave it out")
    source = arguments.get("peft_model_id") or more.get("pretrained_model_name_or_path")
    if arguments.get("adapter_state_dict") is not None or not isinstance(source, (str, Path)):
        return
    folder = Path(source, (arguments.get("adapter_kwargs") or {}).get("subfolder") or "")
    if folder.is_dir():
        require_adapter_files(folder)
    elif as_path(source).is_dir() or not may_be_repository(str(source)):
        raise _missing(folder)
    elif arguments.get("peft_config") is None:
        more_options = {"local_files_only": arguments.get("local_files_only") or None}
        _require_on_hub(str(source), {**more, **(arguments.get("adapter_kwargs") or {}), **more_options})
