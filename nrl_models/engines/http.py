"""Connect to a server with OpenAI's completions interface and token ids, such as vLLM.

Requirements on the server:

- `POST /v1/completions` accepts token ids as `prompt` and returns log-probabilities (`logprobs`).
- It returns the ids of sampled tokens (vLLM: `return_token_ids` or `return_tokens_as_token_ids`), because text does not
  determine tokens.
- To score existing tokens: `prompt_logprobs` (vLLM) or `echo` (OpenAI's old interface).
- To accept new weights: a vLLM on this machine, started with `VLLM_SERVER_DEV_MODE=1` and
  `--weight-transfer-config '{"backend": "nrl_models"}'`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.generation import generation_settings
from nrl_models.common.trust.servers import hidden
from nrl_models.common.value_checks import is_number
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import (
    BUCKET_BYTES,
    VLLM_TEMPERATURES,
    Capabilities,
    NamedTensor,
    Sample,
    Tokens,
    prompt_seeds,
)
from nrl_models.engines.http_connection import COMPLETIONS, TIMEOUT, ServerConnection
from nrl_models.engines.http_probes import INVALID, NEUTRAL, ServerProbes
from nrl_models.engines.input_checks import require_options
from nrl_models.engines.transfer.clients import ServerClient
from nrl_models.engines.transfer.sender import Sender
from nrl_models.errors import EngineError, EngineUnavailableError, RefitUnsupportedError, shown
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.sampling import Sampling

EMPTY = hashlib.sha256().hexdigest()
"""A server's checksum of a parameter that it has packed for its kernels."""


