"""Is a quirk there? Probes that run any model, upstream's or ours: it is tiny, in evaluation mode, and not changed.

Those that only this library's tests ask are in `tests/quirk_probes.py`.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from nrl_models.parity.inputs import Inputs

APART = 1e-3
"""Logits of tiny models with random weights differ by more than this, if they differ in more than rounding."""


@torch.no_grad()
def offsets_stay(model: PreTrainedModel, with_images: Inputs, text: torch.Tensor) -> bool:
    """Whether decoding `text` `(batch, length)` from a cache depends on a sequence with images seen before."""
    model = copy.deepcopy(model)
    expected = _decoded(model, text)
    model(**with_images, use_cache=True)
    return differ(_decoded(model, text), expected)


def _decoded(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    """The logits of the last token, by way of a cache."""
    cache = model(input_ids=text[:, :-1], use_cache=True).past_key_values
    return model(input_ids=text[:, -1:], past_key_values=cache, use_cache=True).logits


def differ(one: torch.Tensor, other: torch.Tensor, by: float = APART) -> bool:
    """Whether two tensors differ by more than rounding."""
    return bool((one - other).abs().max() > by)
