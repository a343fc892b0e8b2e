"""Malicious or broken servers raise EngineError, and errors do not contain secrets."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.matrix import check_consistency
from nrl_models.engines import http_connection, start_engine
from nrl_models.engines.http import HTTPEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling

KEY = 'sk-"hunter2"/1\\2'
"""An API key with characters that JSON and URLs escape."""


class Raw:
    """A server with configurable responses.

    Attributes:
        address: The server's address.
        models, completions: The two responses, as JSON or text.
        act: Replaces both responses: writes to the handler.
        seen: Path and headers of each request.
    """

    def __init__(self) -> None:
        self.address = ""
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.completions: Any = {}
        self.act: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.seen: list[tuple[str, dict[str, str]]] = []

    def engine(self, **options: Any) -> HTTPEngine:
        return HTTPEngine(self.address, **{"vocabulary": 512, "timeout": 20.0} | options)


@contextmanager
def raw_server() -> Iterator[Raw]:
    raw = Raw()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(raw.models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(raw.completions)

        def answer(self, content: Any) -> None:
            raw.seen.append((self.path, dict(self.headers)))
            if raw.act is not None and self.command == "POST":
                raw.act(self)
                return
            reply(self, content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # the client has closed the connection
    raw.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield raw
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(handler: BaseHTTPRequestHandler, content: Any, status: int = 200, **headers: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(text.encode()))} | headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(text.encode())


@pytest.fixture
def raw() -> Iterator[Raw]:
    with raw_server() as server:
        yield server


def generate(engine: HTTPEngine, count: int = 1) -> list[tuple[int, ...]]:
    samples = engine.generate([[5, 6]] * count, Sampling(0.0 if count > 1 else 1.0), max_new_tokens=2)
    return [sample.tokens for sample in samples]


def completion(**changes: Any) -> dict[str, Any]:
    """Return a response to `generate` with some fields changed."""
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}
    return {"index": 0, "token_ids": [7, 8], "finish_reason": "length", "logprobs": logprobs} | changes


def traceback_text(error: BaseException) -> str:
    """Return the complete traceback of the error as text."""
    return "".join(traceback.format_exception(error))


# Where the API key is sent


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_api_key_is_not_sent_to_redirect_target(raw: Raw, status: int) -> None:
    with raw_server() as other:
        engine = raw.engine(api_key=KEY)
        raw.act = lambda handler: reply(
            handler, "", status, Location=f"http://me:hunter2@{other.address[7:]}/x?k={KEY}"
        )
        with pytest.raises(EngineError, match=r"redirects /v1/completions to .*are not followed") as caught:
            generate(engine)
        assert not other.seen
    assert raw.seen[-1][1]["Authorization"] == f"Bearer {KEY}"
    assert "hunter2" not in traceback_text(caught.value)
    assert KEY not in traceback_text(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd#",
        "ftp://127.0.0.1",
        "http://",
        "http:///v1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://127.0.0.1/v1?key=1",
        "http://127.0.0.1/#",
        "http://127.0.0.1/\nv1",
        "http://127.0.0.1 evil",
        "http://a\\b",
        "127.0.0.1:80",
    ],
)
def test_invalid_address_raises(address: str) -> None:
    with pytest.raises(EngineError, match="not a server's address: expected http://HOST:PORT"):
        HTTPEngine(address)


@pytest.mark.parametrize("address", ["http://me:hunter2@127.0.0.1:9", "https://me:hunter2/x@y", "htp://me:hunter2@x"])
def test_password_in_address_raises_and_is_hidden(address: str, checkpoint: Path, tmp_path: Path) -> None:
    for call in (
        lambda: start_engine(address, checkpoint),
        lambda: check_consistency(checkpoint, engine=address, out=tmp_path / "out"),
    ):
        with pytest.raises(EngineError, match=r"contains a user and a password|unknown engine: expected") as caught:
            call()
        assert "hunter2" not in traceback_text(caught.value)
    result = CliRunner().invoke(app, ["refit-check", str(checkpoint), "--engine", address])
    assert result.exit_code == 2
    assert "hunter2" not in result.output
    assert not (tmp_path / "out").exists()


def test_api_key_is_not_saved_or_described(raw: Raw, checkpoint: Path, tmp_path: Path) -> None:
    assert KEY not in str(raw.engine(api_key=KEY).describe())
    raw.completions = {"error": KEY}
    options = {"api_key": KEY, "timeout": 20.0}
    settings = Settings(lengths=(16,), batches=(1,), data=("dummy",), modes=("greedy",), new_tokens=2)
    report = check_consistency(
        checkpoint, engine=raw.address, settings=settings, out=tmp_path / "out", engine_options=options
    )
    assert "choices is None, expected a list" in report.error
    saved_texts = [file.read_text(errors="replace") for file in (tmp_path / "out").iterdir()]
    assert any('"timeout": "20.0"' in text for text in saved_texts)
    assert not any("hunter2" in text for text in saved_texts)


@pytest.mark.parametrize("key", [5, "a\nb: c", "ключ"])
def test_api_key_invalid_in_header_raises_and_is_hidden(key: Any) -> None:
    with pytest.raises(EngineError, match="api_key") as caught:
        HTTPEngine("http://127.0.0.1:9", api_key=key)
    assert str(key) not in str(caught.value)


RESPONSES_WITH_KEY: dict[str, Callable[[Any], None]] = {
    "an error page": lambda handler: reply(handler, f"<h1>{KEY}</h1>" * 30, 500),
    "a page that is cut in the key": lambda handler: reply(handler, "x" * 395 + KEY, 403),
    "an error in JSON": lambda handler: reply(handler, {"error": {"sent": f"Bearer {KEY}"}}, 401),
    "no JSON": lambda handler: reply(handler, f"Bearer {KEY}"),
    "a field": lambda handler: reply(handler, {"choices": KEY}),
    "a long field": lambda handler: reply(handler, {"choices": [completion(finish_reason="\n" * 35 + KEY)]}),
}


@pytest.mark.parametrize("response", RESPONSES_WITH_KEY.values(), ids=RESPONSES_WITH_KEY)
def test_api_key_echoed_by_server_is_hidden(raw: Raw, response: Callable[[Any], None]) -> None:
    engine = raw.engine(api_key=KEY)
    raw.act = response
    with pytest.raises(EngineError) as caught:
        generate(engine)
    assert "hunter2" not in traceback_text(caught.value)
    assert "sk-" not in traceback_text(caught.value)


def test_api_key_option_is_parsed_as_text() -> None:
    from nrl_models.cli.arguments import engine_option

    assert engine_option("api_key=1e5").value == "1e5"
    assert engine_option("timeout=1e5").value == 1e5


# Time limits and size limits of responses


def drip(handler: Any, text: bytes) -> None:
    with suppress(OSError):  # the client has closed the connection
        for letter in text:
            handler.wfile.write(bytes([letter]))
            handler.wfile.flush()
            time.sleep(0.05)


@pytest.mark.parametrize("slow_part", ["headers", "body"])
def test_timeout_applies_to_complete_response(raw: Raw, slow_part: str) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        if slow_part == "body":
            handler.send_response(200)
            handler.send_header("Content-Length", "500")
            handler.end_headers()
        drip(handler, b"HTTP/1.1 200 OK\r\n" + b"X-Filler: x\r\n" * 40)

    engine = raw.engine(timeout=0.6)
    raw.act = slowly
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer within 0.6 s.*timeout=SECONDS"):
        generate(engine)
    assert time.monotonic() - started < 8  # a slow response takes 25 s; creating a client may take one


def test_endless_response_raises(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "ANSWER_BYTES", 2**20)
    engine, sent = raw.engine(), []

    def endlessly(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while sum(sent) < 2**28:
                sent.append(handler.wfile.write(b" " * 2**16))

    raw.act = endlessly
    with pytest.raises(EngineError, match=r"more than 1,052,672 bytes"):
        generate(engine)
    assert sum(sent) < 2**26


def test_response_is_not_decompressed(raw: Raw) -> None:
    engine = raw.engine()
    raw.act = lambda handler: reply(handler, {"choices": [completion()]}, **{"Content-Encoding": "gzip"})
    assert generate(engine) == [(7, 8)]
    assert raw.seen[-1][1]["Accept-Encoding"] == "identity"


def test_engine_call_in_event_loop(raw: Raw) -> None:
    raw.completions = {"choices": [completion()]}

    async def generate_in_event_loop() -> list[tuple[int, ...]]:
        return generate(raw.engine())

    assert asyncio.run(generate_in_event_loop()) == [(7, 8)]


# Fields of responses


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (None, "it is None, expected an object"),
        ([], "it is a list, expected an object"),
        (3, "it is 3, expected an object"),
        ({}, "data is None, expected a list"),
        ({"data": {"id": "tiny"}}, "data is a dict, expected a list"),
        ({"data": ["tiny"]}, r"data\[0\] is 'tiny', expected an object"),
        ({"data": [{"object": "model"}]}, r"data\[0\].id is None, expected a name"),
        ({"data": [{"id": 5}]}, r"data\[0\].id is 5, expected a name"),
        ({"data": [{"id": "\x1b[31m"}]}, r"data\[0\].id is '\\x1b\[31m', expected a name"),
        ({"data": [{"id": "tiny", "max_model_len": 4.5}]}, r"max_model_len is 4.5, expected a whole number from 1"),
        ({"data": [{"id": "tiny", "max_model_len": -1}]}, "max_model_len is -1, expected a whole number from 1"),
        ("[" * 100_000, "not JSON"),
        ('{"data": NaN}', "not JSON"),
        ("\xff", "not JSON"),
    ],
)
def test_invalid_models_response_raises(raw: Raw, models: Any, message: str) -> None:
    raw.models = "null" if models is None else models
    with pytest.raises(EngineError, match=message):
        raw.engine()


def listing(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"tokens": ["a", "b"], "token_logprobs": list(values)}}


FIELDS: list[tuple[Any, str]] = [
    ("null", "it is None, expected an object"),
    ([], "it is a list, expected an object"),
    ("7", "it is 7, expected an object"),
    ({}, "choices is None, expected a list"),
    ({"choices": [None]}, r"choices\[0\] is None, expected an object"),
    ({"choices": []}, "answered 0 of 1 prompts"),
    ({"choices": [completion(), completion()]}, "answered 2 of 1 prompts"),
    ({"choices": [completion(index=1)]}, r"choices\[0\].index is 1, expected a whole number from 0 to 0"),
    ({"choices": [completion(index=None)]}, "index is None"),
    *(
        ({"choices": [completion(token_ids=[7, token])]}, r"choices\[0\].token_ids\[1\] is .*from 0 to 511")
        for token in (4.7, -4, 400_000, True, "8", None, [8], 10**400)
    ),
    ({"choices": [completion(token_ids=7)]}, "token_ids is 7, expected a list"),
    (
        {"choices": [completion(token_ids=[7, 8, 9]) | listing(-1, -1, -1)]},
        "generated 3 tokens, but max_new_tokens is 2",
    ),
    ({"choices": [completion(token_ids=None)]}, "tokens as text only"),
    (
        {"choices": [completion(token_ids=None, logprobs={"tokens": ["token_id:7", "token_id:900"]})]},
        r"logprobs.tokens\[1\] is 900, expected a whole number from 0 to 511",
    ),
    ({"choices": [completion(logprobs=[-1.0, -2.0])]}, "logprobs is a list, expected an object"),
    ({"choices": [completion(logprobs={"token_logprobs": -1.0})]}, "token_logprobs is -1.0, expected a list"),
    *(
        ({"choices": [completion(**listing(-1.0, value))]}, r"token_logprobs\[1\] is .*expected a log-probability")
        for value in (0.2, 5, "-1", True, [-1], 10**400)
    ),
    (json.dumps({"choices": [completion(**listing(-1.0, math.nan))]}), "NaN"),
    (json.dumps({"choices": [completion(**listing(-1.0, math.inf))]}), "Infinity"),
    (json.dumps({"choices": [completion(**listing(-1.0, 0.5))]}).replace("0.5", "1e999"), "is inf, expected a log"),
    ({"choices": [completion(finish_reason=["length"])]}, "finish_reason is a list, expected a name"),
]


@pytest.mark.long
@pytest.mark.parametrize(("content", "message"), FIELDS, ids=range(len(FIELDS)))
def test_invalid_completions_response_raises(raw: Raw, content: Any, message: str) -> None:
    engine = raw.engine()
    raw.completions = content
    with pytest.raises(EngineError, match=message):
        generate(engine)


@pytest.mark.parametrize(
    ("prompt_logprobs", "message"),
    [
        ([None], r"the length of choices\[0\].prompt_logprobs is 1, expected 2"),
        ({"6": {"logprob": -1.0}}, "prompt_logprobs is a dict, expected a list"),
        ([None, None], r"prompt_logprobs\[1\] is None, expected an object"),
        ([None, {"7": {"logprob": -1.0}}], r"prompt_logprobs\[1\]\[6\] is None, expected an object"),
        ([None, {"6": -1.0}], r"prompt_logprobs\[1\]\[6\] is -1.0, expected an object"),
        ([None, {"6": {"logprob": 3}}], r"prompt_logprobs\[1\]\[6\] is 3, expected a log-probability"),
    ],
)
def test_invalid_prompt_logprobs_raise(raw: Raw, prompt_logprobs: Any, message: str) -> None:
    engine = raw.engine()
    raw.completions = {"choices": [completion(prompt_logprobs=prompt_logprobs)]}
    with pytest.raises(EngineError, match=message):
        engine.score([[5, 6]], Sampling())


def test_completions_are_in_prompt_order(raw: Raw) -> None:
    engine = raw.engine()
    answers = [completion(token_ids=[index, index], index=index) for index in (2, 0, 1)]
    raw.completions = {"choices": answers}
    assert generate(engine, 3) == [(0, 0), (1, 1), (2, 2)]
    answers[0]["index"] = 0
    with pytest.raises(EngineError, match="some of 3 prompts twice"):
        generate(engine, 3)
    for answer in answers:
        del answer["index"]
    assert generate(engine, 3) == [(2, 2), (0, 0), (1, 1)]


def test_nan_and_infinity_in_json_logprobs(raw: Raw) -> None:
    raw.completions = {"choices": [completion(**listing(None, -9999.0))]}
    (sample,) = raw.engine().generate([[5, 6]], Sampling(), max_new_tokens=2)
    assert math.isnan(sample.logprobs[0])
    assert sample.logprobs[1] == -math.inf
