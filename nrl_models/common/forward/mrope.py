"""Positions in three dimensions (M-RoPE): packed documents, and offsets that outlive their sequence."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from nrl_models.common.switches import is_off
from nrl_models.common.upstream import cache_in, named_arguments


class PackedTextPositions(nn.Module):
    """Mixin for a decoder with M-RoPE: plain positions keep packed documents apart, as in every other decoder.

    Upstream makes masks only from positions of four planes, of which the first is the text's. With plain positions,
    documents packed into one row attend to each other. It goes before the Hugging Face class.
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("mrope-packed-documents",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and results are upstream's; `position_ids` `(batch, tokens)`, `(3, batch, ...)` or `(4, ...)`."""
        upstream: Any = super()
        inputs = named_arguments(upstream.forward, args, kwargs)
        position_ids = inputs.get("position_ids")
        if position_ids is not None and position_ids.ndim == 2 and not is_off("mrope-packed-documents"):
            inputs["position_ids"] = position_ids[None].expand(4, -1, -1)
        return upstream.forward(**inputs)


class FreshPositions(nn.Module):
    """Mixin for a multimodal model with M-RoPE: a new sequence forgets the offsets of the one before.

    Upstream keeps the offset that an image gives to the positions after it, and adds it when decoding from a cache,
    even if the sequence in the cache has no image. It goes before the Hugging Face class.
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("mrope-stale-offsets",)

    def compute_3d_position_ids(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Arguments and results are upstream's."""
        upstream: Any = super()
        inputs = named_arguments(upstream.compute_3d_position_ids, args, kwargs)
        cache = cache_in(inputs)
        is_new = cache is None or cache.get_seq_length() == 0
        if is_new and inputs.get("input_ids") is not None and not is_off("mrope-stale-offsets"):
            self.rope_deltas = None
        return upstream.compute_3d_position_ids(**inputs)
