"""Find the function in which an exception was raised, as `module:qualname`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType, TracebackType

UPSTREAM = ("transformers", "peft", "trl", "accelerate", "vllm", "mlx_lm")
OURS = ("nrl_models",)


def failing_function(error: BaseException) -> str:
    """Return the innermost function of upstream or nrl_models in a traceback. Empty if there is none.

    A wrapper is replaced by the function that it wraps. For an exception raised from another one, the other's function
    is returned.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    found = [name for frame in _frames(error.__traceback__) if (name := _named(frame))]
    return found[-1] if found else ""


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _named(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "")
    if module.partition(".")[0] not in UPSTREAM + OURS:
        return ""
    qualname = frame.f_code.co_qualname
    if "<locals>" in qualname:
        for name in ("func", "fn", "function"):
            wrapped = frame.f_locals.get(name)
            if callable(wrapped) and hasattr(wrapped, "__qualname__"):
                wrapped = inspect.unwrap(wrapped)
                return f"{wrapped.__module__}:{wrapped.__qualname__}"
    return f"{module}:{qualname.partition('.<locals>')[0]}"
