"""A server as an engine: OpenAI's completions interface with token ids, as vLLM and others offer it.

The server has to answer `POST /v1/completions` with token ids as `prompt`, and give log-probabilities (`logprobs`) and
the ids of sampled tokens (vLLM: `return_token_ids`, or `return_tokens_as_token_ids`); text does not determine tokens.
To score given tokens it needs `prompt_logprobs` (vLLM) or `echo` (OpenAI's old interface). To take new weights it has
to be a vLLM on this machine, with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "nrl_models"}'`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import anyio
import httpx2
import torch
from anyio.from_thread import start_blocking_portal
from transformers import GenerationConfig

from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.common.trust.servers import hidden, server_address, shown_argument
from nrl_models.engines.answers import Checked
from nrl_models.engines.base import Engine, require_lengths, require_number
from nrl_models.engines.digests import digested
from nrl_models.engines.engine_types import VLLM_TEMPERATURES, Capabilities, NamedTensor, Sample, Tokens
from nrl_models.engines.transfer.clients import ServerClient
from nrl_models.engines.transfer.sender import BUCKET_BYTES, Sender
from nrl_models.errors import EngineError
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.sampling import Sampling

TIMEOUT = 600.0
"""Seconds to wait for an answer: a batch of long prompts takes its time."""

ANSWER_BYTES = 2**24
"""Size of an answer at most, beside what tokens take."""

BYTES_PER_TOKEN = 2**10
"""Room for a token in an answer: its id, text and log-probability take some hundred bytes."""


NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling parameters that change nothing. All are sent: a server fills those that are not from generation_config.json,
or from its own defaults."""

INVALID = {"top_p": 2.0, "top_k": -7, "min_p": 2.0, "repetition_penalty": -1.0}
"""Values that a server rejects if it reads the parameter and checks it."""

EMPTY = hashlib.sha256().hexdigest()
"""A server's checksum of a parameter that it has packed for its kernels."""

PROBE_TOKENS = 16
"""Tokens that show how a server samples."""

PROBE_TOLERANCE = 0.03
"""Nats, in the mean of a probe's tokens, between the log-probabilities of sampling and those of a prefill."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back: the status, where it redirects to, and the body."""

    status: int
    location: str
    body: bytes


