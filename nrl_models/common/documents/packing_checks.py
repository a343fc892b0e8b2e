"""Check that each document of a packed row is computed as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nrl_models.common.documents.boundaries import Documents, prompts_are_shared, starts_of
from nrl_models.common.documents.rope_lengths import length_of_new_rope


def unmasked_attention(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation of the decoder if it has no mask function, so that it gets no mask.

    transformers gives such implementations the `attention_mask` of the call, which a packed row does not have.
    """
    name = config.get_text_config(decoder=True)._attn_implementation
    return name if name is not None and name not in ALL_MASK_ATTENTION_FUNCTIONS else None


def why_not_packed(
    config: PreTrainedConfig | None, documents: Documents, mask: torch.Tensor, positions: torch.Tensor
) -> str | None:
    """Return why documents of a packed batch would differ from documents that run alone; None if they would not.

    Args:
        config: Configuration of the model; None if it has none.
        documents: Documents of the batch.
        mask: `(batch, seq_len)`, False or 0 for padding, on a CPU.
        positions: `(batch, seq_len)`, on a CPU.
    """
    if config is None:
        return None
    if (name := unmasked_attention(config)) is not None:
        return (
            f"the attention implementation {name!r} has no mask function. Register one, "
            f"transformers.AttentionMaskInterface.register({name!r}, ...), or use sdpa"
        )
    limit = length_of_new_rope(config)
    if limit is None:
        return None
    lengths = set(_lengths(documents, mask, positions))
    all_longer = limit.is_switch and min(lengths) > limit.tokens
    if len(lengths) == 1 or max(lengths) <= limit.tokens or all_longer:
        return None
    return (
        f"above {limit.tokens} tokens, the longest document of a batch changes the rotary embeddings of the others. "
        "Run documents of different lengths in separate batches (rollout_logprobs does)"
    )


def _lengths(documents: Documents, mask: torch.Tensor, positions: torch.Tensor) -> Iterator[int]:
    """Yield the number of tokens up to the end of each document, with a prompt that it shares."""
    for row, lengths in enumerate(documents.lengths):
        end = 0
        for length in lengths:
            end += length
            if mask[row, end - 1]:
                yield int(positions[row, end - 1]) + 1


def check_padding(mask: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise for holes inside documents of a packed batch, because positions alone cannot express them."""
    token = mask.bool()
    after_padding = nn.functional.pad(token[:, 1:] & ~token[:, :-1], (1, 0), value=False)
    wrong = after_padding & ~starts_of(positions, mask)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask and position_ids disagree: token {column - 1} of row {row} is padding, but the tokens "
            "before and after it are in one document, and the batch is packed. Remove the padding from the row, or "
            "put each document in a separate row."
        )


def check_starts(mask: torch.Tensor, positions: torch.Tensor) -> None:
    """Check that documents start at position 0. Repeated positions are padding, also without a mask."""
    jumps = nn.functional.pad(positions[:, 1:] != positions[:, :-1], (1, 0), value=False)
    later = mask.bool().cumsum(-1) > 1  # a row may begin inside a document
    wrong = starts_of(positions, mask) & jumps & (positions != 0) & later
    if wrong.any() and not prompts_are_shared():
        row, column = wrong.nonzero()[0].tolist()
        before, here = positions[row, column - 1 : column + 1].tolist()
        raise ValueError(
            f"position_ids go from {before} to {here} at token {column} of row {row}: expected the one that follows, "
            "or 0, where a document starts."
        )
