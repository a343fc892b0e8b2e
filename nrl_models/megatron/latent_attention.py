"""Latent attention (MLA) with Megatron-Core's own attention, which is written for heads of one size."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentDotProductAttention(DotProductAttention):
    """`DotProductAttention` for values with another head size than keys, as in Transformer Engine's.

    Args:
        k_channels: Head size of keys. The layer sets the scale of the scores.
        v_channels: Head size of values. None from MLA's base class, whose attention MLA replaces.
    """

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
