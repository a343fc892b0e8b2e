"""The outcome of a damaged input: a value, a typed error, or a bug."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nrl_models.errors import NRLModelsError

HANG_SECONDS = 10
"""Time limit of a case. On a busy machine it is up to six times as long, until half of it is used as CPU time."""

MAX_MEMORY = 2**30
"""Limit in bytes of additional memory that a case may use. Few use a hundredth."""

MAX_ADDRESS_SPACE = 12 * 2**30
"""Limit in bytes of memory that a case may allocate, used or not, to protect the machine."""


class BugError(AssertionError):
    """An outcome that is a bug for any input."""


class _HangError(BaseException):
    pass


def outcome(call: Callable[[], Any]) -> Any:
    """Return the value of `call`, or the typed error that it raises.

    Raises:
        BugError: Another error, a hang, an allocation controlled by damaged input, or a control character in a message.
    """
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _limits():
            result = call()
    except NRLModelsError as error:
        _check_message(error)
        result = error
    except _HangError:
        raise BugError(f"took more than {HANG_SECONDS} s") from None
    except Exception as error:
        raise BugError(f"untyped: {type(error).__name__}: {str(error)[:300]}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024
    if grown > MAX_MEMORY:
        raise BugError(f"filled {grown:,} bytes of memory: {result!r:.300}")
    return result


def _check_message(error: NRLModelsError) -> None:
    text = str(error)
    if not all(line.isprintable() for line in text.split("\n")):
        raise BugError(f"a message with control characters: {text[:300]!r}") from error


@contextmanager
def _limits() -> Iterator[None]:
    """Limit time and memory in the main thread. Do nothing in other threads."""

    started, cpu_started = time.monotonic(), time.process_time()

    def stop(_: int, frame: FrameType | None) -> None:
        if time.process_time() - cpu_started < HANG_SECONDS / 2 and time.monotonic() - started < 6 * HANG_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS / 2)
        else:
            raise _HangError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, (soft, hard) = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        allocated = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (allocated + MAX_ADDRESS_SPACE, hard))
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)
