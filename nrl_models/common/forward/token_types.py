"""Token types, which mark the tokens of images, filled in where they are not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from nrl_models.common.switches import is_off

IMAGES = ("pixel_values", "pixel_values_videos", "input_features")
"""Arguments that hold the media of placeholder tokens."""


def with_token_types(forward: Callable[..., Any], name: str, kinds: Mapping[str, int]) -> Callable[..., Any]:
    """A model's `forward` that fills in the argument `name` from the tokens, if there are images.

    Upstream's processors make these types. Without them upstream either raises or, in later versions, attends to images
    causally, which is not the model that was trained; and a trainer that makes its own batches has none. Text-only
    inputs need no types, and get none: they would cost a mask.

    Args:
        forward: of a Hugging Face class.
        name: of the argument: `token_type_ids`, `mm_token_type_ids`.
        kinds: for each key of the configuration that names a placeholder token its type; other tokens are 0.

    Returns:
        A function of the same signature. It raises ValueError for images with `inputs_embeds` alone, from which the
        tokens cannot be recovered.
    """

    @wraps(forward)
    def filled(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_missing = kwargs.get(name) is None and not is_off("token-types")
        if is_missing and any(kwargs.get(image) is not None for image in IMAGES):
            input_ids = args[0] if args else kwargs.get("input_ids")
            if input_ids is None:
                raise ValueError(f"{name} is missing: it says which of inputs_embeds are an image's. Pass it.")
            kwargs[name] = _types(input_ids, self.config, kinds)
        return forward(self, *args, **kwargs)

    filled.handles_quirks = ("token-types",)  # type: ignore[attr-defined]
    return filled


def _types(input_ids: torch.Tensor, config: Any, kinds: Mapping[str, int]) -> torch.Tensor:
    types = torch.zeros_like(input_ids)
    for key, kind in kinds.items():
        if (token := getattr(config, key, None)) is not None:
            types = types.masked_fill(input_ids == token, kind)
    return types
