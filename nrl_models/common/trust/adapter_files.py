"""Check the files of a PEFT adapter before another library reads them."""

from __future__ import annotations

from pathlib import Path

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.errors import CheckpointError, Problem, ProblemKind

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def require_adapter_files(folder: Path) -> None:
    """Check that an adapter's weights are in safetensors, and no file is a link to a file outside the directory.

    Without `adapter_model.safetensors`, transformers and vLLM read a pickle.

    Raises:
        CheckpointError: If either is not the case.
    """
    require_links_inside(folder)
    if (folder / ADAPTER_WEIGHTS).is_file():
        return
    others = sorted(path.name for path in folder.glob("adapter_model.*"))
    detail = f"is missing; only {', '.join(others)} found, and only safetensors are read" if others else "is missing"
    problem = Problem(ProblemKind.FORMAT if others else ProblemKind.FILE, ADAPTER_WEIGHTS, detail)
    raise CheckpointError(f"cannot load {folder}", [problem], ["save the adapter again with PEFT's save_pretrained"])
