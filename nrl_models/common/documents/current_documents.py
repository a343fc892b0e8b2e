"""Documents of a packed batch, for layers that must keep them apart.

A model's forward of a packed batch runs in `with running(documents)`, and its layers call `documents_running()`.
Activation checkpointing runs layers again in the backward pass, after that forward and possibly in another thread. So
checkpoint functions are wrapped to pass the documents on (`carry_documents`). If a layer runs again without them,
because of another checkpoint function, an error is raised, since gradients would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from nrl_models.common.documents.boundaries import Documents
from nrl_models.common.upstream import CHECKPOINT_FUNCTIONS
from nrl_models.common.upstream_torch import current_graph_task_id


class _Unknown:
    """State before any forward has set its documents. In a forward pass, it means no documents."""


_UNKNOWN = _Unknown()
_running: ContextVar[Documents | _Unknown | None] = ContextVar("documents running", default=_UNKNOWN)
_open: list[None] = []
"""One entry per packed batch that runs, in any thread. Compilers can read this list, but no context variable."""
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
    documents = _running.get()
    if not isinstance(documents, _Unknown):
        if documents is not None and layer is not None:
            _packed.add(layer)
        return documents
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
    """Make `documents_running()` return `documents` in this thread while the context is open."""
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
