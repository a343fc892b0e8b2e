"""Load a checkpoint's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.generations import require_links_inside
from nrl_models.common.trust.other_models import refuse_audio_tokenizer


def load_processor(folder: Path) -> Any:
    """Load the processor of a checkpoint directory with transformers.

    Raises:
        CheckpointError: If a file is a link to a file outside of the directory, or the processor would load another
            model.
        OSError, ValueError, ...: See `transformers.AutoProcessor`.
    """
    from transformers import AutoProcessor

    require_links_inside(folder)
    refuse_audio_tokenizer(folder)
    return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
