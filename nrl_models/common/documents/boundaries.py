"""Boundaries of the documents of a packed batch, read from its positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Boundaries of the documents in a batch of `(batch, seq_len)` tokens. Each token is in one document.

    Attributes:
        lengths: Lengths of the documents by row, which add up to the row's length. Padding forms separate documents.
        index: `(batch, seq_len)` int32, index of each token's document in its row, from zero; `seq_idx` of kernels.
        cu_seqlens: `(documents + 1,)` int32, start of each document in the flattened batch, and the end of the last.
        prompts: Shared prompts of the documents; None if no document continues another.
        batches: Batches of documents that attention runs; None to run each document alone.
    """

    lengths: tuple[tuple[int, ...], ...]
    index: torch.Tensor
    cu_seqlens: torch.Tensor
    prompts: SharedPrompts | None = None
    batches: DocumentBatches | None = None

    @classmethod
    def from_positions(cls, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Documents:
        """Create documents from positions and a mask, on their device. Reading them from a GPU waits for it.

        Args:
            position_ids: `(batch, seq_len)`; see `starts_of`, and `sharing_prompts` for documents that continue others.
            attention_mask: `(batch, seq_len)`, False or 0 for padding. Consecutive padding is one document,
                regardless of its positions.
        """
        starts = starts_of(position_ids, attention_mask)
        if attention_mask is not None:
            token = attention_mask.bool()
            starts = starts | nn.functional.pad(token[:, 1:] != token[:, :-1], (1, 0), value=True)
        before = columns_before(position_ids) if _sharing.get() else None
        return cls._from_starts(starts, position_ids, before)

    @classmethod
    def _from_starts(cls, starts: torch.Tensor, positions: torch.Tensor, before: torch.Tensor | None) -> Documents:
        """Create documents from their first tokens; with shared prompts if `before` is passed, see `SharedPrompts`."""
        flat = starts.flatten().nonzero().flatten()
        boundaries = nn.functional.pad(flat, (0, 1), value=starts.numel())
        lengths = iter(boundaries.diff().tolist())
        counts = starts.sum(-1).tolist()
        return cls(
            tuple(tuple(next(lengths) for _ in range(count)) for count in counts),
            (starts.cumsum(-1) - 1).int(),
            boundaries.int(),
            None if before is None else SharedPrompts.of(starts, positions, before),
        )

    def to(self, device: torch.device) -> Documents:
        """Return these documents with tensors on a device, and with `batches` unless it is a CPU.

        On a GPU, launching kernels for each document would take longer than computing padding.
        """
        prompts = None if self.prompts is None else self.prompts.to(device)
        batches = None if device.type == "cpu" else DocumentBatches.of(self).to(device)
        return Documents(self.lengths, self.index.to(device), self.cu_seqlens.to(device), prompts, batches)

    def chunked(self, size: int) -> Documents:
        """Split each document into chunks of `size` tokens (the last one may be shorter), which become documents."""
        positions = self.positions.cpu() % size
        starts = (positions == 0) | nn.functional.pad(self.index.cpu().diff() != 0, (1, 0), value=True)
        before = None if self.prompts is None else self.prompts.before.cpu()
        return Documents._from_starts(starts, positions, before).to(self.index.device)

    @property
    def positions(self) -> torch.Tensor:
        """Return each token's index in its document, from zero, `(batch, seq_len)`. Counts a shared prompt."""
        sizes = zip(self.lengths_with_prompts, chain(*self.lengths), strict=True)
        within = [torch.arange(size - length, size) for size, length in sizes]
        return torch.cat(within).view(self.shape).to(self.index.device)

    @property
    def lengths_with_prompts(self) -> list[int]:
        """Length of each document, including the shared prompt that it continues."""
        lengths = list(chain(*self.lengths))
        if self.prompts is None:
            return lengths
        return [length + end - start for length, (start, end) in zip(lengths, self.prompts.spans, strict=True)]

    def boundaries(self, device: torch.device) -> dict[str, Any]:
        """Return the boundaries of queries and keys, as arguments of kernels for variable lengths."""
        keys = self.cu_seqlens if self.prompts is None else self.prompts.cu_seqlens
        return {
            "cu_seq_lens_q": self.cu_seqlens.to(device),
            "cu_seq_lens_k": keys.to(device),
            "max_length_q": self.longest,
            "max_length_k": max(self.lengths_with_prompts),
        }

    @property
    def shape(self) -> torch.Size:
        """Shape `(batch, seq_len)` of the batch."""
        return self.index.shape

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return max(map(max, self.lengths))

    def split(self, tensor: torch.Tensor, dim: int = 1) -> list[torch.Tensor]:
        """Split a tensor by document, row by row. Returns views, or copies with the shared prompts.

        Args:
            tensor: A tensor whose first dimension is the batch.
            dim: Dimension of tokens.
        """
        if self.prompts is not None:
            return list(self.prompts.repeated(tensor, dim).split(self.lengths_with_prompts, dim))
        return self.split_without_prompts(tensor, dim)

    def split_without_prompts(self, tensor: torch.Tensor, dim: int = 1) -> list[torch.Tensor]:
        """Split a tensor by document. Returns views, without the shared prompts."""
        rows = zip(tensor.split(1), self.lengths, strict=True)
        return [part for row, lengths in rows for part in row.split(list(lengths), dim)]

    def join(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Concatenate results for the parts from `split` into one tensor. Drops repeated prompts."""
        if self.prompts is not None:
            sizes = chain(*self.lengths)
            parts = [part.narrow(dim, part.shape[dim] - size, size) for part, size in zip(parts, sizes, strict=True)]
        rows, offset = [], 0
        for lengths in self.lengths:
            rows.append(torch.cat(list(parts[offset : offset + len(lengths)]), dim))
            offset += len(lengths)
        return rows[0] if len(rows) == 1 else torch.cat(rows)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """Prompts of documents in one row that continue the first tokens of an earlier document.

    Attributes:
        spans: For each document, the first column of its prompt and the column after it. Equal if it has none.
        before: See `columns_before`.
        columns: Columns of all documents with their prompts, one document after the other.
        cu_seqlens: `(documents + 1,)` int32, start of each document in `columns`, and the end of the last.
    """

    spans: tuple[tuple[int, int], ...]
    before: torch.Tensor
    columns: torch.Tensor
    cu_seqlens: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, positions: torch.Tensor, before: torch.Tensor) -> SharedPrompts | None:
        """Find the prompts of a row's documents. Returns None if no document has one.

        Args:
            starts: `(1, seq_len)` bool, True where a document starts.
            positions: `(1, seq_len)`, positions in the documents. Where one starts, the length of its prompt.
            before: See `columns_before`.

        Raises:
            ValueError: If there are several rows, or a document continues more tokens than the earlier one has.
        """
        if not bool((starts & (positions > 0)).any()):
            return None
        if len(starts) > 1:
            raise ValueError(f"documents that share prompts must be in one row: there are {len(starts)}")
        first = starts[0].nonzero()[:, 0]
        sizes, ends = positions[0, first], before[0, first] + 1
        spans = tuple(zip((ends - sizes).tolist(), ends.tolist(), strict=True))
        boundaries = [*first.tolist(), starts.shape[1]]
        index = (starts[0].cumsum(0) - 1).tolist()
        for document, (start, end) in enumerate(spans):
            if end > start and (start < 0 or end > boundaries[document] or index[start] != index[end - 1]):
                raise ValueError(f"document {document} continues tokens {start} to {end} of its row: no such document")
        device = positions.device
        parts = [
            (torch.arange(start, end), torch.arange(boundaries[document], boundaries[document + 1]))
            for document, (start, end) in enumerate(spans)
        ]
        lengths = torch.tensor([0, *(len(prompt) + len(continuation) for prompt, continuation in parts)])
        columns = torch.cat([part for both in parts for part in both])
        return cls(spans, before, columns.to(device), lengths.cumsum(0).int().to(device))

    def to(self, device: torch.device) -> SharedPrompts:
        """Return these prompts with tensors on a device."""
        return SharedPrompts(self.spans, self.before.to(device), self.columns.to(device), self.cu_seqlens.to(device))

    def repeated(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor's tokens with the prompt before each document that continues it."""
        return tensor.index_select(dim, self.columns.to(tensor.device))


LEAST_FILL = 0.75
"""Minimum length of a document in a batch, as a share of the batch's length."""


@dataclass(frozen=True, slots=True, eq=False)
class DocumentBatches:
    """Documents of similar lengths, whose shared prompts have equal lengths, as batches padded on the right.

    Shapes: B batches, S tokens of a document without its prompt, P tokens of a prompt. The padding of a document
    repeats its last token.

    Attributes:
        sizes: Number of documents, `S` and `P` of each batch.
        queries: Index in the flattened `(batch, seq_len)` of each query token, batch after batch.
        keys: Same as `queries` for the keys, where each document follows its prompt.
        places: `(batch * seq_len,)`, the index in `queries` of each token.
    """

    sizes: tuple[tuple[int, int, int], ...]
    queries: torch.Tensor
    keys: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, documents: Documents) -> DocumentBatches:
        """Sort documents into batches. Their tensors are on the CPU."""
        lengths = list(chain(*documents.lengths))
        starts = [0, *accumulate(lengths)]
        spans = [(0, 0)] * len(lengths) if documents.prompts is None else documents.prompts.spans
        prompts = [end - start for start, end in spans]
        batches: list[list[int]] = []
        for number in sorted(range(len(lengths)), key=lambda number: (prompts[number], -lengths[number])):
            first = batches[-1][0] if batches else None
            if first is None or prompts[number] != prompts[first] or lengths[number] < LEAST_FILL * lengths[first]:
                batches.append([])
            batches[-1].append(number)
        queries, keys, places, sizes = [], [], torch.empty(starts[-1], dtype=torch.long), []
        offset = 0
        for batch in batches:
            longest = lengths[batch[0]]
            sizes.append((len(batch), longest, prompts[batch[0]]))
            for number in batch:
                indices = (torch.arange(longest) + starts[number]).clamp(max=starts[number + 1] - 1)
                queries.append(indices)
                keys += [torch.arange(*spans[number]), indices]
                places[starts[number] : starts[number + 1]] = torch.arange(offset, offset + lengths[number])
                offset += longest
        return cls(tuple(sizes), torch.cat(queries), torch.cat(keys), places)

    def to(self, device: torch.device) -> DocumentBatches:
        """Return these batches with tensors on a device."""
        return DocumentBatches(self.sizes, self.queries.to(device), self.keys.to(device), self.places.to(device))

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return `(documents, heads, S, size)` for each batch, from `(batch, heads, seq_len, size)`."""
        return self._split(tensor, self.queries, [length for _, length, _ in self.sizes])

    def split_keys(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return `(documents, heads, P + S, size)` for each batch, from `(batch, heads, seq_len, size)`."""
        return self._split(tensor, self.keys, [length + prompt for _, length, prompt in self.sizes])

    def _split(self, tensor: torch.Tensor, index: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        tokens = tensor.transpose(0, 1).flatten(1, 2).index_select(1, index.to(tensor.device))
        counts = [count for count, *_ in self.sizes]
        parts = tokens.split([count * length for count, length in zip(counts, lengths, strict=True)], 1)
        return [part.unflatten(1, (count, -1)).transpose(0, 1) for part, count in zip(parts, counts, strict=True)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `(batch * seq_len, heads, size)`, from results `(documents, heads, S, size)` of each batch."""
        tokens = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
        return tokens.index_select(0, self.places.to(tokens.device))


_sharing: ContextVar[bool] = ContextVar("sharing prompts", default=False)


@contextmanager
def sharing_prompts() -> Iterator[None]:
    """Let documents of a packed row continue the beginning of an earlier one while the context is open.

    A document that starts at position `p > 0` continues the first `p` tokens of the last document before it that starts
    at 0. It attends to these tokens and to the tokens in the document.
    """
    before = _sharing.set(True)
    try:
        yield
    finally:
        _sharing.reset(before)


def prompts_are_shared() -> bool:
    """Return True inside `sharing_prompts`."""
    return _sharing.get()


def columns_before(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the column of the token before each token, `(batch, seq_len)`.

    This is the previous column. Inside `sharing_prompts`, a document that continues another has the last token of its
    prompt before its first.
    """
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand(position_ids.shape)
    if not _sharing.get():
        return columns - 1
    begins = torch.where(position_ids == 0, columns, 0).cummax(-1).values
    continues = starts_of(position_ids) & (position_ids > 0)
    return torch.where(continues, begins + position_ids, columns) - 1


def starts_of(position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Find the first token of each document.

    A token starts a document if its position does not follow the previous token's. If padding lies between them, its
    position only has to be larger: a hole in the mask does not split a document, whether positions skip the hole
    (`attention_mask.cumsum(-1) - 1`) or count it.

    Args:
        position_ids: `(batch, seq_len)`.
        attention_mask: `(batch, seq_len)`, False or 0 for padding, whose positions are ignored. Default: no padding.

    Returns:
        `(batch, seq_len)` bool; False for padding.
    """
    if attention_mask is None:
        follows = position_ids[:, 1:] == position_ids[:, :-1] + 1
        return nn.functional.pad(~follows, (1, 0), value=True)
    token = attention_mask.bool()
    columns = torch.arange(token.shape[1], device=token.device)
    last = torch.where(token, columns, -1).cummax(-1).values
    before = nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    previous = position_ids.gather(1, before.clamp(min=0))
    follows = torch.where(before == columns - 1, position_ids == previous + 1, position_ids > previous)
    return token & ((before < 0) | ~follows)
