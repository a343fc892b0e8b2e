"""Positions of packed documents in models that compute positions from images (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nrl_models.common.upstream import MEDIA, POSITIONS_FROM_MEDIA


def computes_media_positions(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return True if a model computes the positions of packed documents from the images of a forward.

    The class of one of its modules then has the attribute `computes_document_positions`.

    Raises:
        ValueError: If its positions come from images, but transformers' class computes them by row.
    """
    if inputs.get("input_ids") is None or all(inputs.get(name) is None for name in MEDIA):
        return False
    classes = {type(module) for module in model.modules()}
    if any(getattr(each, "computes_document_positions", False) for each in classes):
        return True
    if any(hasattr(each, name) for each in classes for name in POSITIONS_FROM_MEDIA):
        raise ValueError(
            f"{type(model).__name__} computes positions from images, for a row with one document: position_ids start "
            "again inside a row with images. Put each document in a separate row, and pad."
        )
    return False
