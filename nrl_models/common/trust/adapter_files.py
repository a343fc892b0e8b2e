"""Check the files of a PEFT adapter before another library reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.checkpoint.publication.publishing import ADAPTER_WEIGHTS_NAME
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArgumentError


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


def require_safe_adapter(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of transformers' `load_adapter`: a local adapter has to pass `require_adapter_files`.

    Args:
        arguments: The arguments by name; further keywords in `kwargs`.

    Raises:
        CheckpointError: If the files do not pass. They are not read if `adapter_state_dict` is passed.
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
