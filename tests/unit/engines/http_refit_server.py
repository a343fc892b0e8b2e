"""A server with vLLM's routes for new weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from test_transfer import Workers
from test_transfer import train as train_bits
from transformers import PreTrainedModel

from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.http import HTTPEngine

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
