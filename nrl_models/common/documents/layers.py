"""Run layers once per packed document if the Hugging Face layer would mix documents.

This concerns layers with a state along the sequence (convolutions, recurrences, gated delta nets, state-space models),
which would carry it into the next document, and decoders that count positions from the start of the row. Each document
runs through the unmodified forward, so its result is the same as without packing.

Some versions of transformers let padding into the state if a batch has a single row. There, only the row's tokens run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils import ModelOutput

from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.documents.current_documents import documents_running, running
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import KEEPS_PADDING_OUT_OF_SINGLE_ROWS

BOUNDARIES = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments with a row's document boundaries. Inside a single document they are dropped."""


class ByDocument(nn.Module):
    """Mixin for a layer or decoder that runs once per document of a packed row.

    It precedes the Hugging Face class (and a `CombinedProjections`), whose forward then gets one document at a time:
    `(1, tokens, ...)` of each argument with a row per token, and the block of a mask `(batch, ..., tokens, tokens)`,
    also in tuples and mappings. Batches that are not packed are unchanged, except that older transformers need the
    padding of a single row removed (`upstream.KEEPS_PADDING_OUT_OF_SINGLE_ROWS`).
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("layers-across-documents",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer once per document. Results without a token dimension are those of the last document.

        Raises:
            ValueError: If the number of tokens differs from the packed batch, or attention weights are requested.
        """
        documents = documents_running(self)
        if documents is None or is_off("layers-across-documents"):
            tokens = None if KEEPS_PADDING_OUT_OF_SINGLE_ROWS else _tokens_of_padded_row(args, kwargs)
            if tokens is None:
                return super().forward(*args, **kwargs)
            cut = [_cut(value, tokens) for value in args], {name: _cut(value, tokens) for name, value in kwargs.items()}
            return _uncut(super().forward(*cut[0], **cut[1]), tokens)
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if tensor is None or tensor.shape[:2] != documents.shape:
            shape = "no tensor" if tensor is None else tuple(tensor.shape)
            raise ValueError(
                f"{type(self).__name__} runs packed documents one by one, but it got {shape} and the batch has "
                f"{tuple(documents.shape)} tokens: do not pack documents here."
            )
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        parts = zip(*(_parts(value, documents) for value in (args, kwargs)), strict=True)
        with running(None):
            results = [super(ByDocument, self).forward(*positional, **named) for positional, named in parts]
        return _joined(results, documents)


class DecoderByDocument(ByDocument):
    """Mixin for a complete decoder that runs once per document of a packed row.

    For decoders that count positions from the start of a row, or whose masks ignore positions. It precedes a Hugging
    Face class whose forward takes `input_ids` or `inputs_embeds`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder once per document. If positions start at zero, the decoder computes them itself.

        Raises:
            ValueError: See `ByDocument`. Also if tensors without a row per token are passed (images, encoder states),
                because their documents are unknown, or if FSDP shards the decoder.
        """
        documents = documents_running(self)
        if documents is None or is_off("layers-across-documents"):
            return super(ByDocument, self).forward(*args, **kwargs)
        arguments = (
            dict(zip(inspect.signature(super(ByDocument, self).forward).parameters, args, strict=False)) | kwargs
        )
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        unknown = [
            f"{name} {tuple(value.shape)}"
            for name, value in tensors.items()
            if name not in BOUNDARIES and (name.startswith("encoder_") or not _parts_of_tensor(value, documents))
        ]
        if unknown:
            raise ValueError(
                f"{type(self).__name__} runs packed documents one by one, but the documents of {', '.join(unknown)} "
                "are unknown: put each document in a separate row, and pad."
            )
        if any(isinstance(part, FSDPModule) for part in self.modules()):
            raise ValueError(
                f"{type(self).__name__} runs packed documents one by one, and FSDP gathers a layer each time that it "
                "runs: ranks with different numbers of documents would deadlock. Put each document in a separate row, "
                "and pad."
            )
        positions = tensors.get("position_ids")
        if positions is not None and torch.equal(positions.expand(documents.shape), documents.positions):
            del arguments["position_ids"]
        return super().forward(**arguments)


