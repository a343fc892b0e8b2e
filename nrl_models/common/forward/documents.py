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
from dataclasses import dataclass
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
    """

    lengths: tuple[tuple[int, ...], ...]
    index: torch.Tensor
    cu_seqlens: torch.Tensor

    @classmethod
    def from_positions(cls, position_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Documents:
        """Create documents from positions and a mask.

        Args:
            position_ids: `(batch, seq_len)`; see `starts_of`.
            attention_mask: `(batch, seq_len)`, False or 0 for padding. Consecutive padding is one document, whatever
                its positions.
        """
        starts = starts_of(position_ids, attention_mask)
        if attention_mask is not None:
            token = attention_mask.bool()
            starts = starts | nn.functional.pad(token[:, 1:] != token[:, :-1], (1, 0), value=True)
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
        return Documents.from_positions(self.positions % size)

    @property
    def positions(self) -> torch.Tensor:
        """Return each token's index in its document, from zero, `(batch, seq_len)`."""
        within = [torch.arange(length, device=self.index.device) for row in self.lengths for length in row]
        return torch.cat(within).view(self.shape)

    @property
    def shape(self) -> torch.Size:
        """`(batch, length)`."""
        return self.index.shape

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return max(map(max, self.lengths))

    def split(self, tensor: torch.Tensor, dim: int = 1) -> list[torch.Tensor]:
        """Split a tensor by document. Returns views, row by row.

        Args:
            tensor: A tensor whose first dimension is the batch.
            dim: Dimension of tokens.
        """
        rows = zip(tensor.split(1), self.lengths, strict=True)
        return [part for row, lengths in rows for part in row.split(list(lengths), dim)]

    def join(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Concatenate the results for the parts that `split` returned into one tensor."""
        rows, place = [], 0
        for lengths in self.lengths:
            rows.append(torch.cat(list(parts[place : place + len(lengths)]), dim))
            place += len(lengths)
        return rows[0] if len(rows) == 1 else torch.cat(rows)


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
