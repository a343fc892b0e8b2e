"""Refits over HTTP to a server with vLLM's routes for new weights, with a failure in each route."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from test_transfer import Workers, different_tensors, exported, model_of
from test_transfer import train as train_bits
from transformers import PreTrainedModel

from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling

ROUTES = ("weight_info", "pause", "init_weight_transfer_engine", "start_weight_update", "update_weights")
ROUTES += ("finish_weight_update", "reset_prefix_cache", "resume")


@torch.no_grad()
def train(model: PreTrainedModel, share: float, generator: torch.Generator) -> None:
    """Change a fraction of the elements, to values that an engine accepts."""
    train_bits(model, share, generator)
    for tensor in model.state_dict().values():
        tensor.nan_to_num_()


class Served:
    """vLLM's routes for new weights over `Workers`.

    Attributes:
        requested: The requested routes, in order.
        answers: By route, a response `(status, headers, body)` to send instead. If `after`, the request also runs.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers, self.version, self.is_paused = workers, "default", False
        self.requested: list[str] = []
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.after = False

    def do(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route == "models":
            return {"data": [{"id": "tiny"}]}
        if route == "completions":
            choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "prompt_logprobs": [None]}
            return {"choices": [choice]}
        if route == "weight_info":
            return {"weight_version": self.version}
        if route in ("pause", "resume"):
            self.is_paused = route == "pause"
        elif route == "init_weight_transfer_engine":
            self.workers.init_weight_transfer_engine(body["init_info"])
        elif route == "update_weights":
            assert self.is_paused
            self.workers.update_weights(body["update_info"])
        elif route == "finish_weight_update":
            assert self.is_paused
            self.workers.finish_weight_update()
            self.version = body.get("weight_version", self.version)
        elif route == "start_weight_update":
            self.workers.start_weight_update()
        elif route == "weight_checker":
            assert body == {"action": "checksum"}
            weights = self.workers.model.state_dict()
            return {"checksums": {f"tp_rank_0:{name}": tensor_digest(tensor) for name, tensor in weights.items()}}
        return {"success": True}


@contextmanager
def serving(workers: Workers) -> Iterator[tuple[HTTPEngine, Served]]:
    served = Served(workers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            route = self.path.partition("?")[0].rpartition("/")[2]
            served.requested.append(route)
            status, headers, answer = 200, {}, b""
            if route in served.answers:
                status, headers, answer = served.answers[route]
            if route not in served.answers or served.after:
                try:
                    done = json.dumps(served.do(route, json.loads(body or b"{}"))).encode()
                    answer = answer or done
                except Exception as error:
                    status, answer = 500, json.dumps({"error": {"message": str(error)}}).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield HTTPEngine(f"http://127.0.0.1:{server.server_port}", api_key="s3cret", timeout=20), served
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return model_of("LlamaForCausalLM")


@pytest.fixture
def trainer(llama: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(llama)


@pytest.fixture
def engine_and_server(llama: PreTrainedModel) -> Iterator[tuple[HTTPEngine, Served]]:
    engine = copy.deepcopy(llama)
    train(engine, 0.5, torch.Generator().manual_seed(9))
    with serving(Workers(engine)) as engine_and_server:
        yield engine_and_server


def test_refit_requests_routes_in_order(trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]) -> None:
    engine, served = engine_and_server
    served.requested.clear()
    report = engine.refit(exported(trainer))
    assert served.requested == [*ROUTES[:-2], "weight_info", *ROUTES[-2:]]
    assert (report.version, served.version.partition("-")[0], served.is_paused) == (1, "1", False)
    assert not different_tensors(served.workers.model.state_dict(), trainer.state_dict())
    train(trainer, 0.01, torch.Generator().manual_seed(0))
    engine.refit(exported(trainer))
    assert served.workers.receiver.weights.version == served.version
    assert served.version.startswith("2-")
    assert len(served.workers.loaded) > 5
    assert not different_tensors(served.workers.model.state_dict(), trainer.state_dict())


def test_unchanged_weights_of_server(trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]) -> None:
    engine, served = engine_and_server
    assert engine.unchanged_weights() == []  # nothing was noted
    assert not engine.note_weights()  # one checksum per tensor is incomplete evidence for fused tensors
    assert sorted(engine.unchanged_weights()) == sorted(served.workers.model.state_dict())
    own = {name: tensor.clone() for name, tensor in trainer.state_dict_adapter.iter_export(trainer)}
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
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    engine.refit(exported(trainer))
    served.workers.receiver.weights, served.version = None, "default"
    train(served.workers.model, 0.5, torch.Generator().manual_seed(8))
    engine.refit(exported(trainer))
    assert not different_tensors(served.workers.model.state_dict(), trainer.state_dict())


