"""A completions server for tests that serves a real model: `HFEngine` behind `http.server`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nrl_models.engines.hf import HFEngine
from nrl_models.logprobs import Sampling

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Served:
    """The server's behavior, which can be changed while it runs.

    Attributes:
        style: `vllm` (token ids, prompt_logprobs) or `openai` (tokens named `token_id:`, echo).
        change: Called on each choice before it is sent.
        delay: Seconds before a response.
        broken: Whether to close the connection instead of responding.
        requests: The requests, in order.
        defaults: Sampling parameters used if a request has none, as vLLM reads from generation_config.json.
        ignored: Sampling parameters of requests that are ignored. The defaults apply.
        reported: Returns the sampling of the reported log-probabilities for that of a request. vLLM's default are those
            from before temperature and truncation.
    """

    def __init__(self, engine: HFEngine, style: str) -> None:
        self.engine, self.style = engine, style
        self.change: Change = lambda choice: choice
        self.delay = 0.0
        self.broken = False
        self.models = ["tiny"]
        self.requests: list[dict[str, Any]] = []
        self.defaults: dict[str, Any] = {}
        self.ignored: tuple[str, ...] = ()
        self.reported: Callable[[Sampling], Sampling] = lambda sampling: sampling

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompts = body["prompt"]
        read = self.defaults | {name: value for name, value in body.items() if name not in self.ignored}
        sampling = Sampling(read.get("temperature", 1.0), read.get("top_k", 0), read.get("top_p", 1.0))
        samples = [
            sample
            for prompt in prompts
            for sample in self.engine.generate(
                [prompt],
                sampling,
                max_new_tokens=body["max_tokens"],
                seed=body.get("seed", 0),  # of every prompt, as in vLLM
                ignore_end=body.get("ignore_eos", False),
            )
        ]
        if (reported := self.reported(sampling)) != sampling:
            rows = self.engine.score([sample.sequence for sample in samples], reported)
            samples = [
                replace(sample, logprobs=tuple(row[len(sample.prompt) :]))
                for sample, row in zip(samples, rows, strict=True)
            ]
        wants_prompt = "prompt_logprobs" in body if self.style == "vllm" else body.get("echo")
        scores = self.engine.score(prompts, Sampling()) if wants_prompt else [None] * len(prompts)
        choices = []
        for index, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            tokens, logprobs = list(sample.tokens), list(sample.logprobs)
            choice: dict[str, Any] = {"index": index, "text": "", "finish_reason": sample.finish_reason}
            if self.style == "vllm":
                choice["token_ids"] = tokens
                if score is not None:
                    places = zip(score[1:], sample.prompt[1:], strict=True)
                    choice["prompt_logprobs"] = [None, *({str(token): {"logprob": place}} for place, token in places)]
            elif score is not None:
                tokens, logprobs = [*sample.prompt, *tokens], [None, *score[1:], *logprobs]
            names = [f"token_id:{token}" for token in tokens]
            choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs}
            choices.append(self.change(choice))
        return {"choices": choices}


@contextmanager
def serving(engine: HFEngine, style: str = "vllm") -> Iterator[tuple[str, Served]]:
    """Serve `engine` within a `with` block. Yields the address and the behavior to change."""
    served = Served(engine, style)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            limit = {"max_model_len": engine.max_length} if style == "vllm" else {}
            self._answer({"data": [{"id": name, **limit} for name in served.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.requests.append(body)
            time.sleep(served.delay)
            if served.broken:
                self.connection.close()
                return
            try:
                self._answer(served.complete(body))
            except Exception as error:
                self._answer({"error": str(error)}, 400)

        def _answer(self, content: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closing waits for delayed answers: they would draw from the next test's generator
    server.handle_error = lambda *_: None  # the client has closed the connection
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
