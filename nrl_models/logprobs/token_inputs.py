"""Arguments of `token_logprobs`: checks, masks and positions, and rows without padding before their first token."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from nrl_models.common.documents.boundaries import starts_of
from nrl_models.common.documents.layers import BOUNDARIES
from nrl_models.common.documents.media_positions import rotary_planes, text_positions
from nrl_models.common.documents.packing import checked_positions, token_positions
from nrl_models.common.dtypes import unreadable
from nrl_models.common.forward.routing import routing_is_observed
from nrl_models.common.forward.token_types import PER_TOKEN
from nrl_models.common.modules import innermost, input_embeddings, reads_complete_rows
from nrl_models.common.upstream import CACHE_NAMES, computes_positions
from nrl_models.common.value_checks import not_zero_or_one
from nrl_models.errors import UnknownArgumentError, shown

Grids = TypeVar("Grids", bound=Any)


SAMPLING_PARAMETERS: Mapping[str, float | None] = {
    **dict.fromkeys(("typical_p", "top_h", "repetition_penalty"), 1.0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_tokens"), 0),
    **dict.fromkeys(("logit_bias", "sequence_bias", "bad_words_ids", "suppress_tokens"), None),
}
"""Sampling parameters of engines that change a distribution, with the value that does not. Forwards ignore them."""

NOT_TAKEN = {
    "use_cache": "complete sequences are processed, and no cache is returned: leave it out, or pass False",
    **dict.fromkeys(CACHE_NAMES, "complete sequences are processed, from their first token: leave it out"),
    "labels": "log-probabilities are computed, and no loss: leave them out",
    "logits_to_keep": "`score` selects the tokens to score: leave it out",
    "mask": "pass padding as attention_mask, and the tokens to score as score",
    "sampling": "pass its temperature, top_k and top_p",
    **dict.fromkeys(
        SAMPLING_PARAMETERS,
        "log-probabilities are those after temperature, top_k and top_p only: sample without it, and leave it out",
    ),
}
"""Keywords of a model's forward that raise an error here, with the reason."""