def test_restarted_server_raises_until_refit(
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    """After a restart, the server computes with the weights of its checkpoint."""
    engine, served = engine_and_server
    calls = (
        lambda: engine.generate([[1, 2]], Sampling(), max_new_tokens=1),
        lambda: engine.score([[1]], Sampling()),
    )
    for call in calls:
        call()  # before the first refit, the server may have any version
    engine.refit(exported(trainer))
    for call in calls:
        call()
    served.workers.receiver.weights, served.version = None, "default"
    for call in calls:
        with pytest.raises(
            EngineError, match=r"has version 'default' of the weights, and this engine sent version '1-"
        ):
            call()
    engine.refit(exported(trainer))
    for call in calls:
        call()


def test_refits_of_two_trainers_do_not_mix(
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    engine.refit(exported(trainer))
    other = copy.deepcopy(trainer)
    train(other, 0.01, torch.Generator().manual_seed(3))
    HTTPEngine(engine.address, api_key="s3cret").refit(exported(other))  # this trainer's first refit
    with pytest.raises(EngineError, match="received weights from another trainer"):
        engine.score([[1]], Sampling())
    train(trainer, 0.01, torch.Generator().manual_seed(4))
    engine.refit(exported(trainer))  # all weights, because the server's are not the base of its changes
    assert not different_tensors(served.workers.model.state_dict(), trainer.state_dict())


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
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served], route: str, answer: str, after: bool
) -> None:
    """Each request in turn fails before it runs, or its response is lost afterwards."""
    engine, served = engine_and_server
    if route != "init_weight_transfer_engine":  # this request is sent only once
        engine.refit(exported(trainer))
    before = {name: tensor.clone() for name, tensor in served.workers.model.state_dict().items()}
    train(trainer, 0.01, torch.Generator().manual_seed(0))
    (served.answers[route], message), served.after = ANSWERS[answer], after
    with pytest.raises(EngineError, match=message) as caught:
        engine.refit(exported(trainer))
    assert "s3cret" not in str(caught.value)
    served.answers = {}
    now = served.workers.model.state_dict()
    took_effect = route in ("reset_prefix_cache", "resume") or (route == "finish_weight_update" and after)
    assert not different_tensors(now, trainer.state_dict() if took_effect else before)
    is_mixed = route == "finish_weight_update" or took_effect
    if is_mixed:
        assert isinstance(caught.value, MixedWeightsError)
        with pytest.raises(MixedWeightsError, match="raises on every call until"):
            engine.score([[1, 2, 3]], Sampling())
    elif route not in ("weight_info", "pause"):
        assert not served.is_paused
    train(trainer, 0.01, torch.Generator().manual_seed(1))
    engine.refit(exported(trainer))
    assert not different_tensors(served.workers.model.state_dict(), trainer.state_dict())
    assert not served.is_paused


def test_failed_prefix_cache_reset_raises(
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.answers["reset_prefix_cache"] = 200, {}, b'{"success": false}'
    with pytest.raises(EngineError, match="success of /reset_prefix_cache is False, expected True"):
        engine.refit(exported(trainer))
    assert served.is_paused


def test_server_with_wrong_version_raises(
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.answers["weight_info"] = 200, {}, b'{"weight_version": "7"}'
    with pytest.raises(EngineError, match="the version after a refit is '7', expected '1-"):
        engine.refit(exported(trainer))


def test_server_without_refit_routes_raises(
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    served.answers["weight_info"] = 404, {}, b'{"detail": "Not Found"}'
    with pytest.raises(EngineError, match=r"VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"):
        engine.refit(exported(trainer))
    assert not served.is_paused


def test_refit_with_non_finite_weights_is_not_sent(
    trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]
) -> None:
    engine, served = engine_and_server
    engine.refit(exported(trainer))
    before = {name: tensor.clone() for name, tensor in served.workers.model.state_dict().items()}
    with torch.no_grad():
        trainer.model.norm.weight[3] = float("nan")
    with pytest.raises(EngineError, match=r"model\.norm\.weight has 1 NaN and 0 infinite values") as raised:
        engine.refit(exported(trainer))
    assert not isinstance(raised.value, MixedWeightsError)
    assert not served.is_paused
    assert not different_tensors(served.workers.model.state_dict(), before)
    with torch.no_grad():
        trainer.model.norm.weight[3] = 1.0
    engine.refit(exported(trainer))
    assert not different_tensors(served.workers.model.state_dict(), trainer.state_dict())


def test_long_server_error_shows_cause(trainer: PreTrainedModel, engine_and_server: tuple[HTTPEngine, Served]) -> None:
    engine, served = engine_and_server
    frames = "".join(f"  File worker.py, line {line}\n" for line in range(200))
    message = json.dumps({"error": {"message": f"Traceback s3cret\n{frames}ValueError: lm_head.weight is the cause"}})
    served.answers["start_weight_update"] = 500, {}, message.encode()
    with pytest.raises(EngineError, match=r"ValueError: lm_head\.weight is the cause") as raised:
        engine.refit(exported(trainer))
    assert "s3cret" not in str(raised.value)
    assert len(str(raised.value)) < 4000
