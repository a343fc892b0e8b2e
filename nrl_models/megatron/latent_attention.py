"""Latent attention (MLA) with Megatron-Core's own attention, which is written for heads of one size."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentDotProductAttention(DotProductAttention):
    """`DotProductAttention` of values that have another size than keys, as Transformer Engine's takes them.

    Args:
        k_channels: features of a key's head; the score's scale is given by the layer.
        v_channels: features of a value's head; None from the base class of MLA, which builds an attention that MLA
            replaces.
    """

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
