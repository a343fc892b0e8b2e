"""Requests to a completions server over HTTP, limited in time and in size of the answer, and checks of its answers."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from nrl_models.common.trust.servers import hidden, server_address, shown_argument
from nrl_models.engines.answers import Checked
from nrl_models.errors import EngineError, EngineUnavailableError

TIMEOUT = 600.0
"""Timeout in seconds. Long enough for a batch of long prompts."""

ANSWER_BYTES = 2**24
"""Maximum size of an answer, in addition to `BYTES_PER_TOKEN` for each token."""

CONNECTIONS = 128
"""Maximum number of requests at the same time. Others wait."""

COMPLETIONS = "/v1/completions"

BYTES_PER_TOKEN = 2**10
"""Maximum size of a token in an answer. Its id, text and log-probability need a few hundred bytes."""


@cache
def _tls() -> ssl.SSLContext:
    """Return certificates for requests without https, of which only a proxy may use them.

    Reading them takes longer than most requests to a server on this machine, so it happens once.
    """
    return httpx2.create_ssl_context()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Status, redirect location and body of a response."""

    status: int
    location: str
    body: bytes


class ServerConnection:
    """Requests to a server, and checks of its answers.

    The API key is only sent to the given address, because redirects are not followed. A request fails if the complete
    answer does not arrive within the timeout, or if the answer is larger than the requested tokens can need.

    Args:
        address: Address of the server, `http://host:port`, with or without `/v1`.
        api_key: API key of the server, if it needs one.
        timeout: Seconds from a request to the last byte of its answer.
        vocabulary: Number of token ids, if it is known.

    Attributes:
        checked: Validates fields of the answers.

    Raises:
        EngineError: If the address or the key is invalid.
    """

    def __init__(self, address: str, api_key: str | None, timeout: float, vocabulary: int | None) -> None:
        self.address = server_address(address)
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise EngineError(
                "api_key (not shown here): expected text that a header can have; quote it if it is a number"
            )
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.timeout = float(timeout)
        self.checked = Checked(self.address, vocabulary, (api_key,) if api_key else ())

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, tokens: int = 0) -> dict[str, Any]:
        """Send a request and return the JSON object of the answer.

        Args:
            method: HTTP method.
            path: Path of the route.
            body: JSON object to send.
            tokens: Number of tokens in the answer, which determines its maximum size.

        Raises:
            EngineUnavailableError: If the server cannot be reached.
            EngineError: If it does not answer in time, answers too much, or answers with an error or something else.
        """
        return self._content(path, self.send(method, path, body, tokens))

    def _content(self, path: str, answer: _Answer) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises `EngineError` for an error or any other content."""
        check = self.checked
        text = answer.body.decode(errors="replace")
        if 300 <= answer.status < 400:
            location = shown_argument(hidden(answer.location, check.secrets))
            raise check.error(
                f"redirects {path} to {location!r}. Redirects are not followed, because the API key would be sent "
                "there: use the final address"
            )
        if answer.status >= 400:
            raise EngineError(
                *_lines(hidden(f"{check.engine_name} answered {answer.status} to {path}: {text}", check.secrets))
            )
        try:
            return check.mapping(json.loads(text, parse_constant=_no_json), "it")
        except (ValueError, RecursionError) as error:
            shown = hidden(text, check.secrets)[:200]
            raise check.error(f"answered {path} with something that is not JSON: {shown!r}") from error

    def send(self, method: str, path: str, body: dict[str, Any] | None, tokens: int = 0) -> _Answer:
        """Send a request and return the answer with any status."""
        return self._send_all(method, path, [body], tokens)[0]

    def _send_all(
        self, method: str, path: str, bodies: Sequence[dict[str, Any] | None], tokens: int = 0
    ) -> list[_Answer]:
        """Send requests at the same time, and return the answers in order, with any status.

        The first request that fails or has no complete answer cancels the others.
        """
        check, limit = self.checked, ANSWER_BYTES + BYTES_PER_TOKEN * tokens
        contents = [None if body is None else json.dumps(body).encode() for body in bodies]
        try:
            # In a separate thread, because the caller may run in an event loop, as notebooks do.
            with start_blocking_portal() as portal:
                return portal.call(self._ask_all, method, path, contents, limit)
        except TimeoutError as error:
            raise EngineError(
                f"{self.address} did not answer within {self.timeout:g} s. Use shorter or fewer sequences, or a longer "
                "timeout (--engine-option timeout=SECONDS)."
            ) from error
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            message = str(error) or type(error).__name__
            text = f"cannot be reached, or has died: {message}. Is the server running?"
            raise EngineUnavailableError(str(check.error(text))) from error

    async def _ask_all(self, method: str, path: str, contents: Sequence[bytes | None], limit: int) -> list[_Answer]:
        """Send requests and return the answers. The timeout covers everything up to the last byte of all."""
        answers: dict[int, _Answer] = {}
        errors: list[Exception] = []
        limits = httpx2.Limits(max_connections=CONNECTIONS)
        verify = _tls() if self.address.startswith("http://") else httpx2.create_ssl_context()
        with anyio.fail_after(self.timeout):
            async with (
                httpx2.AsyncClient(timeout=None, follow_redirects=False, limits=limits, verify=verify) as client,
                anyio.create_task_group() as tasks,
            ):

                async def ask(number: int, content: bytes | None) -> None:
                    try:
                        answers[number] = await self._ask(client, method, path, content, limit)
                    except Exception as error:
                        errors.append(error)
                        tasks.cancel_scope.cancel()

                for number, content in enumerate(contents):
                    tasks.start_soon(ask, number, content)
        if errors:
            raise errors[0]
        return [answers[number] for number in range(len(contents))]

    async def _ask(
        self, client: httpx2.AsyncClient, method: str, path: str, content: bytes | None, limit: int
    ) -> _Answer:
        """Send a request and return the answer."""
        async with client.stream(method, self.address + path, content=content, headers=self._headers) as answer:
            body = bytearray()
            async for piece in answer.aiter_raw():  # never unpacked, so that a few bytes cannot become many
                body += piece
                if len(body) > limit:
                    raise EngineError(
                        f"{self.address}{path} answered with more than {limit:,} bytes, more than the request can "
                        "need: it is not a completions server, or it is broken"
                    )
            return _Answer(answer.status_code, answer.headers.get("location", ""), bytes(body))

    def served_models(self) -> dict[str, int | None]:
        """Return the served models by name, each with its maximum length if the server reports it."""
        check, served = self.checked, {}
        for number, model in enumerate(check.listed(self.request("GET", "/v1/models").get("data"), "data")):
            entry = check.mapping(model, f"data[{number}]")
            limit = entry.get("max_model_len")
            served[check.text(entry.get("id"), f"data[{number}].id")] = (
                None if limit is None else check.whole(limit, f"data[{number}].max_model_len", 1)
            )
        return served

    def complete(self, body: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
        """Request completions for `body`'s prompts, and return them in the same order.

        Args:
            body: The request.
            tokens: Number of tokens in the answer, which determines its maximum size.
        """
        return self._choices(self.request("POST", COMPLETIONS, body, tokens), len(body["prompt"]))

    def complete_each(self, bodies: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
        """Send requests with one prompt each at the same time, and return their completions in order.

        Args:
            bodies: The requests.
            tokens: Maximum number of tokens in one answer.
        """
        answers = [self._content(COMPLETIONS, answer) for answer in self._send_all("POST", COMPLETIONS, bodies, tokens)]
        return [choice for answer in answers for choice in self._choices(answer, 1)]

    def _choices(self, answer: dict[str, Any], expected: int) -> list[dict[str, Any]]:
        """Return the completions of an answer in the order of the prompts."""
        check = self.checked
        listed = check.listed(answer.get("choices"), "choices")
        choices = [check.mapping(choice, f"choices[{number}]") for number, choice in enumerate(listed)]
        if len(choices) != expected:
            raise EngineError(f"{self.address} answered {len(choices)} of {expected} prompts")
        places = {
            check.whole(choice.get("index", number), f"choices[{number}].index", 0, expected): choice
            for number, choice in enumerate(choices)
        }
        if len(places) != expected:
            raise EngineError(f"{self.address} answered some of {expected} prompts twice, others not")
        return [places[number] for number in range(expected)]

    def token_ids(self, choice: dict[str, Any], at: str) -> tuple[int, ...]:
        """Return the ids of the sampled tokens."""
        if choice.get("token_ids") is not None:
            return self.checked.token_ids(choice["token_ids"], f"{at}.token_ids")
        names = self._logprobs(choice, at).get("tokens") or []
        ids = self.checked.named_token_ids(names, f"{at}.logprobs.tokens")
        if ids is None:
            raise EngineError(
                f"{self.address} returns tokens as text only, but text does not determine tokens: it has to support "
                "`return_token_ids` or `return_tokens_as_token_ids`, as vLLM's does"
            )
        return ids

    def token_logprobs(self, choice: dict[str, Any], at: str) -> tuple[float, ...] | None:
        """Return log-probabilities from a server's list; None if there are none."""
        values = self._logprobs(choice, at).get("token_logprobs")
        return None if values is None else self.checked.logprobs(values, f"{at}.logprobs.token_logprobs")

    def _logprobs(self, choice: dict[str, Any], at: str) -> dict[str, Any]:
        logprobs = choice.get("logprobs")
        return {} if logprobs is None else self.checked.mapping(logprobs, f"{at}.logprobs")


def _lines(text: str) -> list[str]:
    """Return the first and the last line of a server's error, because a traceback has its cause in the last line.

    Line breaks are escaped, because the error is in a JSON string.
    """
    lines = [line for line in text.replace("\\n", "\n").splitlines() if line.strip()]
    return lines if len(lines) <= 40 else [*lines[:10], f"... ({len(lines) - 40} lines)", *lines[-30:]]


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
