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
from torch import nn

from nrl_models.common.forward.document_masks import attend_by_document
from nrl_models.common.forward.documents import Documents, carry_documents, running, starts_of
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import cache_in

Forward = Callable[..., Any]


def keep_documents_apart(forward: Forward) -> Forward:
    """A model's `forward` that uses no cache, and drops a 2-D mask, where positions start again.

    The positions then say all that the mask said, because padding is never in one document with a later token; where it
    is, the call is refused, and so is packing where the family cannot keep documents apart (`limits`). Not under
    `torch.compile`, where values cannot be read: give `use_cache=False` and no mask there.

    Where a caller gives the boundaries `cu_seq_lens_q`, as transformers' collators do, they have to agree with the
    positions, or say what these are.

    Args:
        forward: unbound, taking `attention_mask`, `position_ids` `(batch, length)` and a cache by name.
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
        if given.get("cu_seq_lens_q") is not None and not torch.compiler.is_compiling():
            positions = given["position_ids"] = _checked_positions(given, mask)
        if positions is None or not _is_2d(positions) or cache_in(given) is not None or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        if mask is None:
            mask = torch.ones_like(positions)
        if not _is_2d(mask) or mask.shape != positions.shape or not start_again(mask, positions):
            return forward(self, *args, **kwargs)
        if reason := getattr(self, "limits", {}).get("packed sequences"):
            raise ValueError(
                f"{type(self).__name__} cannot keep documents apart that are packed into one row: {reason}. "
                "position_ids start again inside a row: give each document a row of its own, and pad."
            )
        _check_padding(mask, positions)
        _check_starts(mask, positions)
        attend_by_document()
        if torch.is_grad_enabled():
            carry_documents(self)
        given |= {"attention_mask": None} | without_cache
        if not takes_more and "position_ids" not in parameters:
            del given["position_ids"]  # they said where documents start
        with running(Documents.from_positions(positions, mask)):
            output = forward(self, **given)
        _check_scores(self, output, len(positions))
        return output

    with_documents_apart.keeps_documents_apart = True  # type: ignore[attr-defined]
    return with_documents_apart


def token_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions that count tokens without padding: `(batch, length)`, zero for padding, as `generate` makes them."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(~attention_mask.bool(), 0)


def start_again(mask: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether some row has tokens of two documents: a start between its first token and its last.

    Args:
        mask: `(batch, length)`, False or 0 for padding.
        positions: `(batch, length)`.
    """
    token = mask.bool()
    inside = token & (token.cumsum(-1) > 1)
    return bool((starts_of(positions, mask) & inside).any())


def _is_2d(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def _check_padding(mask: torch.Tensor, positions: torch.Tensor) -> None:
    """Refuse holes inside documents of a packed batch: positions alone cannot express them."""
    token = mask.bool()
    after_padding = nn.functional.pad(token[:, 1:] & ~token[:, :-1], (1, 0), value=False)
    wrong = after_padding & ~starts_of(positions, mask)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask and position_ids disagree: token {column - 1} of row {row} is padding, but the tokens "
            "before and after it are in one document, and the batch is packed. Remove the padding from the row, or "
            "give each document a row of its own."
        )


def _check_scores(model: nn.Module, output: Any, rows: int) -> None:
    """Refuse packed rows where a model has one score per row: the other documents of the row would have none."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.ndim == 2 and len(logits) == rows:
        raise ValueError(
            f"{type(model).__name__} gives one score per row, and position_ids start again inside a row: give each "
            "document a row of its own, and pad."
        )


def _check_starts(mask: torch.Tensor, positions: torch.Tensor) -> None:
    """Positions that stay the same are padding, for which no mask has to be given."""
    jumps = nn.functional.pad(positions[:, 1:] != positions[:, :-1], (1, 0), value=False)
    later = mask.bool().cumsum(-1) > 1  # a row may begin inside a document
    wrong = starts_of(positions, mask) & jumps & (positions != 0) & later
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        before, here = positions[row, column - 1 : column + 1].tolist()
        raise ValueError(
            f"position_ids go from {before} to {here} at token {column} of row {row}: expected the one that follows, "
            "or 0, where a document starts."
        )


def _checked_positions(given: dict[str, Any], mask: Any) -> Any:
    """The positions `(batch, length)` that boundaries give, or given ones that agree; others are left as they are.

    Raises:
        ValueError: the boundaries are not those of the batch, or of its positions.
    """
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    boundaries, positions = given["cu_seq_lens_q"].tolist(), given.get("position_ids")
    if tokens is None or (positions is not None and not _is_2d(positions)):
        return positions
    batch, length = tokens.shape[:2]
    late = [index for index in range(1, len(boundaries)) if boundaries[index] <= boundaries[index - 1]]
    if boundaries[:1] != [0] or boundaries[-1] != batch * length or late:
        what = f"{boundaries[late[0]]} follows {boundaries[late[0] - 1]} (number {late[0]}); " if late else ""
        raise ValueError(
            f"cu_seq_lens_q is no list of where documents begin: {what}expected increasing numbers from 0 to the "
            f"{batch * length} tokens of the batch, got {boundaries[:1]} to {boundaries[-1:]}"
        )
    lengths = torch.tensor(boundaries).diff().tolist()
    counted = torch.cat([torch.arange(size) for size in lengths]).view(batch, length).to(tokens.device)
    if positions is None:
        return counted
    words = mask if _is_2d(mask) else torch.ones_like(counted)
    differ = (starts_of(positions) != (counted == 0)) & words.bool()
    differ[:, 0] = counted[:, 0] != 0
    if differ.any():
        row, column = differ.nonzero()[0].tolist()
        raise ValueError(
            f"cu_seq_lens_q and position_ids disagree at token {column} of row {row}: by one of them a document begins "
            "there, and not by the other."
        )
    return positions