def forward_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of a model's forward without entries of `NOT_TAKEN` that have no effect.

    Examples are `use_cache=False` and `repetition_penalty=1.0`.

    Raises:
        UnknownArgumentError: If a keyword of `NOT_TAKEN` would have an effect.
    """
    asking = {name: value for name, value in inputs.items() if name in NOT_TAKEN and value is not None}
    for name, value in asking.items():
        is_number = isinstance(value, int | float)
        if is_number and value == SAMPLING_PARAMETERS.get(name, 0):  # 0 is False, or to keep all logits
            continue
        shown = f"{name}={value}" if is_number else name
        raise UnknownArgumentError(f"{shown}: {NOT_TAKEN[name]}")
    return {name: value for name, value in inputs.items() if name not in NOT_TAKEN}


def require_grids(input_ids: Any, **others: Any) -> None:
    """Check that arguments are tensors `(batch, seq_len)`, and that token IDs and positions are whole numbers.

    Positions may have planes, `(planes, batch, seq_len)`; see `require_planes`.

    Raises:
        UnknownArgumentError: If an argument is not a tensor, or not a dense one with values.
        ValueError: If it has another shape or dtype, or there are no tokens.
    """
    every = {"input_ids": input_ids, **others}
    for name, value in every.items():
        if not isinstance(value, torch.Tensor if name == "input_ids" else torch.Tensor | None):
            raise UnknownArgumentError(f"{name}={shown(value)}: expected a tensor (batch, seq_len)")
        if value is not None and (problem := unreadable(value)):
            raise UnknownArgumentError(f"{name} {problem}")
    shape = input_ids.shape
    wrong = [
        f"{name} {tuple(value.shape)}"
        for name, value in others.items()
        if value is not None and value.shape[name == "position_ids" and value.ndim == 3 :] != shape
    ]
    if len(shape) != 2 or wrong:
        raise ValueError(
            f"input_ids has shape {tuple(shape)}, expected (batch, seq_len)"
            + (f"; expected the same shape of {', '.join(wrong)}" if wrong else "")
        )
    if not input_ids.numel():
        raise ValueError(f"input_ids has shape {tuple(shape)}: expected at least one token")
    for name in ("input_ids", "position_ids"):
        value = every.get(name)
        if value is not None and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
            raise ValueError(f"{name} is of {value.dtype}: expected whole numbers")


def require_planes(models: Iterable[nn.Module], position_ids: torch.Tensor | None) -> None:
    """Check that positions `(planes, batch, seq_len)` have the planes of each model's M-RoPE, or one more for text.

    Raises:
        ValueError: If they have others, or a model has plain positions.
    """
    if position_ids is None or position_ids.ndim == 2:
        return
    for model in models:
        planes = rotary_planes(model)
        if not planes or len(position_ids) not in (planes, 1 + planes):
            expected = f"(batch, seq_len){f', or {planes} or {1 + planes} planes of them' if planes else ''}"
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}: {type(model).__name__} expects {expected}"
            )


def unknown_token(models: Iterable[nn.Module], ids: torch.Tensor) -> str | None:
    """Describe a token ID for which a model has no embedding. A GPU would stop there without a message.

    Placeholders of images, videos and audio in a configuration may be larger than the vocabulary.

    Args:
        models: The models.
        ids: Token IDs, of any shape, at least one.
    """
    lowest, highest = torch.stack(torch.aminmax(ids.long())).tolist()  # one wait for a GPU
    for model in models:
        size = _vocabulary(model)
        if size is not None and not 0 <= lowest <= highest < max(size, 1 + max(_placeholders(model), default=0)):
            wrong = lowest if lowest < 0 else highest
            return f"the token ID {wrong}, and {type(model).__name__} has embeddings for 0 to {size - 1}"
    return None


def require_known_tokens(models: Iterable[nn.Module], ids: torch.Tensor) -> None:
    """Check that models have an embedding for each token.

    Raises:
        ValueError: If a token ID is negative or too large.
    """
    if (problem := unknown_token(models, ids)) is not None:
        raise ValueError(f"input_ids has {problem}. Fill padding with one of these, and mark it in attention_mask")


def _vocabulary(model: nn.Module) -> int | None:
    """Return the number of input embeddings; None if they are not an `nn.Embedding`."""
    embedding = input_embeddings(model)
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _placeholders(model: nn.Module) -> list[int]:
    attributes = getattr(getattr(model, "config", None), "__dict__", {})
    return [
        value
        for name, value in attributes.items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int) and not isinstance(value, bool)
    ]


def require_zeros_and_ones(**masks: torch.Tensor | None) -> None:
    """Check that masks have no other values: not additive masks, nor numbers of documents.

    Raises:
        ValueError: If one has.
    """
    for name, mask in masks.items():
        if mask is None or mask.dtype == torch.bool or (other := not_zero_or_one(mask)) is None:
            continue
        raise ValueError(
            f"{name} has the value {other:g}: expected 1 or True for tokens and 0 or False for others. Additive masks "
            "are not supported. Packed documents are separated by position_ids"
        )


def positions_of_boundaries(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    inputs: Mapping[str, Any],
) -> torch.Tensor | None:
    """Return positions of packed sequences whose boundaries are in `cu_seq_lens_q`; else `position_ids`.

    Positions with planes get the plane of text first.

    Raises:
        ValueError: If boundaries and positions disagree.
    """
    if inputs.get("cu_seq_lens_q") is None:
        return position_ids
    text = text_positions(model, position_ids)
    arguments = {"input_ids": input_ids, "position_ids": text, "cu_seq_lens_q": inputs["cu_seq_lens_q"]}
    positions: torch.Tensor = checked_positions(arguments, attention_mask)
    if position_ids is None or position_ids.ndim == 2:
        return positions
    return torch.cat([positions[None], position_ids[-rotary_planes(model) :]])


def require_unpacked(
    models: Iterable[nn.Module], position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> None:
    """Check that no row has several sequences if a PEFT adapter of a model reads complete rows.

    Raises:
        UnknownArgumentError: If one has.
    """
    if position_ids is None or not any(map(reads_complete_rows, models)):
        return
    if bool((starts_of(position_ids, attention_mask).sum(1) > 1).any()):
        raise UnknownArgumentError(
            "position_ids: a row has several sequences, and the model's adapter (prompt learning or activated LoRA) "
            "treats it as one; expected a sequence for each row: pad the batch, or call rollout_logprobs"
        )


def mask_and_positions(
    model: nn.Module, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, *, media: bool
) -> dict[str, torch.Tensor]:
    """Return the mask and position keywords of the model's forward.

    Positions that the caller passes go to the model, unless they only count the tokens of a row, and the model reads
    its positions from the mask, the images or the token ids. Otherwise the model computes its own. Most models count
    columns, which is wrong only if padding comes before a token. Such a batch gets positions that count tokens. A mask
    without padding is left out.
    """
    inputs: dict[str, torch.Tensor] = {}
    inner = innermost(model)
    if (
        position_ids is not None
        and position_ids.ndim == 2
        and _only_count_tokens(position_ids, attention_mask)
        and computes_positions(inner, media=media)  # last, because it visits all modules
    ):
        position_ids = None
    if attention_mask is not None and not bool(attention_mask.all()):
        inputs["attention_mask"] = attention_mask.long()  # some models of transformers subtract it from 1
        if (
            position_ids is None
            and "position_ids" in inspect.signature(inner.forward).parameters
            and _has_padding_before_tokens(attention_mask)
            and not computes_positions(inner, media=media)
        ):
            position_ids = token_positions(attention_mask)
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    return inputs


def _only_count_tokens(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask
    return bool(((position_ids == token_positions(mask)) | ~mask.bool()).all())


def _has_padding_before_tokens(attention_mask: torch.Tensor) -> bool:
    token = attention_mask.bool()
    return bool((token[:, 1:] & ~token[:, :-1]).any())


@dataclass(frozen=True, slots=True, eq=False)
class LeftPadding:
    """Rows of a batch moved to the left, so that they begin with a token.

    Padding on the right cannot change a causal model's results. Padding on the left does in some of transformers'
    classes: those with learned positions, a state that padding enters, or chunked attention.

    Attributes:
        columns: Column of the batch for each column of the moved rows, `(batch, seq_len)`.
    """

    columns: torch.Tensor

    @classmethod
    def of(
        cls, attention_mask: torch.Tensor | None, models: Iterable[nn.Module], inputs: Mapping[str, Any]
    ) -> LeftPadding | None:
        """Return the left padding of a batch whose rows should be moved to the left; None if no row begins with it.

        Rows move if left padding changes results. Rows with only text also move, unless right padding changes results,
        or experts are recorded or replayed, because these choices belong to the columns of the batch.
        """
        limits = {limit for part in models for limit in getattr(part, "limits", {})}
        media = any(value is not None for name, value in inputs.items() if name not in BOUNDARIES)
        stays = "right padding" in limits or media or routing_is_observed()
        if attention_mask is None or (stays and "left padding" not in limits):
            return None
        token = attention_mask.bool()
        first = token.int().argmax(1, keepdim=True)  # 0 for a row without tokens
        if not bool(first.any()):
            return None
        columns = torch.arange(token.shape[1], device=token.device)
        return cls((columns + first) % token.shape[1])

    def moved(self, value: Any) -> Any:
        """Move the rows of a tensor `(batch, seq_len, ...)`. Returns any other value as it is."""
        if not self._fits(value):
            return value
        rows = torch.arange(len(value), device=value.device)[:, None]
        return value[rows, self.columns.to(value.device)]

    def moved_positions(self, position_ids: torch.Tensor | None) -> torch.Tensor | None:
        """Move the rows of positions, which may have planes."""
        if position_ids is None or position_ids.ndim == 2:
            return self.moved(position_ids)
        return torch.stack([self.moved(plane) for plane in position_ids])

    def moved_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Move the rows of arguments of `PER_TOKEN`. Leaves `BOUNDARIES` out, because positions replace them.

        Raises:
            UnknownArgumentError: If another argument has the shape `(batch, seq_len, ...)`, for example a mask of
                audio with as many frames as tokens, so that its rows may or may not belong to tokens.
        """
        inputs = {name: value for name, value in inputs.items() if name not in BOUNDARIES}
        for name, value in inputs.items():
            if name not in PER_TOKEN and self._fits(value):
                raise UnknownArgumentError(
                    f"{name} {tuple(value.shape)} may have a value for each token, and left padding changes this "
                    "model's results, so rows are moved to the left: expected padding on the right"
                )
        return {name: self.moved(value) if name in PER_TOKEN else value for name, value in inputs.items()}

    def _fits(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape[:2] == self.columns.shape

    def restored(self, statistics: Grids, names: Iterable[str]) -> Grids:
        """Move the grids `(batch, seq_len)` of a result back to the columns of the batch."""
        back = self.columns.argsort(1)
        grids = {name: getattr(statistics, name) for name in names}
        return replace(
            statistics, **{name: None if grid is None else grid.gather(1, back) for name, grid in grids.items()}
        )