class HTTPEngine(Engine):
    """A running server.

    The key goes to its address alone: redirections are not followed. An answer has to be there, whole, within the
    timeout, and may not be larger than what was asked for can take.

    Args:
        address: of the server, `http://host:port`, with or without `/v1`.
        model: the name it serves the model under; by default the only one it serves.
        api_key: its key, if it needs one.
        timeout: seconds to wait for an answer, from the request to its last byte.
        vocabulary: number of token ids, which a server does not report.
        max_length: tokens of a sequence at most; by default what the server reports.
        dtype: what it computes in, which a server does not report.
        deltas: whether refits after the first send what changed alone; see `Sender`.
        ends: tokens at which a reply ends, beside those that the server ends replies at.
        defaults: sampling parameters that the checkpoint's generation_config.json sets, which a server may apply.

    Raises:
        EngineError: that is no address, no server answers there, or it serves no such model.
    """

    name = "http"
    bucket_bytes = BUCKET_BYTES

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
        deltas: bool = True,
        ends: Sequence[int] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.ends = list(ends)
        self._unproven = {
            name: value for name, value in (defaults or {}).items() if name in INVALID and value != NEUTRAL[name]
        }
        self.address = server_address(address)
        if api_key is not None and not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
            raise EngineError(
                "api_key (not shown here): expected text that a header can have; quote it if it is a number"
            )
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.timeout = float(timeout)
        self._checked = Checked(self.address, vocabulary, (api_key,) if api_key else ())
        self._client = ServerClient(self._request, self._checked)
        self._sender = Sender(self._client, deltas=deltas)
        self._settled = True
        self._held: dict[str, str] = {}
        served = self._served()
        if model is None and len(served) == 1:
            model = next(iter(served))
        if model not in served:
            raise EngineError(
                f"{self.address} serves {', '.join(served) or 'no model'}; "
                + (f"{model!r} is not among them" if model else "say which with --engine-option model=NAME")
            )
        self.model = model
        self.max_length = max_length or served[model]
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
        folder = resolve_folder(path)
        config = read_config(folder)
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        known = ("model", "api_key", "timeout", "deltas")
        if unknown := options.keys() - set(known):
            raise EngineError(f"a server does not take {', '.join(sorted(unknown))}: expected {', '.join(known)}")
        require_number("max_length", max_length, int)
        require_number("timeout", options.get("timeout"), int, float)
        file = folder / "generation_config.json"
        generation = GenerationConfig.from_pretrained(folder).to_diff_dict() if file.is_file() else {}
        defaults = {name: generation[name] for name in INVALID if generation.get(name) is not None}
        own: dict[str, Any] = {"vocabulary": vocabulary, "max_length": max_length, "dtype": dtype}
        return cls(address, ends=end_tokens(folder, config), defaults=defaults, **own, **options)

    def capabilities(self) -> Capabilities:
        """Generation, scores at temperature 1, and new weights (if its server does); no access to the process."""
        return Capabilities(
            min_temperature=VLLM_TEMPERATURES[0],
            max_temperature=VLLM_TEMPERATURES[1],
            processed_scores=False,
            refit=True,
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
        self._require_overrides(prompts)
        body: dict[str, Any] = NEUTRAL | {
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "seed": seed,
        }
        body |= {"ignore_eos": True} if ignore_end else {"ignore_eos": False, "stop_token_ids": self.ends}
        choices = self._complete(body, sum(map(len, prompts)) + len(prompts) * max_new_tokens)
        samples = []
        for number, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
            at = f"choices[{number}]"
            tokens = self._token_ids(choice, at)
            logprobs = self._token_logprobs(choice, at)
            if logprobs is None or len(logprobs) != len(tokens):
                raise EngineError(
                    f"{self.address} gave {0 if logprobs is None else len(logprobs)} log-probabilities for "
                    f"{len(tokens)} sampled tokens: it has to support `logprobs` in /v1/completions"
                )
            reason = choice.get("finish_reason")
            if reason is not None:
                reason = self._checked.text(reason, f"{at}.finish_reason")
            samples.append(Sample(tuple(prompt), tokens, logprobs, str(reason)))
        return samples

    def _require_overrides(self, prompts: Sequence[Tokens]) -> None:
        """Require that the checkpoint's generation_config.json does not change how the server samples.

        A server that accepts an invalid value of a parameter does not read it, or does not check it. Its
        log-probabilities of what it samples, compared with its scores, show which.
        """
        if not self._unproven or not prompts:
            return
        prompt = list(prompts[0][:PROBE_TOKENS])
        body = {"model": self.model, "prompt": [prompt], "max_tokens": 1, "temperature": 1.0}
        asked = {name: self._asked("POST", "/v1/completions", body | {name: INVALID[name]}) for name in self._unproven}
        accepted = [name for name, answer in asked.items() if answer.status < 300]
        defaults, self._unproven = self._unproven, {}
        if not accepted:
            return
        try:
            (sample,) = self._generate([prompt], Sampling(), max_new_tokens=PROBE_TOKENS, seed=0, ignore_end=True)
            scores = self.score([sample.sequence], Sampling())[0][len(prompt) :]
            differences = [abs(one - other) for one, other in zip(sample.logprobs, scores, strict=True)]
        except BaseException:
            self._unproven = defaults
            raise
        if not sum(differences) <= PROBE_TOLERANCE * len(differences):
            self._unproven = defaults
            settings = ", ".join(f"{name}={defaults[name]}" for name in accepted)
            raise EngineError(
                f"{self.address} does not read {', '.join(accepted)}, and the checkpoint's generation_config.json sets "
                f"{settings}: it samples from another distribution than was requested. Start the server without that "
                "file's defaults (vLLM: --generation-config vllm), or remove them from the file"
            )

    def score(self, sequences: Sequence[Tokens], sampling: Sampling, *, last: int | None = None) -> list[list[float]]:
        """See `Engine.score`: with `prompt_logprobs` if the server gives them, else with `echo`."""
        if not sampling.is_identity:
            raise EngineError(f"{self.address} scores given tokens at temperature 1 only, not at {sampling}")
        require_lengths(self, sequences, 1)
        body: dict[str, Any] = NEUTRAL | {"prompt": [list(tokens) for tokens in sequences]}
        body |= {"temperature": 0.0, "max_tokens": 1}
        size = sum(map(len, sequences)) + len(sequences)
        choices = self._complete(body | {"prompt_logprobs": 0}, size)
        if all(choice.get("prompt_logprobs") for choice in choices):
            return [
                self._checked.logprobs_by_id(choice["prompt_logprobs"], tokens, f"choices[{number}].prompt_logprobs")
                for number, (choice, tokens) in enumerate(zip(choices, sequences, strict=True))
            ]
        choices = self._complete(body | {"echo": True, "logprobs": 0}, size)
        results = []
        for number, (choice, tokens) in enumerate(zip(choices, sequences, strict=True)):
            found = self._token_logprobs(choice, f"choices[{number}]")
            if found is None or len(found) < len(tokens):
                raise EngineError(
                    f"{self.address} gives no log-probabilities of given tokens: it supports neither `prompt_logprobs` "
                    "nor `echo` with `logprobs` in /v1/completions"
                )
            results.append([math.nan, *found[1 : len(tokens)]])
        return results

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """The server waits, paused, from before an update until it has all of it, and the version is the one sent."""
        try:
            there = self._client.weight_version()
        except EngineError as error:
            raise EngineError(
                f"{error}. To take new weights, the server has to be a vLLM with VLLM_SERVER_DEV_MODE=1 and "
                """--weight-transfer-config '{"backend": "nrl_models"}', with nrl_models installed"""
            ) from error
        if there != self._sender.last_version:
            self._sender.forget()  # it was started again, or somebody else sent it weights
        arrived: dict[str, str] = {}
        tensors = chain.from_iterable(sent)
        try:
            self._client.pause()
            self._sender.send(digested(tensors, arrived) if digests else tensors)
        except BaseException:
            if not self._refit_changed():
                with suppress(EngineError):  # it has died
                    self._client.resume()
            raise
        self._settled = False
        now = self._client.weight_version()
        if now != self._sender.last_version:
            self._checked.wrong("the version after a refit", now, repr(self._sender.last_version))
        self._client.resume()
        self._settled = True
        # The server compared what arrived with its digests, and refuses what leaves a parameter unwritten.
        return {"digests": arrived, "unwritten": [], "stale_buffers": []}

    def _refit_changed(self) -> bool:
        # It has the new weights, and may go on with what it computed with the old ones, or be paused.
        return self._sender.in_doubt or not self._settled

    def note_weights(self) -> bool:
        """See `Engine.note_weights`; a server's checksums are of whole tensors."""
        try:
            self._held = self._client.checksums()
        except EngineError:  # a server without this route
            self._held = {}
        return bool(self._held) and EMPTY not in self._held.values()

    def unchanged_weights(self) -> list[str]:
        """See `Engine.unchanged_weights`."""
        now = self._client.checksums() if self._held else {}
        same = [name for name, checksum in now.items() if self._held.get(name) == checksum != EMPTY]
        names = [name.rpartition(":")[2] for name in same]  # without the worker's ranks
        return [name for name in names if not name.rpartition(".")[2].startswith("_")]  # which no checkpoint has

    # What the server answers

    def _served(self) -> dict[str, int | None]:
        """The models it serves, by name, each with its longest sequence where the server tells."""
        check, served = self._checked, {}
        for number, given in enumerate(check.listed(self._request("GET", "/v1/models").get("data"), "data")):
            entry = check.mapping(given, f"data[{number}]")
            limit = entry.get("max_model_len")
            served[check.text(entry.get("id"), f"data[{number}].id")] = (
                None if limit is None else check.whole(limit, f"data[{number}].max_model_len", 1)
            )
        return served

    def _complete(self, body: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
        """The completions of `body`'s prompts, in their order.

        Args:
            body: the request, without the model.
            tokens: how many tokens the answer is about: it may be so much larger.
        """
        check, expected = self._checked, len(body["prompt"])
        answer = self._request("POST", "/v1/completions", {"model": self.model} | body, tokens)
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

    def _token_ids(self, choice: dict[str, Any], at: str) -> tuple[int, ...]:
        """The sampled tokens' ids."""
        if choice.get("token_ids") is not None:
            return self._checked.token_ids(choice["token_ids"], f"{at}.token_ids")
        names = self._logprobs(choice, at).get("tokens") or []
        found = self._checked.named_token_ids(names, f"{at}.logprobs.tokens")
        if found is None:
            raise EngineError(
                f"{self.address} gives tokens as text only, and text does not determine them: it has to support "
                "`return_token_ids` or `return_tokens_as_token_ids`, as vLLM's does"
            )
        return found

    def _token_logprobs(self, choice: dict[str, Any], at: str) -> tuple[float, ...] | None:
        """Log-probabilities as a server lists them; None if it gives none."""
        values = self._logprobs(choice, at).get("token_logprobs")
        return None if values is None else self._checked.logprobs(values, f"{at}.logprobs.token_logprobs")

    def _logprobs(self, choice: dict[str, Any], at: str) -> dict[str, Any]:
        found = choice.get("logprobs")
        return {} if found is None else self._checked.mapping(found, f"{at}.logprobs")

    # How it is asked

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None, tokens: int = 0) -> dict[str, Any]:
        check = self._checked
        answer = self._asked(method, path, body, tokens)
        text = answer.body.decode(errors="replace")
        if 300 <= answer.status < 400:
            place = shown_argument(hidden(answer.location, check.secrets))
            raise check.error(
                f"redirects {path} to {place!r}, and redirections are not followed, since the key would go there, too: "
                "give the address that answers"
            )
        if answer.status >= 400:
            raise EngineError(*_lines(hidden(f"{check.who} answered {answer.status} to {path}: {text}", check.secrets)))
        try:
            return check.mapping(json.loads(text, parse_constant=_no_json), "it")
        except (ValueError, RecursionError) as error:
            shown = hidden(text, check.secrets)[:200]
            raise check.error(f"answered {path} with something that is not JSON: {shown!r}") from error

    def _asked(self, method: str, path: str, body: dict[str, Any] | None, tokens: int = 0) -> _Answer:
        """Send a request, and give the answer whatever its status is."""
        check, limit = self._checked, ANSWER_BYTES + BYTES_PER_TOKEN * tokens
        content = None if body is None else json.dumps(body).encode()
        try:
            # In a thread of its own: the caller may be in an event loop, as notebooks are.
            with start_blocking_portal() as portal:
                return portal.call(self._ask, method, path, content, limit)
        except TimeoutError as error:
            raise EngineError(
                f"{self.address} gave no answer within {self.timeout:g} s. Shorter or fewer sequences, or a longer "
                "wait (--engine-option timeout=SECONDS)."
            ) from error
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            message = str(error) or type(error).__name__
            raise check.error(f"cannot be reached, or has died: {message}") from error

    async def _ask(self, method: str, path: str, content: bytes | None, limit: int) -> _Answer:
        """Send a request, and take the answer as it is; the time counts from here to its last byte."""
        with anyio.fail_after(self.timeout):
            async with (
                httpx2.AsyncClient(timeout=None, follow_redirects=False) as client,
                client.stream(method, self.address + path, content=content, headers=self._headers) as answer,
            ):
                body = bytearray()
                async for piece in answer.aiter_raw():  # never unpacked, so that a few bytes cannot become many
                    body += piece
                    if len(body) > limit:
                        raise EngineError(
                            f"{self.address}{path} answered with more than {limit:,} bytes, which nothing takes that "
                            "was asked for: it is no server of completions, or a broken one"
                        )
                return _Answer(answer.status_code, answer.headers.get("location", ""), bytes(body))


def _lines(text: str) -> list[str]:
    """An error of a server, line by line: the first and the last, where a traceback has its cause.

    Its line breaks arrive escaped, in a string of JSON.
    """
    lines = [line for line in text.replace("\\n", "\n").splitlines() if line.strip()]
    return lines if len(lines) <= 40 else [*lines[:10], f"... ({len(lines) - 40} lines)", *lines[-30:]]


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
