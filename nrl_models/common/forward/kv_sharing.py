"""Checkpoints with weights for layers that attend to keys and values of earlier layers (Gemma 3n, Gemma 4)."""

from typing import ClassVar


class SharedKeyValues:
    """Mixin for a family, before `FamilyModel`: keeps the weights of published checkpoints that no layer uses.

    Layers that share keys and values have no projections for them. Checkpoints still have some for these layers, which
    were never trained, and engines may read them. The model keeps them unchanged and saves them again (transformers
    drops them).

    Attributes:
        keeps_unused: See `FamilyModel`.
    """

    keeps_unused: ClassVar[tuple[str, ...]] = (r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",)
