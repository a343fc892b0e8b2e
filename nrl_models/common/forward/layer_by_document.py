"""Layers through which each packed document goes by itself, because upstream's would mix them.

Those are layers that keep a state along a sequence (convolutions, recurrences, gated delta nets, state-space models),
which carry it from one document into the next, and decoders that count positions from a row's beginning. Each document
goes through upstream's own forward, so what it gives is what it gives alone, and nothing of upstream is copied.
Where transformers lets padding into the state of a batch of one row, that row's tokens go through alone, too.
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

from nrl_models.common.forward.documents import Documents, documents_running, running
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import KEEPS_PADDING_OUT_OF_SINGLE_ROWS

BOUNDARIES = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What callers may tell kernels of a row's documents: within a document there is nothing to tell."""


class ByDocument(nn.Module):
    """Mixin for a layer, or a decoder, through which each document of a packed row goes by itself.

    It goes before the Hugging Face class (and before a `CombinedProjections`), whose forward then sees one document at
    a time: `(1, tokens, ...)` of every argument that has a row for each token, and its square of a mask `(batch, ...,
    tokens, tokens)`, in tuples and mappings too. Batches that are not packed are left as they are, but for the padding
    of a single row with an older transformers (`upstream.KEEPS_PADDING_OUT_OF_SINGLE_ROWS`).
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("layers-across-documents",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and results are upstream's; what has no tokens in its results is the last document's.

        Raises:
            ValueError: it is given another number of tokens than the packed batch has, or asked for attention weights.
        """
        documents = documents_running(self)
        if documents is None or is_off("layers-across-documents"):
            tokens = None if KEEPS_PADDING_OUT_OF_SINGLE_ROWS else _tokens_of_padded_row(args, kwargs)
            if tokens is None:
                return super().forward(*args, **kwargs)
            cut = [_cut(value, tokens) for value in args], {name: _cut(value, tokens) for name, value in kwargs.items()}
            return _uncut(super().forward(*cut[0], **cut[1]), tokens)
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if given is None or given.shape[:2] != documents.shape:
            shape = "no tensor" if given is None else tuple(given.shape)
            raise ValueError(
                f"{type(self).__name__} takes packed documents one by one, but it is given {shape} where the batch has "
                f"{tuple(documents.shape)} tokens: pack no documents here."
            )
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        parts = zip(*(_parts(value, documents) for value in (args, kwargs)), strict=True)
        with running(None):
            results = [super(ByDocument, self).forward(*own, **named) for own, named in parts]
        return _joined(results, documents)


class DecoderByDocument(ByDocument):
    """Mixin for a whole decoder through which each document of a packed row goes by itself.

    For decoders that count positions from a row's beginning, or make masks that know of no positions. It goes before a
    Hugging Face class whose forward takes `input_ids` or `inputs_embeds`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and results are upstream's. Positions from zero are left to the decoder, as for one document.

        Raises:
            ValueError: see `ByDocument`; or tensors are given that have no row for each token, so that which document
                they belong to is not known: images, an encoder's states; or FSDP shards the decoder.
        """
        documents = documents_running(self)
        if documents is None or is_off("layers-across-documents"):
            return super(ByDocument, self).forward(*args, **kwargs)
        given = dict(zip(inspect.signature(super(ByDocument, self).forward).parameters, args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        unknown = [
            f"{name} {tuple(value.shape)}"
            for name, value in tensors.items()
            if name not in BOUNDARIES and (name.startswith("encoder_") or not _parts_of_tensor(value, documents))
        ]
        if unknown:
            raise ValueError(
                f"{type(self).__name__} takes packed documents one by one, and which of them {', '.join(unknown)} "
                "belongs to is not known: give each document a row of its own, and pad."
            )
        if any(isinstance(part, FSDPModule) for part in self.modules()):
            raise ValueError(
                f"{type(self).__name__} takes packed documents one by one, and FSDP gathers a layer each time that it "
                "runs: ranks with other numbers of documents would wait for each other. Give each a row of its own, "
                "and pad."
            )
        positions = tensors.get("position_ids")
        if positions is not None and torch.equal(positions.expand(documents.shape), documents.positions):
            del given["position_ids"]
        return super().forward(**given)


def _tokens_of_padded_row(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which places of a batch of one row are tokens, `(length,)` bool; None if it has several rows, or no padding."""
    mask, hidden_states = kwargs.get("attention_mask"), args[0] if args else kwargs.get("hidden_states")
    if not isinstance(mask, torch.Tensor) or not isinstance(hidden_states, torch.Tensor):
        return None
    if len(mask) > 1 or mask.shape != hidden_states.shape[:2] or bool(mask.all()):
        return None
    return mask[0].bool()


def _cut(value: Any, tokens: torch.Tensor) -> Any:
    """A value's part for these tokens of the row, if it has one."""
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[:2] == (1, len(tokens)):
        return value[:, tokens]
    return value


def _uncut(result: Any, tokens: torch.Tensor) -> Any:
    """A result for the whole row, with zeros for padding."""
    if isinstance(result, (tuple, list)):
        return type(result)(_uncut(part, tokens) for part in result)
    if not isinstance(result, torch.Tensor) or result.ndim < 3 or result.shape[1] != int(tokens.sum()):
        return result
    return result.new_zeros(1, len(tokens), *result.shape[2:]).index_copy(1, tokens.nonzero()[:, 0], result)


def _parts(value: Any, documents: Documents) -> list[Any]:
    """For each document what it has of a value: its tokens of tensors that have some, all of anything else."""
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
    """The documents' parts of a tensor; none if it has no dimension of tokens."""
    rows, length = documents.shape
    if value.ndim < 2 or value.shape[0] not in (1, rows):
        return []
    value = value if value.shape[0] == rows else value.expand(rows, *value.shape[1:])
    if value.shape[1] == length:
        return documents.split(value)
    if value.ndim == 4 and value.shape[2:] == (length, length):
        ends = [end for lengths in documents.lengths for end in accumulate(lengths)]
        strips = documents.split(value, 2)
        return [strip[..., end - strip.shape[2] : end] for strip, end in zip(strips, ends, strict=True)]
    return []


def _joined(results: Sequence[Any], documents: Documents) -> Any:
    """The documents' results as one: tokens one after the other again, and of anything else the last document's."""
    *_, last = results
    if isinstance(last, ModelOutput):
        if last.get("attentions"):
            raise ValueError("attention weights of packed documents are not returned: leave output_attentions out")
        return type(last)(**{name: _joined([result[name] for result in results], documents) for name in last})
    if isinstance(last, (tuple, list)):
        return type(last)(_joined(parts, documents) for parts in zip(*results, strict=True))
    lengths = [length for row in documents.lengths for length in row]
    shapes = [part.shape if isinstance(part, torch.Tensor) else () for part in results]
    if all(shape[:2] == (1, length) for shape, length in zip(shapes, lengths, strict=True)):
        return documents.join(results)
    if all(shape[:1] == (length,) for shape, length in zip(shapes, lengths, strict=True)):
        return torch.cat(list(results))  # routers see the tokens of all rows in one dimension
    return last
