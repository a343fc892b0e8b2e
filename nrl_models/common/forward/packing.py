"""Keeping documents apart that are packed into one row, also with an attention mask or a cache.

Documents are separated by `position_ids` that start again. transformers checks for that only if there is neither an
attention mask nor a cache; with a mask of ones, or with `use_cache` left at its default, documents silently attend to
each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nrl_models.common.forward.document_masks import attend_by_document
from nrl_models.common.forward.documents import Documents, carry_documents, running, starts_of
from nrl_models.common.switches import is_off

Forward = Callable[..., Any]


def keep_documents_apart(forward: Forward) -> Forward:
    """A model's `forward` that uses no cache, and drops a 2-D mask, where positions start again.

    The positions then say all that the mask said, because padding is never in one document with a later token; where it
    is, the call is refused, and so is packing where the family cannot keep documents apart (`limits`). Not under
    `torch.compile`, where values cannot be read: give `use_cache=False` and no mask there.

    Args:
        forward: unbound, taking `attention_mask`, `position_ids` `(batch, length)` and `past_key_values` by name.
    """
    signature = inspect.signature(forward).parameters
    parameters = [name for name, parameter in signature.items() if parameter.kind != parameter.VAR_KEYWORD]
    # Upstream's heads of models with images pass `use_cache` on among other keywords.
    takes_more = len(parameters) < len(signature)
    without_cache = {"use_cache": False} if "use_cache" in parameters or takes_more else {}

    @functools.wraps(forward)
    def with_documents_apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_off("packed-documents"):
            return forward(self, *args, **kwargs)
        given = dict(zip(parameters[1:], args, strict=False)) | kwargs
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if (
            positions is None
            or not _is_2d(positions)
            or given.get("past_key_values") is not None
            or torch.compiler.is_compiling()
        ):
            return forward(self, *args, **kwargs)
        if mask is None:
            mask = torch.ones_like(positions)
        if not _is_2d(mask) or mask.shape != positions.shape or not _start_again(mask, positions):
            return forward(self, *args, **kwargs)
        if reason := getattr(self, "limits", {}).get("packed sequences"):
            raise ValueError(
                f"{type(self).__name__} cannot keep documents apart that are packed into one row: {reason}. "
                "position_ids start again inside a row: give each document a row of its own, and pad."
            )
        _check_padding(mask, positions)
        attend_by_document()
        if torch.is_grad_enabled():
            carry_documents(self)
        with running(Documents.from_positions(positions, mask)):
            return forward(self, **(given | {"attention_mask": None} | without_cache))

    with_documents_apart.keeps_documents_apart = True  # type: ignore[attr-defined]
    return with_documents_apart


def token_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count tokens without padding: `(batch, length)`, zero before a row's first token."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _is_2d(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def _start_again(mask: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether some row has tokens of two documents: a start between its first token and its last."""
    token = mask.bool()
    inside = token & (token.cumsum(-1) > 1)
    return bool((starts_of(positions) & inside).any())


def _check_padding(mask: torch.Tensor, positions: torch.Tensor) -> None:
    document = starts_of(positions).cumsum(-1)
    token = mask.bool()
    place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last_token = torch.zeros_like(document).scatter_reduce(1, document - 1, place * token, "amax")
    wrong = ~token & (place < last_token.gather(1, document - 1))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask and position_ids disagree: token {column} of row {row} is padding, but its position is in "
            "one document with a later token. Give padding positions that start again, or give no attention_mask."
        )
