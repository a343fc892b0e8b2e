"""Refits over HTTP to a server with vLLM's routes for new weights, with a failure in each route."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from http_refit_server import ROUTES, Served, train
from test_transfer import different_tensors, exported
from transformers import PreTrainedModel

from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import EngineError, MixedWeightsError, RefitUnsupportedError
from nrl_models.logprobs import Sampling


def test_refit_requests_routes_in_order(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.requested.clear()
    report = engine.refit(exported(trainer_model))
    assert served.requested == [*ROUTES[:-2], "weight_info", *ROUTES[-2:]]
    assert (report.version, served.version.partition("-")[0], served.is_paused) == (1, "1", False)
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())
    train(trainer_model, 0.01, torch.Generator().manual_seed(0))
    engine.refit(exported(trainer_model))
    assert served.workers.receiver.weights.version == served.version
    assert served.version.startswith("2-")
    assert len(served.workers.loaded) > 5
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())


def test_unchanged_weights_of_server(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    assert engine.unchanged_weights() == []  # nothing was noted
    assert not engine.note_weights()  # one checksum per tensor is incomplete evidence for fused tensors
    assert sorted(engine.unchanged_weights()) == sorted(served.workers.model.state_dict())
    own = {name: tensor.clone() for name, tensor in trainer_model.state_dict_adapter.iter_export(trainer_model)}
    kept = ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight"]
    now = served.workers.model.state_dict()
    engine.refit([(name, now[name].clone() if name in kept else tensor + 1) for name, tensor in own.items()])
    assert sorted(engine.unchanged_weights()) == sorted(kept)


def test_checksums_of_server_without_route(engine_and_server: tuple[HTTPEngine, Served]) -> None:
    engine, served = engine_and_server
    served.answers["weight_checker"] = (404, {}, b"{}")
    assert not engine.note_weights()
    assert engine.unchanged_weights() == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"success": true}', "checksums"),
        (b'{"checksums": ["1"]}', "checksums"),
        (b'{"checksums": {"tp_rank_0:norm.weight": 1}}', "a checksum"),
        (b"[]", "it"),
    ],
)
def test_invalid_checksums_raise(engine_and_server: tuple[HTTPEngine, Served], answer: bytes, message: str) -> None:
    engine, served = engine_and_server
    served.answers["weight_checker"] = (200, {}, answer)
    with pytest.raises(EngineError, match=message):
        engine._client.checksums()


def test_restarted_server_receives_all_weights(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    engine.refit(exported(trainer_model))
    served.workers.receiver.weights, served.version = None, "default"
    train(served.workers.model, 0.5, torch.Generator().manual_seed(8))
    engine.refit(exported(trainer_model))
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())


def test_restarted_server_raises_until_refit(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    """After a restart, the server computes with the weights of its checkpoint."""
    engine, served = engine_and_server
    calls = (
        lambda: engine.generate([[1, 2]], Sampling(), max_new_tokens=1),
        lambda: engine.score([[1]], Sampling()),
    )
    for call in calls:
        call()  # before the first refit, the server may have any version
    engine.refit(exported(trainer_model))
    for call in calls:
        call()
    served.workers.receiver.weights, served.version = None, "default"
    for call in calls:
        with pytest.raises(
            EngineError, match=r"has version 'default' of the weights, and this engine sent version '1-"
        ):
            call()
    engine.refit(exported(trainer_model))
    for call in calls:
        call()


def test_refits_of_two_trainers_do_not_mix(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    engine.refit(exported(trainer_model))
    other = copy.deepcopy(trainer_model)
    train(other, 0.01, torch.Generator().manual_seed(3))
    HTTPEngine(engine.address, api_key="s3cret").refit(exported(other))  # this trainer's first refit
    with pytest.raises(EngineError, match="received weights from another trainer"):
        engine.score([[1]], Sampling())
    train(trainer_model, 0.01, torch.Generator().manual_seed(4))
    engine.refit(exported(trainer_model))  # all weights, because the server's are not the base of its changes
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())


ANSWERS = {
    "an error": ((500, {}, b'{"error": {"message": "s3cret: it broke"}}'), "answered 500 to"),
    "a redirection": ((307, {"Location": "http://127.0.0.1:1/"}, b""), "Redirects are not followed"),
    "no JSON": ((200, {}, b"<html>"), "something that is not JSON"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "after"), [("an error", False), ("a redirection", False), ("an error", True), ("no JSON", True)]
)
@pytest.mark.parametrize("route", ROUTES)
def test_failed_request_leaves_consistent_weights_or_raises(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served], route: str, answer: str, after: bool
) -> None:
    """Each request in turn fails before it runs, or its response is lost afterwards."""
    engine, served = engine_and_server
    if route != "init_weight_transfer_engine":  # this request is sent only once
        engine.refit(exported(trainer_model))
    before = {name: tensor.clone() for name, tensor in served.workers.model.state_dict().items()}
    train(trainer_model, 0.01, torch.Generator().manual_seed(0))
    (served.answers[route], message), served.after = ANSWERS[answer], after
    with pytest.raises(EngineError, match=message) as caught:
        engine.refit(exported(trainer_model))
    assert "s3cret" not in str(caught.value)
    served.answers = {}
    now = served.workers.model.state_dict()
    took_effect = route in ("reset_prefix_cache", "resume") or (route == "finish_weight_update" and after)
    assert not different_tensors(now, trainer_model.state_dict() if took_effect else before)
    is_mixed = route == "finish_weight_update" or took_effect
    if is_mixed:
        assert isinstance(caught.value, MixedWeightsError)
        with pytest.raises(MixedWeightsError, match="raises on every call until"):
            engine.score([[1, 2, 3]], Sampling())
    elif route not in ("weight_info", "pause"):
        assert not served.is_paused
    train(trainer_model, 0.01, torch.Generator().manual_seed(1))
    engine.refit(exported(trainer_model))
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())
    assert not served.is_paused


def test_failed_prefix_cache_reset_raises(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.answers["reset_prefix_cache"] = 200, {}, b'{"success": false}'
    with pytest.raises(EngineError, match="success of /reset_prefix_cache is False, expected True"):
        engine.refit(exported(trainer_model))
    assert served.is_paused


def test_server_with_wrong_version_raises(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.answers["weight_info"] = 200, {}, b'{"weight_version": "7"}'
    with pytest.raises(EngineError, match="the version after a refit is '7', expected '1-"):
        engine.refit(exported(trainer_model))


def test_server_without_refit_routes_raises(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.answers["weight_info"] = 404, {}, b'{"detail": "Not Found"}'
    with pytest.raises(RefitUnsupportedError, match=r"VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"):
        engine.refit(exported(trainer_model))
    assert not served.is_paused


def test_refit_with_non_finite_weights_is_not_sent(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    engine.refit(exported(trainer_model))
    before = {name: tensor.clone() for name, tensor in served.workers.model.state_dict().items()}
    with torch.no_grad():
        trainer_model.model.norm.weight[3] = float("nan")
    with pytest.raises(EngineError, match=r"model\.norm\.weight has 1 NaN and 0 infinite values") as raised:
        engine.refit(exported(trainer_model))
    assert not isinstance(raised.value, MixedWeightsError)
    assert not served.is_paused
    assert not different_tensors(served.workers.model.state_dict(), before)
    with torch.no_grad():
        trainer_model.model.norm.weight[3] = 1.0
    engine.refit(exported(trainer_model))
    assert not different_tensors(served.workers.model.state_dict(), trainer_model.state_dict())


def test_long_server_error_shows_cause(
    trainer_model: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    frames = "".join(f"  File worker.py, line {line}\n" for line in range(200))
    message = json.dumps({"error": {"message": f"Traceback s3cret\n{frames}ValueError: lm_head.weight is the cause"}})
    served.answers["start_weight_update"] = 500, {}, message.encode()
    with pytest.raises(EngineError, match=r"ValueError: lm_head\.weight is the cause") as raised:
        engine.refit(exported(trainer_model))
    assert "s3cret" not in str(raised.value)
    assert len(str(raised.value)) < 4000
