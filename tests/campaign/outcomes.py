"""The outcome of a damaged input: the value, a typed error, or a bug."""

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
"""After this time a case is a bug; on a busy machine after this time of its own, or six times as long."""

MOST_MEMORY = 2**30
"""Bytes of memory that a case may fill beside what the process has; few take a hundredth."""

MOST_ADDRESSES = 12 * 2**30
"""Bytes of memory that a case may ask for, filled or not, so that this machine goes on."""


class BugError(AssertionError):
    """An outcome that no input may have."""


class _HangError(BaseException):
    pass


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the typed error it raises.

    Raises:
        BugError: another error, a hang, memory that a damaged input asked for, a control character in a message.
    """
    filled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
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
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - filled) * 1024
    if grown > MOST_MEMORY:
        raise BugError(f"filled {grown:,} bytes of memory: {result!r:.300}")
    return result


def _check_message(error: NRLModelsError) -> None:
    text = str(error)
    if not all(line.isprintable() for line in text.split("\n")):
        raise BugError(f"a message with control characters: {text[:300]!r}") from error


@contextmanager
def _limits() -> Iterator[None]:
    """Limits of time and memory, in the main thread."""

    started, own = time.monotonic(), time.process_time()

    def stop(_: int, frame: FrameType | None) -> None:
        if time.process_time() - own < HANG_SECONDS / 2 and time.monotonic() - started < 6 * HANG_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS / 2)
        else:
            raise _HangError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, (soft, hard) = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_ADDRESSES, hard))
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)
