"""Positions in models that compute them from images (M-RoPE): packed documents, and positions with planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

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


_planes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Results of `rotary_planes`, which each forward needs."""


def rotary_planes(model: nn.Module) -> int:
    """Return the number of planes of a model's rotary positions (M-RoPE). 0 if it has plain positions."""
    if model not in _planes:
        sections = [getattr(module, "mrope_section", None) for module in model.modules()]
        sections.append(_configured_sections(model))  # attention of transformers 5.5 reads the configuration
        _planes[model] = next((len(section) for section in sections if section is not None), 0)
    return _planes[model]


def _configured_sections(model: nn.Module) -> Sequence[int] | None:
    config = getattr(model, "config", None)
    rope = getattr(config.get_text_config(), "rope_parameters", None) if isinstance(config, PreTrainedConfig) else None
    return rope.get("mrope_section") if isinstance(rope, Mapping) else None


def text_positions(model: nn.Module, position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Return the positions `(batch, seq_len)` that separate packed documents; None if there are none.

    With M-RoPE, `position_ids` may be `(planes, batch, seq_len)`, and then rows have one document each; or `(1 +
    planes, batch, seq_len)`, whose first plane separates documents.
    """
    if position_ids is None or position_ids.ndim != 3:
        return position_ids
    return position_ids[0] if len(position_ids) == 1 + rotary_planes(model) else None
