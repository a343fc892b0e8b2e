"""Detect that vLLM's engine process died. Its client would wait forever for answers of that process."""

from __future__ import annotations

import time
from concurrent.futures import InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import Any

INTERVAL = 0.2
"""Seconds between checks of the process."""


def end_waiting_on_death(core: Any) -> None:
    """Make calls of a vLLM raise if its process has died, including calls that already wait for an answer.

    vLLM detects the death and rejects new calls, but pending calls would wait forever.

    Args:
        core: vLLM's client of an engine in another process (`vllm.v1.engine.core_client.SyncMPClient`).
    """
    # Do not keep the client itself alive: its finalizer ends the process, which also sets the flag.
    resources, calls, outputs = core.resources, core.utility_results, core.outputs_queue

    def watch() -> None:
        while not resources.engine_dead:
            time.sleep(INTERVAL)
        # A call is listed before it checks the flag, so any call that is not listed here has seen the flag.
        for call in list(calls):
            if (answer := calls.pop(call, None)) is not None:
                with suppress(InvalidStateError):  # the answer arrived after all
                    answer.set_exception(_dead())
        outputs.put(_dead())

    Thread(target=watch, daemon=True, name="nrl_models-vllm-death").start()


def _dead() -> Exception:
    return ConnectionError("its process has died")
