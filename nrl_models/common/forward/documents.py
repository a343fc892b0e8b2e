"""Documents of a packed batch, for layers that must keep them apart.

A model's forward of a packed batch runs in `with running(documents)`, and its layers call `documents_running()`.
Activation checkpointing runs layers again in the backward pass, after that forward and possibly in another thread. So
checkpoint functions are wrapped to pass the documents on (`carry_documents`). If a layer runs again without them,
because of another checkpoint function, an error is raised, since gradients would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from nrl_models.common.upstream import CHECKPOINT_FUNCTIONS
from nrl_models.common.upstream_torch import current_graph_task_id


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Boundaries of the documents in a batch of `(batch, seq_len)` tokens. Each token is in one document.

    Attributes:
        lengths: Lengths of the documents by row, which add up to the row's length. Padding forms separate documents.
        index: `(batch, seq_len)` int32, index of each token's document in its row, from zero; `seq_idx` of kernels.
        cu_seqlens: `(documents + 1,)` int32, start of each document in the flattened batch, and the end of the last.
        prompts: Shared prompts of the documents; None if no document continues another.
    """

    lengths: tuple[tuple[int, ...], ...]
    index: torch.Tensor
    cu_seqlens: torch.Tensor
    prompts: SharedPrompts | None = None

    @classmethod
    def from_positions(cls, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Documents:
        """Create documents from positions and a mask.

        Args:
            position_ids: `(batch, seq_len)`; see `starts_of`, and `sharing_prompts` for documents that continue others.
            attention_mask: `(batch, seq_len)`, False or 0 for padding. Consecutive padding is one document, whatever
                its positions.
        """
        starts = starts_of(position_ids, attention_mask)
        if attention_mask is not None:
            token = attention_mask.bool()
            starts = starts | nn.functional.pad(token[:, 1:] != token[:, :-1], (1, 0), value=True)
        documents = cls._from_starts(starts)
        if not _sharing.get():
            return documents
        return replace(documents, prompts=SharedPrompts.of(starts, position_ids, columns_before(position_ids)))

    @classmethod
    def _from_starts(cls, starts: torch.Tensor) -> Documents:
        flat = starts.flatten().nonzero().flatten()
        boundaries = nn.functional.pad(flat, (0, 1), value=starts.numel())
        lengths = iter(boundaries.diff().tolist())
        counts = starts.sum(-1).tolist()
        return cls(
            tuple(tuple(next(lengths) for _ in range(count)) for count in counts),
            (starts.cumsum(-1) - 1).int(),
            boundaries.int(),
        )

    def chunked(self, size: int) -> Documents:
        """Each document in chunks of `size` tokens and a rest, which are documents by themselves."""
        positions = self.positions % size
        starts = (positions == 0) | nn.functional.pad(self.index.diff() != 0, (1, 0), value=True)
        documents = Documents._from_starts(starts)
        if self.prompts is None:
            return documents
        return replace(documents, prompts=SharedPrompts.of(starts, positions, self.prompts.before))

    @property
    def positions(self) -> torch.Tensor:
        """Return each token's index in its document, from zero, `(batch, seq_len)`. A shared prompt counts."""
        sizes = zip(self.lengths_with_prompts, (length for row in self.lengths for length in row), strict=True)
        within = [torch.arange(size - length, size, device=self.index.device) for size, length in sizes]
        return torch.cat(within).view(self.shape)

    @property
    def lengths_with_prompts(self) -> list[int]:
        """The length of each document, including the shared prompt that it continues."""
        lengths = [length for row in self.lengths for length in row]
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
        """`(batch, length)`."""
        return self.index.shape

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
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
        """Concatenate the results for the parts that `split` returned into one tensor. Drops repeated prompts."""
        if self.prompts is not None:
            sizes = [length for row in self.lengths for length in row]
            parts = [part.narrow(dim, part.shape[dim] - size, size) for part, size in zip(parts, sizes, strict=True)]
        rows, place = [], 0
        for lengths in self.lengths:
            rows.append(torch.cat(list(parts[place : place + len(lengths)]), dim))
            place += len(lengths)
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
        lengths = torch.tensor([0, *(len(prompt) + len(own) for prompt, own in parts)])
        columns = torch.cat([part for both in parts for part in both])
        return cls(spans, before, columns.to(device), lengths.cumsum(0).int().to(device))

    def repeated(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor's tokens with the prompt before each document that continues it."""
        return tensor.index_select(dim, self.columns.to(tensor.device))


_sharing: ContextVar[bool] = ContextVar("sharing prompts", default=False)


@contextmanager
def sharing_prompts() -> Iterator[None]:
    """While open, documents of a packed row may continue the beginning of another.

    A document that starts at position `p > 0` continues the first `p` tokens of the last document before it that starts
    at 0. It attends to these tokens and to its own.
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
    place = torch.arange(token.shape[1], device=token.device)
    last = torch.where(token, place, -1).cummax(-1).values
    before = nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    previous = position_ids.gather(1, before.clamp(min=0))
    follows = torch.where(before == place - 1, position_ids == previous + 1, position_ids > previous)
    return token & ((before < 0) | ~follows)


class _Unknown:
    """Nobody has said which documents run: none, in a forward pass."""


_UNKNOWN = _Unknown()
_running: ContextVar[Documents | _Unknown | None] = ContextVar("documents running", default=_UNKNOWN)
_open: list[None] = []
"""An entry for each packed batch that runs, in any thread: compilers cannot read a context variable, but this list."""
_packed: WeakSet[nn.Module] = WeakSet()
"""Layers that ran on packed batches: they may run again in a backward pass."""


def documents_running(layer: nn.Module | None = None) -> Documents | None:
    """Return the documents of the batch whose forward runs in this thread; None if it is not packed.

    Args:
        layer: The calling layer, to raise if its documents are unknown.

    Raises:
        RuntimeError: If `layer` runs again in a backward pass under a checkpoint function that does not pass documents
            on, and has run on a packed batch before, which may be this one.
    """
    if torch.compiler.is_compiling() and not _open:
        return None  # compilers cannot trace the code below: it would break the graph, or raise with fullgraph
    found = _running.get()
    if not isinstance(found, _Unknown):
        if found is not None and layer is not None:
            _packed.add(layer)
        return found
    if layer in _packed and current_graph_task_id() != -1:
        raise RuntimeError(
            f"{type(layer).__name__} runs again in the backward pass, but its documents are unknown: it ran on a "
            "packed batch before, and the checkpoint function is neither transformers' activation checkpointing nor "
            "torch's checkpoint_wrapper. Use model.gradient_checkpointing_enable(), or do not pack documents."
        )
    return None


def documents_are_known() -> bool:
    """Return True inside `running`: a model around the caller has read the batch's positions."""
    return not isinstance(_running.get(), _Unknown)


def some_layer_ran_packed() -> bool:
    """Return True if a layer in this process ran on packed documents, so that recomputed layers may need them."""
    return bool(_packed)


@contextmanager
def running(documents: Documents | None) -> Iterator[None]:
    """While open, `documents_running()` returns `documents`, in this thread."""
    before = _running.set(documents)
    is_packed = documents is not None
    if is_packed:
        _open.append(None)
    try:
        yield
    finally:
        if is_packed:
            _open.pop()
        _running.reset(before)


def carry_documents(model: nn.Module) -> None:
    """Wrap the checkpoint functions of `model`'s modules so that they pass the documents on when layers run again."""
    for module in model.modules():
        for name in CHECKPOINT_FUNCTIONS:
            checkpoint = module.__dict__.get(name)
            if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
                module.__dict__[name] = partial(_checkpointed, checkpoint)


def _checkpointed(checkpoint: Callable[..., Any], layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(_run_with, documents_running(), layer), *args, **kwargs)


def _run_with(documents: Documents | None, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with running(documents):
        return layer(*args, **kwargs)
