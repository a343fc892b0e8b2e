"""Refits over HTTP that an exception interrupts, as Ctrl-C does, in each of their requests."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from http_refit_server import ROUTES, Served, train
from test_interrupted_calls import Interruption
from test_transfer import different_tensors, exported
from transformers import PreTrainedModel

from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import MixedWeightsError
from nrl_models.logprobs import Sampling


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_interrupted_refit_leaves_consistent_weights_or_raises(
    trainer_model: PreTrainedModel,
    engine_and_server: tuple[HTTPEngine, Served],
    route: str,
    after: bool,
) -> None:
    """Ctrl-C in each request in turn, before or after the server runs it."""
    engine, served = engine_and_server
    if route != "init_weight_transfer_engine":  # this request is sent only once
        engine.refit(exported(trainer_model))
    before = {name: tensor.clone() for name, tensor in served.workers.model.state_dict().items()}
    train(trainer_model, 0.01, torch.Generator().manual_seed(0))
    run, waiting, released = served.do, [route], threading.Event()

    def do(name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name not in waiting:
            return run(name, body)
        waiting.clear()
        answer = run(name, body) if after else {}
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        released.wait(10)
        return answer

    def interrupt(*_: object) -> None:
        raise Interruption

    served.do = do  # type: ignore[method-assign]
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interruption):
            engine.refit(exported(trainer_model))
    finally:
        signal.signal(signal.SIGALRM, handler)
        released.set()
    took_effect = route in ("reset_prefix_cache", "resume") or (route == "finish_weight_update" and after)
    assert not different_tensors(
        served.workers.model.state_dict(), trainer_model.state_dict() if took_effect else before
    )
    if took_effect or route == "finish_weight_update":
        with pytest.raises(MixedWeightsError, match="raises on every call until"):
            engine.score([[1]], Sampling())
    else:
        assert not served.is_paused
        engine.score([[1]], Sampling())
    engine.refit(exported(trainer_model))
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())
    assert not served.is_paused
    engine.score([[1]], Sampling())
