"""Load a checkpoint's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.checkpoint.json_reading import POINTER, POINTER_ADVICE, pointers_in
from nrl_models.common.trust.other_models import refuse_audio_tokenizer
from nrl_models.errors import CheckpointError, ConsistencyError, Problem, ProblemKind, one_line


def load_processor(folder: Path) -> Any:
    """Load the processor of a checkpoint directory with transformers.

    Raises:
        CheckpointError: If a file is a link to a file outside of the directory or a Git LFS pointer, or the processor
            would load another model.
        ConsistencyError: If the processor does not load.
    """
    from transformers import AutoProcessor

    require_links_inside(folder)
    refuse_audio_tokenizer(folder)
    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # any error of the processor's code
        if pointers := pointers_in(folder):
            problems = [Problem(ProblemKind.FILE, name, POINTER, advice=POINTER_ADVICE) for name in pointers]
            raise CheckpointError(f"cannot load the processor in {folder}", problems) from error
        raise ConsistencyError(f"the processor in {folder} does not load: {one_line(error)}") from error
