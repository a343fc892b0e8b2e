"""Positions in three dimensions (M-RoPE): keep packed documents apart, and discard offsets of earlier sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.documents.current_documents import documents_running
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
    the sequence in the cache has no image. The mixin precedes the Hugging Face class. It also computes the positions of
    packed documents with images, which `keep_documents_apart` leaves to it.
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("mrope-stale-offsets",)
    computes_document_positions: ClassVar[bool] = True

    def compute_3d_position_ids(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Compute positions as upstream does, after discarding the offsets of an earlier sequence."""
        upstream: Any = super()
        inputs = named_arguments(upstream.compute_3d_position_ids, args, kwargs)
        cache = cache_in(inputs)
        is_new = cache is None or cache.get_seq_length() == 0
        if is_new and inputs.get("input_ids") is not None and not is_off("mrope-stale-offsets"):
            self.rope_deltas = None
        is_decoding_video = not is_new and inputs.get("video_grid_thw") is not None
        if inputs.get("mm_token_type_ids", 0) is None and not is_decoding_video:
            inputs |= _image_types(inputs, self.config)
        documents = documents_running()
        if documents is None or inputs.get("input_ids") is None:
            return upstream.compute_3d_position_ids(**inputs)
        positions = upstream.compute_3d_position_ids(**inputs | _one_document_per_row(documents, inputs))
        self.rope_deltas = None  # those of documents, and not of rows
        return documents.positions if positions is None else _packed_again(documents, positions)


def _one_document_per_row(documents: Documents, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments `(batch, seq_len)` with a row for each document, padded on the right, and their mask."""
    per_token = {
        name: value
        for name, value in inputs.items()
        if name in ("input_ids", "mm_token_type_ids") and isinstance(value, torch.Tensor)
    }
    per_token["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return {
        name: pad_sequence([part[0] for part in documents.split(value)], batch_first=True)
        for name, value in per_token.items()
    }


def _packed_again(documents: Documents, positions: torch.Tensor) -> torch.Tensor:
    """Return positions `(planes, batch, seq_len)` for those of documents, `(planes, documents, longest)`."""
    rows = positions.movedim(0, -1).split(1)
    parts = [row[:, :size] for row, size in zip(rows, documents.lengths_with_prompts, strict=True)]
    return documents.join(parts).movedim(-1, 0)


def _image_types(inputs: Mapping[str, Any], config: Any) -> dict[str, torch.Tensor]:
    """Return the token types of images, which transformers' processors add but batches of trainers lack.

    Empty if the ids of image tokens are unknown, or there are no images.

    Raises:
        ValueError: If there are videos, whose tokens each processor marks in its own way.
    """
    tokens = inputs.get("input_ids")
    if tokens is None or is_off("token-types"):
        return {}
    if inputs.get("video_grid_thw") is not None:
        raise ValueError(
            "mm_token_type_ids is missing: without it, tokens of videos get positions of text. Pass it as the "
            "processor returns it"
        )
    if inputs.get("image_grid_thw") is None or getattr(config, "image_token_id", None) is None:
        return {}
    return {"mm_token_type_ids": types_of_tokens(tokens, config, {"image_token_id": MULTIMODAL["image_token_id"]})}
