"""A vLLM whose process dies: its client leaves whoever waits for an answer of that process waiting for ever."""

from __future__ import annotations

import time
from concurrent.futures import InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import Any

INTERVAL = 0.2
"""Seconds between two looks at whether the process is there."""


def end_waiting_on_death(core: Any) -> None:
    """Make calls of a vLLM fail, also those that wait for an answer already, when its process has died.

    vLLM notices a death, and refuses new calls. The answers that it still owed never come.

    Args:
        core: vLLM's client of an engine in another process (`vllm.v1.engine.core_client.SyncMPClient`).
    """
    # Not the client itself, which ends its process when nothing refers to it any more. That sets the flag, too.
    resources, calls, outputs = core.resources, core.utility_results, core.outputs_queue

    def watch() -> None:
        while not resources.engine_dead:
            time.sleep(INTERVAL)
        # A call is listed before it looks at the flag: one that is not listed here has seen it.
        for call in list(calls):
            if (answer := calls.pop(call, None)) is not None:
                with suppress(InvalidStateError):  # the answer came after all
                    answer.set_exception(_dead())
        outputs.put(_dead())

    Thread(target=watch, daemon=True, name="nrl_models-vllm-death").start()


def _dead() -> Exception:
    return ConnectionError("its process has died")