def _tokens_of_padded_row(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return which positions of a single row are tokens, `(seq_len,)` bool; None for several rows or no padding."""
    mask, hidden_states = kwargs.get("attention_mask"), args[0] if args else kwargs.get("hidden_states")
    if not isinstance(mask, torch.Tensor) or not isinstance(hidden_states, torch.Tensor):
        return None
    if len(mask) > 1 or mask.shape != hidden_states.shape[:2] or bool(mask.all()):
        return None
    return mask[0].bool()


def _cut(value: Any, tokens: torch.Tensor) -> Any:
    """Return the part of a value at these tokens of the row. Values without a token dimension are unchanged."""
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[:2] == (1, len(tokens)):
        return value[:, tokens]
    return value


def _uncut(result: Any, tokens: torch.Tensor) -> Any:
    """Expand a result to the complete row, with zeros for padding."""
    if isinstance(result, (tuple, list)):
        return type(result)(_uncut(part, tokens) for part in result)
    if not isinstance(result, torch.Tensor) or result.ndim < 3 or result.shape[1] != int(tokens.sum()):
        return result
    return result.new_zeros(1, len(tokens), *result.shape[2:]).index_copy(1, tokens.nonzero()[:, 0], result)


def _parts(value: Any, documents: Documents) -> list[Any]:
    """Split a value by document: tensors with a row per token are split, other values are repeated."""
    count = sum(map(len, documents.lengths))
    if isinstance(value, torch.Tensor):
        return _parts_of_tensor(value, documents) or [value] * count
    if isinstance(value, Mapping) and value:
        parts = zip(*(_parts(each, documents) for each in value.values()), strict=True)
        return [dict(zip(value, part, strict=True)) for part in parts]
    if isinstance(value, (tuple, list)) and value:
        return [type(value)(part) for part in zip(*(_parts(each, documents) for each in value), strict=True)]
    return [value] * count


def _parts_of_tensor(value: torch.Tensor, documents: Documents) -> list[torch.Tensor]:
    """Split a tensor by document. Returns an empty list if it has no dimension of tokens."""
    rows, length = documents.shape
    if value.ndim < 2 or value.shape[0] not in (1, rows):
        return []
    value = value if value.shape[0] == rows else value.expand(rows, *value.shape[1:])
    if value.shape[1] == length:
        return documents.split(value)
    if value.ndim == 4 and value.shape[2:] == (length, length):
        if documents.prompts is not None:
            columns = documents.prompts.columns.to(value.device).split(documents.lengths_with_prompts)
            return [value[:, :, each[:, None], each] for each in columns]
        ends = [end for lengths in documents.lengths for end in accumulate(lengths)]
        strips = documents.split(value, 2)
        return [strip[..., end - strip.shape[2] : end] for strip, end in zip(strips, ends, strict=True)]
    return []


def _joined(results: Sequence[Any], documents: Documents) -> Any:
    """Merge the documents' results: concatenate tensors per token, and take other values from the last document."""
    *_, last = results
    if isinstance(last, ModelOutput):
        if last.get("attentions"):
            raise ValueError("attention weights of packed documents are not returned: leave output_attentions out")
        return type(last)(**{name: _joined([result[name] for result in results], documents) for name in last})
    if isinstance(last, (tuple, list)):
        return type(last)(_joined(parts, documents) for parts in zip(*results, strict=True))
    lengths = documents.lengths_with_prompts
    shapes = [part.shape if isinstance(part, torch.Tensor) else () for part in results]
    if all(shape[:2] == (1, length) for shape, length in zip(shapes, lengths, strict=True)):
        return documents.join(results)
    if all(shape[:1] == (length,) for shape, length in zip(shapes, lengths, strict=True)):
        return documents.join(results, 0)  # routers flatten the tokens of all rows into one dimension
    return last
