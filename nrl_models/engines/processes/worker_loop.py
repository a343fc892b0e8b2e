"""Interface of models in an engine's subprocess, which `environment_worker.serve` runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from nrl_models.engines.digests import digested
from nrl_models.engines.engine_types import by_length
from nrl_models.engines.transfer.transports import Message, tensors_of
from nrl_models.logprobs.sampling import Sampling, processed

DecodingStep = Callable[[list[list[int]]], torch.Tensor]
"""Function of the next tokens of each sequence, the same number for each. Returns the logits after the last token,
`(batch, vocab_size)` in fp32."""


class WorkerModel(ABC):
    """A model in a subprocess. Requests can call its public methods."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return versions, the model's class, `dtype`, and `vocabulary` (the number of logits)."""

    @abstractmethod
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits of a sequence, `(seq_len, vocab_size)` in fp32."""

    @abstractmethod
    def decoding(self) -> DecodingStep:
        """Return a new decoding step, which keeps the earlier tokens as state."""

    def begin(self) -> dict[str, Any]:
        """Start a transfer of new weights."""
        self.arrived: dict[str, Any] = {}
        return {}

    def receive(self, message: Message, digests: bool) -> dict[str, Any]:
        """Keep the new weights of a message in `arrived`. Returns `digests` by name, if requested."""
        digests_by_name: dict[str, str] = {}
        tensors = tensors_of(message)
        self.arrived |= dict(digested(tensors, digests_by_name) if digests else tensors)
        return {"digests": digests_by_name}

    @abstractmethod
    def apply(self) -> dict[str, Any]:
        """Load the received weights and return the names of `unwritten` ones. If some do not fit, change nothing."""

    def generate(
        self,
        prompts: list[list[int]],
        sampling: dict[str, Any],
        max_new_tokens: int,
        seeds: list[int],
        ends: list[int] | None,
    ) -> dict[str, Any]:
        """Sample a continuation of each prompt. Prompts of equal length form a batch, so nothing is padded."""
        samples: dict[int, dict[str, Any]] = {}
        for indices in by_length(prompts):
            batch = [prompts[index] for index in indices]
            sampled = self._sample(batch, Sampling(**sampling), max_new_tokens, [seeds[index] for index in indices])
            for index, (tokens, logprobs) in zip(indices, sampled, strict=True):
                stop = next((position for position, token in enumerate(tokens) if token in (ends or ())), None)
                size = None if stop is None else stop + 1
                samples[index] = {
                    "tokens": tokens[:size],
                    "logprobs": finite(logprobs[:size]),
                    "finish_reason": "length" if stop is None else "stop",
                }
        return {"samples": [samples[index] for index in range(len(prompts))]}

    def _sample(
        self, batch: list[list[int]], sampling: Sampling, count: int, seeds: list[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Sample `count` tokens for each prompt. Returns tokens and log-probabilities of each prompt."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        step, new_tokens, tokens, logprobs = self.decoding(), batch, [], []
        for _ in range(count):
            logs = processed(step(new_tokens), sampling).log_softmax(-1)
            if sampling.greedy:
                chosen = logs.argmax(-1)
            else:
                pairs = zip(logs.exp(), generators, strict=True)
                chosen = torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in pairs])
            tokens.append(chosen)
            logprobs.append(logs.gather(-1, chosen[:, None])[:, 0])
            new_tokens = chosen[:, None].tolist()
        columns = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
        return list(zip(*columns, strict=True))

    def score(
        self, sequences: list[list[int]], sampling: dict[str, Any], last: int | None
    ) -> dict[str, list[list[float | None]]]:
        """Return the log-probability of each token except the first; None where not requested."""
        scores = []
        for tokens in sequences:
            asked = len(tokens) - 1 if last is None else min(last, len(tokens) - 1)
            logits = self.logits(tokens)[-asked - 1 : -1]
            logs = processed(logits, Sampling(**sampling)).log_softmax(-1)
            logprobs = logs.gather(-1, torch.tensor(tokens[len(tokens) - asked :])[:, None])[:, 0].tolist()
            scores.append([*[None] * (len(tokens) - 1 - asked), *finite(logprobs)])
        return {"scores": scores}


def finite(values: list[float]) -> list[float | None]:
    """Convert log-probabilities for JSON: NaN becomes None, and -inf the value that vLLM sends for it."""
    return [None if math.isnan(value) else max(value, -9999.0) for value in values]
