"""Compute a prompt once for all rollouts that begin with it.

Such rollouts share a row: the first one complete, and of the others only the tokens after the prompt. These attend to
the prompt and to their own tokens (`sharing_prompts` in `nrl_models.common.documents.boundaries`). Prompts are found
from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from nrl_models.common.documents import masks
from nrl_models.common.forward.routing import routing_is_observed
from nrl_models.common.switches import is_off
from nrl_models.common.upstream_torch import DropoutNd
from nrl_models.common.value_checks import is_number
from nrl_models.logprobs.microbatches import Microbatch, RowLayout, layout_of

LEAST = 8
"""Smallest number of tokens of a prompt worth sharing."""

_QUIRKS = ("packed-documents", "layers-across-documents", "masks-without-positions", "mrope-packed-documents")
"""Quirks whose handling keeps documents apart."""


def can_share_prompts(*models: nn.Module) -> bool:
    """Return True if sharing a prompt changes no result of these models.

    It would change results:

    - if the models cannot keep packed documents apart, or declare "shared prompts" in their `limits`
    - if their attention scores depend on the distance of columns in a row (ALiBi)
    - if their attention implementation is flex attention or not one of transformers
    - with dropout, which differs between rollouts
    - while choices of experts are recorded or replayed, because these belong to the tokens of each rollout
    """
    if layout_of(*models) is not RowLayout.PACKED or routing_is_observed() or any(map(is_off, _QUIRKS)):
        return False
    limits = {limit for model in models for limit in getattr(model, "limits", {})}
    modules = [module for model in models for module in model.modules()]
    return "shared prompts" not in limits and not any(_drops(module) or _has_other_masks(module) for module in modules)


def _drops(module: nn.Module) -> bool:
    """Return True if a module may apply dropout or noise: a value of it or of its configuration is not zero."""
    if not module.training:
        return False
    if isinstance(module, DropoutNd):
        return module.p > 0
    values = vars(module) | getattr(getattr(module, "config", None), "__dict__", {})
    return any(
        is_number(value, 0.0) and value > 0 for name, value in values.items() if "drop" in name or "jitter" in name
    )


def _has_other_masks(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    if getattr(config, "alibi", False) is True:
        return True
    name: Any = getattr(config, "_attn_implementation", None)
    return name is not None and not masks.can_share_prompts(name)


def units_with_shared_prompts(
    ids: Sequence[torch.Tensor], scores: Sequence[torch.Tensor], row_tokens: int
) -> list[Microbatch]:
    """Group sequences so that the fewest tokens are computed, in units of at most `row_tokens` tokens.

    Args:
        ids: Token ids of each sequence, `(length,)`, on the CPU.
        scores: Whether each token is scored, `(length,)` bool, on the CPU. Tokens are only shared if scored alike.
        row_tokens: Largest number of tokens of sequences that share a prompt. A single sequence may have more.
    """
    keys = [(2 * row + score.long()).numpy() for row, score in zip(ids, scores, strict=True)]
    order = sorted(range(len(keys)), key=lambda number: keys[number].astype(">i8").tobytes())
    common = [0, *(_common(keys[first], keys[second]) for first, second in pairwise(order))]
    saved, starts = [0], [0]
    for end in range(1, len(order) + 1):  # the best division of the first `end` sequences
        best = max((saved[start] + tokens, -start) for start, tokens in _savings(end, order, common, keys, row_tokens))
        saved.append(best[0])
        starts.append(-best[1])
    units, end = [], len(order)
    while end:
        start = starts[end]
        shared = min(common[start + 1 : end], default=0)
        units.append(Microbatch.sharing(order[start:end], [len(key) for key in keys], shared))
        end = start
    return units


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of tokens with which both sequences begin."""
    length = min(len(first), len(second))
    differ = (first[:length] != second[:length]).nonzero()[0]
    return int(differ[0]) if len(differ) else length


def _savings(
    end: int, order: Sequence[int], common: Sequence[int], keys: Sequence[np.ndarray], row_tokens: int
) -> Iterator[tuple[int, int]]:
    """Yield starts of a group that ends before `end`, and the number of tokens that it saves."""
    yield end - 1, 0
    shared, tokens = len(keys[order[end - 1]]), len(keys[order[end - 1]])
    for start in range(end - 2, -1, -1):
        shared, tokens = min(shared, common[start + 1]), tokens + len(keys[order[start]])
        saved = (end - 1 - start) * shared
        if shared < LEAST or tokens - saved > row_tokens:
            return
        yield start, saved