class HTTPEngine(Engine):
    """An engine that connects to a running server.

    Args:
        address: Address of the server, `http://host:port`, with or without `/v1`.
        model: Name of the served model. Default: the only one that the server lists.
        api_key: API key of the server, if it needs one.
        timeout: Seconds from a request to the last byte of its answer.
        vocabulary: Number of token ids. Servers do not report it.
        max_length: Maximum number of tokens of a sequence. Default: the limit that the server reports.
        dtype: Compute dtype of the server. Servers do not report it.
        deltas: Whether refits after the first send only changes; see `Sender`.
        ends: Token ids that end a completion, in addition to the server's.
        defaults: Sampling parameters from the checkpoint's generation_config.json, which a server may apply.

    Raises:
        EngineError: If the address is invalid, no server answers, or it does not serve the model.
    """

    name = "http"
    sampled_per_score = 1
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
        self._probes = ServerProbes(self, defaults or {})
        self._connection = ServerConnection(address, api_key, timeout, vocabulary)
        self.address, self._checked = self._connection.address, self._connection.checked
        self._client = ServerClient(self._connection.request, self._checked)
        self._sender = Sender(self._client, deltas=deltas)
        self._settled = True
        self._run = secrets.token_hex(4)
        self._sent: str | None = None
        self._held: dict[str, str] = {}
        served = self._connection.served_models()
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

        `load_format` and `seed` are ignored, because they only have an effect when a server is started. `dtype` is the
        dtype that the server was started with.
        """
        folder = resolve_folder(path)
        config = read_config(folder)
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        own_options = ("model", "api_key", "timeout", "deltas")
        unknown = sorted(options.keys() - set(own_options))
        require_options("a server", unknown, (*own_options, "dtype", "max_length"), max_length=max_length)
        if (timeout := options.get("timeout")) is not None and not (is_number(timeout, 0.0) and timeout):
            raise EngineError(f"timeout={shown(timeout)}: expected a positive number")
        settings = generation_settings(folder)
        generation = {} if settings is None else settings.to_diff_dict()
        defaults = {name: generation[name] for name in INVALID if generation.get(name) is not None}
        keywords: dict[str, Any] = {"vocabulary": vocabulary, "max_length": max_length, "dtype": dtype}
        return cls(address, ends=end_tokens(folder, config), defaults=defaults, **keywords, **options)

    def capabilities(self) -> Capabilities:
        """Return capabilities: generation, scores at temperature 1, and new weights if the server supports them."""
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
        """Return address and model."""
        return {"engine": self.name, "address": self.address, "model": self.model, "max_model_len": self.max_length}

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        self._probes.require(prompts, sampling)
        return self.request_samples(prompts, sampling, max_new_tokens=max_new_tokens, seed=seed, ignore_end=ignore_end)

    def request_samples(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        """Sample without probes.

        A server gives every prompt of a request the same seed, so equal prompts would get equal completions. Therefore
        each prompt is a separate request, except in greedy decoding.
        """
        body: dict[str, Any] = NEUTRAL | {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        body |= {"ignore_eos": True} if ignore_end else {"ignore_eos": False, "stop_token_ids": self.ends}
        if sampling.greedy:
            body["prompt"] = [list(prompt) for prompt in prompts]
            choices = self._connection.complete(body, sum(map(len, prompts)) + len(prompts) * max_new_tokens)
        else:
            seeds = prompt_seeds(seed, len(prompts))
            bodies = [
                body | {"prompt": [list(prompt)], "seed": prompt_seed}
                for prompt, prompt_seed in zip(prompts, seeds, strict=True)
            ]
            choices = self._connection.complete_each(bodies, max(map(len, prompts), default=0) + max_new_tokens)
        samples = []
        for number, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
            at = f"choices[{number}]" if sampling.greedy else f"prompt {number}: choices[0]"
            tokens = self._connection.token_ids(choice, at)
            logprobs = self._connection.token_logprobs(choice, at)
            if logprobs is None or len(logprobs) != len(tokens):
                raise EngineError(
                    f"{self.address} returned {0 if logprobs is None else len(logprobs)} log-probabilities for "
                    f"{len(tokens)} sampled tokens: it has to support `logprobs` in /v1/completions"
                )
            reason = choice.get("finish_reason")
            reason = "unfinished" if reason is None else self._checked.text(reason, f"{at}.finish_reason")
            reason = hidden(reason, self._checked.secrets)
            samples.append(Sample(tuple(prompt), tokens, logprobs, reason))
        self._require_version()
        return samples

    def send_probe(self, prompt: Sequence[int], **parameters: Any) -> int:
        """Request one token with some sampling parameters, and return the status of the answer."""
        body = {"model": self.model, "prompt": [list(prompt)], "max_tokens": 1, "temperature": 1.0, **parameters}
        return self._connection.send("POST", COMPLETIONS, body).status

    def _require_version(self) -> None:
        """Check that the server still has the weights of the last refit. Without a refit, there is nothing to check.

        Raises:
            EngineError: If it has other weights.
        """
        if self._sent is not None and (there := self._client.weight_version()) != self._sent:
            raise EngineError(
                f"{self.address} has version {there!r} of the weights, and this engine sent version {self._sent!r}: "
                "the server was restarted, or received weights from another trainer. Refit it before the next call"
            )

    def _score(self, sequences: list[list[int]], sampling: Sampling, *, last: int | None) -> list[list[float]]:
        """Score as in `Engine.score`, with `prompt_logprobs` if the server supports it, or else with `echo`."""
        if not sampling.is_identity:
            raise EngineError(f"{self.address} scores existing tokens at temperature 1 only, not at {sampling}")
        body: dict[str, Any] = NEUTRAL | {"model": self.model, "prompt": sequences}
        body |= {"temperature": 0.0, "max_tokens": 1}
        size = sum(map(len, sequences)) + len(sequences)
        choices = self._connection.complete(body | {"prompt_logprobs": 0}, size)
        if all(choice.get("prompt_logprobs") for choice in choices):
            self._require_version()
            return [
                self._checked.logprobs_by_id(choice["prompt_logprobs"], tokens, f"choices[{number}].prompt_logprobs")
                for number, (choice, tokens) in enumerate(zip(choices, sequences, strict=True))
            ]
        choices = self._connection.complete(body | {"echo": True, "logprobs": 0}, size)
        self._require_version()
        results = []
        for number, (choice, tokens) in enumerate(zip(choices, sequences, strict=True)):
            logprobs = self._connection.token_logprobs(choice, f"choices[{number}]")
            if logprobs is None or len(logprobs) < len(tokens):
                raise EngineError(
                    f"{self.address} cannot score existing tokens: it supports neither `prompt_logprobs` nor `echo` "
                    "with `logprobs` in /v1/completions"
                )
            results.append([math.nan, *logprobs[1 : len(tokens)]])
        return results

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """Pause the server, send all weights, and resume it after checking that it reports their version."""
        try:
            there = self._client.weight_version()
        except EngineUnavailableError:
            raise
        except EngineError as error:
            kind = RefitUnsupportedError if self._sent is None else EngineError
            raise kind(
                f"{error}. To take new weights, the server has to be a vLLM with VLLM_SERVER_DEV_MODE=1 and "
                """--weight-transfer-config '{"backend": "nrl_models"}', with nrl_models installed"""
            ) from error
        if there != self._sender.last_version:
            self._sender.forget()  # the server was restarted, or received weights from another trainer
        try:
            self._client.pause()
            # Unique, because the versions of two trainers may have the same number.
            version = f"{self._sender.version + 1}-{self._run}"
            _, arrived = self._sender.send_buckets(sent, version)
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
        self._settled, self._sent = True, now
        # The server compares the tensors with their digests, and raises an error if a parameter is left unwritten.
        return {"digests": arrived if digests else {}, "unwritten": [], "stale_buffers": []}

    def _refit_changed(self) -> bool:
        # The server has the new weights, but may still use cached results of the old ones, or be paused.
        return self._sender.in_doubt or not self._settled

    def note_weights(self) -> bool:
        """Record checksums, see `Engine.note_weights`.

        Returns False: a server has one checksum per tensor, and fused tensors change if only one of their parts does.
        """
        try:
            self._held = self._client.checksums()
        except EngineError:  # a server without this route
            self._held = {}
        return False

    def unchanged_weights(self) -> list[str]:
        """Return the names of unchanged weights, see `Engine.unchanged_weights`."""
        now = self._client.checksums() if self._held else {}
        same = [name for name, checksum in now.items() if self._held.get(name) == checksum != EMPTY]
        names = [name.rpartition(":")[2] for name in same]  # removes the worker's ranks
        return [name for name in names if not name.rpartition(".")[2].startswith("_")]  # checkpoints lack these names
