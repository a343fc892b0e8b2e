"""Arguments with a value for each token: their continuation, and missing types that mark the tokens of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from nrl_models.common.modules import subclass_of_same_name
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import MEDIA

PER_TOKEN: Mapping[str, int | None] = {
    **dict.fromkeys(("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask"), 0),
    **dict.fromkeys(("cross_attention_mask", "image_attention_mask")),
}
"""Arguments of shape `(batch, seq_len, ...)`, and the value of tokens of text that continue a sequence.

None repeats the last value, as transformers' `generate` does for masks of images.
"""


def continued(value: torch.Tensor, count: int, fill: int | None) -> torch.Tensor:
    """Append a value for `count` tokens to an argument of `PER_TOKEN`.

    Args:
        value: Values of the tokens so far, `(batch, seq_len, ...)`.
        count: Number of tokens to add.
        fill: Value of these tokens; None repeats the last one.
    """
    last = value[:, -1:] if fill is None else torch.full_like(value[:, -1:], fill)
    return torch.cat([value, last.expand(-1, count, *value.shape[2:])], 1)


def with_token_types(forward: Callable[..., Any], name: str, kinds: Mapping[str, int]) -> Callable[..., Any]:
    """Wrap a model's `forward` so that it computes the argument `name` from the tokens if there are images.

    transformers' processors create these types. Without them, transformers' models raise or, in later versions, attend
    to images causally, unlike the trained model. Trainers that create batches themselves have no types. Text-only
    inputs get none, because types would require a mask.

    Args:
        forward: Forward of a Hugging Face class.
        name: Name of the argument: `token_type_ids` or `mm_token_type_ids`.
        kinds: Token type by the configuration key of the placeholder token. Other tokens have type 0.

    Returns:
        A function with the same signature. With `inputs_embeds`, placeholder tokens are the positions that equal their
        embedding, as in transformers' `get_placeholder_mask`.
    """

    @wraps(forward)
    def filled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_untyped_images(kwargs, name) and not is_off("token-types"):
            input_ids = args[0] if args else kwargs.get("input_ids")
            if input_ids is not None:
                kwargs[name] = types_of_tokens(input_ids, self.config, kinds)
            elif (embeds := kwargs.get("inputs_embeds")) is not None:
                kwargs[name] = _types_of_embeddings(embeds, self, kinds)
        return forward(self, *args, **kwargs)

    filled.handles_quirks = ("token-types",)  # type: ignore[attr-defined]
    return filled


MULTIMODAL = {"image_token_id": 1, "video_token_id": 2, "audio_token_id": 3}
"""Types in `mm_token_type_ids` by configuration key of the placeholder token, as transformers' processors set them."""


def with_multimodal_types(upstream: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of the same name that fills in `mm_token_type_ids`."""
    forward = with_token_types(upstream.forward, "mm_token_type_ids", MULTIMODAL)
    return subclass_of_same_name(upstream, forward=forward)


def with_required_types(upstream: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of the same name that raises ValueError for images without `mm_token_type_ids`.

    For classes that attend causally within images without the types, and whose configuration does not name all tokens
    of images.
    """

    @wraps(upstream.forward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_untyped_images(kwargs, "mm_token_type_ids"):
            raise ValueError(
                "mm_token_type_ids is missing: without it, tokens of images attend causally. Pass it as the processor "
                "returns it"
            )
        return upstream.forward(self, *args, **kwargs)

    return subclass_of_same_name(upstream, forward=checked)


def _has_untyped_images(inputs: Mapping[str, Any], name: str) -> bool:
    """Return True if a forward gets images or audio, and no token types."""
    return inputs.get(name) is None and any(inputs.get(image) is not None for image in MEDIA)


def types_of_tokens(input_ids: torch.Tensor, config: Any, kinds: Mapping[str, int]) -> torch.Tensor:
    """Return the type of each token, in the shape of `input_ids`; see `with_token_types`."""
    types = torch.zeros_like(input_ids)
    for token, kind in _placeholders(config, kinds):
        types = types.masked_fill(input_ids == token, kind)
    return types


def _types_of_embeddings(embeds: torch.Tensor, model: Any, kinds: Mapping[str, int]) -> torch.Tensor:
    """Return the type of each position `(batch, seq_len)`: a placeholder's if it equals the placeholder's embedding."""
    types = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    embed = model.get_input_embeddings()
    with torch.no_grad():
        for token, kind in _placeholders(model.config, kinds):
            row = embed(torch.tensor([token], device=embeds.device)).to(embeds.device)
            types = types.masked_fill((embeds == row).all(-1), kind)
    return types


def _placeholders(config: Any, kinds: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield the ID and type of each placeholder token that the configuration has."""
    for key, kind in kinds.items():
        if (token := getattr(config, key, None)) is not None:
            yield token, kind
