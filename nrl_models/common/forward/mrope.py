"""Positions in three dimensions (M-RoPE): keep packed documents apart, and discard offsets of earlier sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from nrl_models.common.forward.token_types import MULTIMODAL, types_of_tokens
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import cache_in, named_arguments


class PackedTextPositions(nn.Module):
    """Mixin for a decoder with M-RoPE: plain positions keep packed documents apart, as in other decoders.

    The Hugging Face class only creates masks for positions with four planes, of which the first has text positions.
    With plain positions, packed documents would attend to each other. The mixin precedes the Hugging Face class.
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("mrope-packed-documents",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Hugging Face forward, with `position_ids` `(batch, seq_len)` expanded to `(4, batch, seq_len)`."""
        upstream: Any = super()
        inputs = named_arguments(upstream.forward, args, kwargs)
        position_ids = inputs.get("position_ids")
        if position_ids is not None and position_ids.ndim == 2 and not is_off("mrope-packed-documents"):
            inputs["position_ids"] = position_ids[None].expand(4, -1, -1)
        return upstream.forward(**inputs)


class FreshPositions(nn.Module):
    """Mixin for a multimodal model with M-RoPE: a new sequence discards the position offsets of the previous one.

    The Hugging Face class keeps the offset of positions after an image, and adds it when decoding from a cache, even if
    the sequence in the cache has no image. The mixin precedes the Hugging Face class.
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("mrope-stale-offsets",)

    def compute_3d_position_ids(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Compute positions as upstream does, after discarding the offsets of an earlier sequence."""
        upstream: Any = super()
        inputs = named_arguments(upstream.compute_3d_position_ids, args, kwargs)
        cache = cache_in(inputs)
        is_new = cache is None or cache.get_seq_length() == 0
        if is_new and inputs.get("input_ids") is not None and not is_off("mrope-stale-offsets"):
            self.rope_deltas = None
        if inputs.get("mm_token_type_ids", 0) is None and inputs.get("image_grid_thw") is not None:
            inputs |= _image_types(inputs, self.config)
        return upstream.compute_3d_position_ids(**inputs)


def _image_types(inputs: Mapping[str, Any], config: Any) -> dict[str, torch.Tensor]:
    """Return the token types of images, which transformers' processors add but batches of trainers lack.

    Empty if there are videos, whose tokens are marked in different ways, or if the ids of image tokens are unknown.
    """
    tokens = inputs.get("input_ids")
    if tokens is None or getattr(config, "image_token_id", None) is None:
        return {}
    if inputs.get("video_grid_thw") is not None or is_off("token-types"):
        return {}
    return {"mm_token_type_ids": types_of_tokens(tokens, config, {"image_token_id": MULTIMODAL["image_token_id"]})}
