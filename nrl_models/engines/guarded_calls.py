"""Guards around the methods of engines: one call at a time, complete weights, an open engine, kept random states."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, Self
from weakref import WeakSet

from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.process_state import in_forked_child
from nrl_models.errors import EngineError, MixedWeightsError

_RANDOM = ("start", "_generate", "_score", "_refit", "module_calls", "image_calls", "close")
"""Methods in which an engine may seed or draw random numbers."""

_ANSWERS = ("_generate", "_score", "module_calls", "image_calls")
"""Methods that compute with the weights."""

_LOCKED = ("note_weights", "unchanged_weights", "use_adapter")
"""Methods that read weights, or change what `_ANSWERS` methods compute."""


_engines: WeakSet[GuardedCalls] = WeakSet()


def _renew_locks() -> None:
    for engine in list(_engines):
        engine._lock = RLock()


in_forked_child(_renew_locks)


class GuardedCalls:
    """Wraps methods of every subclass.

    - Methods in `_RANDOM` restore the caller's random states.
    - Methods in `_ANSWERS` raise `MixedWeightsError` during a refit and after a refit that failed halfway.
    - Methods in `_ANSWERS` and `_LOCKED`, and `refit`, share a lock, so calls from several threads run one after
      another. They raise `EngineError` after `close`.

    Attributes:
        name: Engine name in messages.
    """

    name: str
    _mixed: str = ""
    """Error message of `_ANSWERS` methods while the weights are of two versions; otherwise empty."""
    _is_closed: bool = False
    _lock: RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the engine's lock here, so that subclasses need not call `super().__init__`."""
        engine = super().__new__(cls)
        engine._lock = RLock()
        _engines.add(engine)
        return engine

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrapped = dict.fromkeys(_ANSWERS, _answering) | dict.fromkeys(_LOCKED, _locked) | {"close": _closing}
        for name, wrap in wrapped.items():
            if (method := cls.__dict__.get(name)) is not None:
                setattr(cls, name, wrap(method))
        for name in _RANDOM:
            method = cls.__dict__.get(name)
            if isinstance(method, classmethod):
                setattr(cls, name, classmethod(random_states_kept()(method.__func__)))
            elif method is not None:
                setattr(cls, name, random_states_kept()(method))

    def require_open(self) -> None:
        """Check that the engine was not closed.

        Raises:
            EngineError: If it was.
        """
        if self._is_closed:
            raise EngineError(f"{self.name} is closed: start another engine")

    def close(self) -> None:
        """Free the engine's memory and processes."""
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that needs an open engine, and must not run during another call."""

    @wraps(method)
    def call(self: GuardedCalls, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.require_open()
            return method(self, *args, **kwargs)

    return call


def _answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that computes with the weights."""

    @wraps(method)
    def answer(self: GuardedCalls, *args: Any, **kwargs: Any) -> Any:
        if self._mixed:
            raise MixedWeightsError(self._mixed)
        return method(self, *args, **kwargs)

    return _locked(answer)


def _closing(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap `close`, so that later calls raise."""

    @wraps(method)
    def close(self: GuardedCalls) -> None:
        self._is_closed = True
        method(self)

    return close
