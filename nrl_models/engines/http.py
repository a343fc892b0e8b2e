"""A server as an engine: OpenAI's completions interface with token ids, as vLLM and others offer it.

The server has to answer `POST /v1/completions` with token ids as `prompt`, and give log-probabilities (`logprobs`) and
the ids of sampled tokens (vLLM: `return_token_ids`, or `return_tokens_as_token_ids`); text does not determine tokens.
To score given tokens it needs `prompt_logprobs` (vLLM) or `echo` (OpenAI's old interface).
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.engines.base import Capabilities, Engine, Sample, Tokens, require_lengths, require_number
from nrl_models.errors import EngineError
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.sampling import Sampling

TIMEOUT = 600.0
"""Seconds to wait for an answer: a batch of long prompts takes its time."""


class HTTPEngine(Engine):
    """A running server.

    Args:
        address: of the server, `http://host:port`, with or without `/v1`.
        model: the name it serves the model under; by default the only one it serves.
        api_key: its key, if it needs one.
        timeout: seconds to wait for an answer.
        vocabulary: number of token ids, which a server does not report.
        max_length: tokens of a sequence at most; by default what the server reports.
        dtype: what it computes in, which a server does not report.

    Raises:
        EngineError: no server answers there, or it serves no such model.
    """

    name = "http"

    def __init__(
        self,
        address: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = TIMEOUT,
        vocabulary: int | None = None,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        self.headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.timeout = float(timeout)
        served = {entry["id"]: entry for entry in self._request("GET", "/v1/models").get("data", [])}
        if model is None and len(served) == 1:
            model = next(iter(served))
        if model not in served:
            raise EngineError(
                f"{self.address} serves {', '.join(served) or 'no model'}; "
                + (f"{model!r} is not among them" if model else "say which with --engine-option model=NAME")
            )
        self.model = model
        self.max_length = max_length or served[model].get("max_model_len")
        self.vocabulary, self.dtype = vocabulary, dtype

    @classmethod
    def start(
        cls,
        path: str | Path,
        *,
        address: str,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        load_format: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> HTTPEngine:
        """Connect to a server that serves the checkpoint in `path`.

        `load_format` and `seed` are ignored: they were chosen where the server was started, as `dtype` was, which says
        what it was.
        """
        vocabulary = getattr(read_config(resolve_folder(path)).get_text_config(), "vocab_size", None)
        unknown = options.keys() - {"model", "api_key", "timeout"}
        if unknown:
            raise EngineError(f"a server does not take {', '.join(sorted(unknown))}: expected model, api_key, timeout")
        require_number("max_length", max_length, int)
        require_number("timeout", options.get("timeout"), int, float)
        return cls(address, vocabulary=vocabulary, max_length=max_length, dtype=dtype, **options)

    def capabilities(self) -> Capabilities:
        """Generation, and scores at temperature 1; nothing that needs access to the process."""
        return Capabilities(
            processed_scores=False,
            max_length=self.max_length,
            own_limit=self.max_length is not None,
            vocabulary=self.vocabulary,
            dtype=self.dtype,
        )

    def describe(self) -> dict[str, Any]:
        """Address and model."""
        return {"engine": self.name, "address": self.address, "model": self.model, "max_model_len": self.max_length}

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        """All prompts are sent in one request."""
        body: dict[str, Any] = {
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "seed": seed,
        }
        body |= {"top_p": sampling.top_p} if sampling.top_p < 1.0 else {}
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"ignore_eos": True} if ignore_end else {}
        samples = []
        for prompt, choice in zip(prompts, self._complete(body, len(prompts)), strict=True):
            tokens = _token_ids(choice)
            logprobs = _token_logprobs(choice)
            if logprobs is None or len(logprobs) != len(tokens):
                raise EngineError(
                    f"{self.address} gave {0 if logprobs is None else len(logprobs)} log-probabilities for "
                    f"{len(tokens)} sampled tokens: it has to support `logprobs` in /v1/completions"
                )
            samples.append(Sample(tuple(prompt), tokens, logprobs, str(choice.get("finish_reason"))))
        return samples

    def score(self, sequences: Sequence[Tokens], sampling: Sampling, *, last: int | None = None) -> list[list[float]]:
        """See `Engine.score`: with `prompt_logprobs` if the server gives them, else with `echo`."""
        if not sampling.is_identity:
            raise EngineError(f"{self.address} scores given tokens at temperature 1 only, not at {sampling}")
        require_lengths(self, sequences, 1)
        body = {"prompt": [list(tokens) for tokens in sequences], "temperature": 0.0, "max_tokens": 1}
        choices = self._complete(body | {"prompt_logprobs": 0}, len(sequences))
        if all(choice.get("prompt_logprobs") for choice in choices):
            return [
                _of_prompt(choice["prompt_logprobs"], tokens) for choice, tokens in zip(choices, sequences, strict=True)
            ]
        choices = self._complete(body | {"echo": True, "logprobs": 0}, len(sequences))
        results = []
        for choice, tokens in zip(choices, sequences, strict=True):
            found = _token_logprobs(choice)
            if found is None or len(found) < len(tokens):
                raise EngineError(
                    f"{self.address} gives no log-probabilities of given tokens: it supports neither `prompt_logprobs` "
                    "nor `echo` with `logprobs` in /v1/completions"
                )
            results.append([math.nan, *found[1 : len(tokens)]])
        return results

    def _complete(self, body: dict[str, Any], expected: int) -> list[dict[str, Any]]:
        answer = self._request("POST", "/v1/completions", {"model": self.model} | body)
        choices = sorted(answer.get("choices", []), key=lambda choice: choice.get("index", 0))
        if len(choices) != expected:
            raise EngineError(f"{self.address} answered {len(choices)} of {expected} prompts")
        return choices

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, content, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            with error:  # it holds the connection
                text = error.read().decode(errors="replace")[:400]
            raise EngineError(f"{self.address}{path} answered {error.code} {error.reason}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):  # while connecting, or while reading
                raise EngineError(
                    f"{self.address} gave no answer within {self.timeout:g} s. Shorter or fewer sequences, or a longer "
                    "wait (--engine-option timeout=SECONDS)."
                ) from error
            raise EngineError(f"{self.address} cannot be reached, or has died: {error}") from error
        try:
            return json.loads(answer)
        except ValueError as error:
            raise EngineError(
                f"{self.address}{path} answered with something that is not JSON: {answer[:200]!r}"
            ) from error


def _token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The sampled tokens' ids."""
    if choice.get("token_ids") is not None:
        return tuple(choice["token_ids"])
    names = (choice.get("logprobs") or {}).get("tokens") or []
    if names and all(name.startswith("token_id:") for name in names):
        return tuple(int(name.removeprefix("token_id:")) for name in names)
    raise EngineError(
        "the server gives tokens as text only, and text does not determine them: it has to support `return_token_ids` "
        "or `return_tokens_as_token_ids`, as vLLM's does"
    )


def _token_logprobs(choice: dict[str, Any]) -> tuple[float, ...] | None:
    """Log-probabilities as a server lists them; None if it gives none."""
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    return None if values is None else tuple(map(_number, values))


def _number(value: float | None) -> float:
    """A log-probability. JSON lacks NaN, which is sent as null, and -inf, which vLLM sends as -9999."""
    return math.nan if value is None else -math.inf if value <= -9999.0 else float(value)


def _of_prompt(places: Sequence[dict[str, Any] | None], tokens: Tokens) -> list[float]:
    """The log-probability of each token, looked up by its id."""
    if len(places) != len(tokens):
        raise EngineError(f"the server gave log-probabilities of {len(places)} tokens for a prompt of {len(tokens)}")
    result = [math.nan]
    for place, token in zip(places[1:], tokens[1:], strict=True):
        found = (place or {}).get(str(token))
        if found is None:
            raise EngineError(f"the server gave no log-probability of token {token} of a prompt")
        result.append(_number(found["logprob"]))
    return result
