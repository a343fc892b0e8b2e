"""Recover from failures: discard the requests of a failed call, and end calls to an engine process that died."""

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


def discard_requests(llm: Any, *, in_process: bool) -> None:
    """Abort the requests of a failed call, and discard the state of an interrupted step.

    Otherwise vLLM would continue them in the next call, wait for them, or add their outputs to its answer.
    """
    engine = llm.llm_engine
    with suppress(Exception):  # an engine that has died
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        if in_process:
            core = engine.engine_core.engine_core
            scheduler = core.scheduler
            core.abort_requests(list(scheduler.requests))
            # A request is queued before it is listed, and may have been interrupted in between.
            scheduler.running.clear()
            for queue in (scheduler.waiting, getattr(scheduler, "skipped_waiting", None)):
                if queue:
                    queue.remove_requests([*queue])
            if core.batch_queue:
                core.batch_queue.clear()
            llm.collective_rpc("nrl_recover")
