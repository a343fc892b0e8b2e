"""Independent implementations of families that transformers lacks, made of torch and of transformers' other classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

IMPLEMENTATIONS: dict[str, Callable[[PreTrainedModel, Mapping[str, Any]], torch.Tensor]] = {}


def independent_logits(reference: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Logits of another implementation with the reference's weights; None if there is none for its configuration.

    Args:
        reference: the plain implementation, for its weights and configuration.
        inputs: what it takes.
    """
    implementation = IMPLEMENTATIONS.get(reference.config.model_type)
    return None if implementation is None else implementation(reference, inputs)
