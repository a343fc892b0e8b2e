"""Regions of a forward in which each rank computes its share of activations, such as its heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from nrl_models.common.upstream_torch import current_graph_task_id


class RegionObserver(Protocol):
    """Observes where sharded regions begin and end."""

    def entered(self, dimension: str) -> None:
        """A tensor that is equal on all ranks of a mesh dimension enters a region."""

    def left(self, dimension: str) -> None:
        """The ranks' shares become a tensor that is equal on all of them."""


_observer: ContextVar[RegionObserver | None] = ContextVar("observer of sharded regions", default=None)


@contextmanager
def observed_by(observer: RegionObserver) -> Iterator[None]:
    """Report regions of forwards to `observer`, except in compiled code and in recomputation by the backward."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observing() -> RegionObserver | None:
    """Return the observer of the running forward; None without one."""
    if torch.compiler.is_compiling() or (observer := _observer.get()) is None:
        return None
    return observer if current_graph_task_id() == -1 else None
