"""Probes of a completions server: which sampling parameters it reads, and which distribution it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nrl_models.engines.engine_types import VLLM_TEMPERATURES, Sample, Tokens
from nrl_models.errors import EngineError
from nrl_models.logprobs.sampling import Sampling

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Neutral values of sampling parameters. All are sent, because a server fills missing ones from generation_config.json
or its defaults."""

INVALID = {"top_p": 2.0, "top_k": -7, "min_p": 2.0, "repetition_penalty": -1.0}
"""Values that a server rejects if it reads the parameter and checks it."""

PROBE_TOKENS = 16
"""Number of tokens per probe of how a server samples."""

MOST_PROBES = 8
"""Maximum number of prompts to try until a continuation is uncertain enough to compare distributions."""

PROBE_TOLERANCE = 0.03
"""Maximum mean difference, in nats, between a probe's log-probabilities from sampling and from a prefill."""


class Probed(Protocol):
    """An engine that connects to a server."""

    address: str

    def send_probe(self, prompt: Sequence[int], **parameters: Any) -> int:
        """Request one token, and return the status of the answer."""

    def score(self, sequences: Sequence[Tokens], sampling: Sampling) -> list[list[float]]:
        """Score sequences, see `Engine.score`."""

    def request_samples(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        """Sample as in `Engine.generate`, without probes."""


class ServerProbes:
    """Checks of a server before its samples are used. Each is repeated until it has compared something and passed.

    Args:
        engine: The engine that connects to the server.
        defaults: Sampling parameters from the checkpoint's generation_config.json, which the server may apply.
    """

    def __init__(self, engine: Probed, defaults: Mapping[str, Any]) -> None:
        self._engine = engine
        self._unproven = {name: value for name, value in defaults.items() if name in INVALID and value != NEUTRAL[name]}
        self._unprocessed = {"temperature": Sampling(VLLM_TEMPERATURES[0]), "truncation": Sampling(top_k=1)}

    def require(self, prompts: Sequence[Tokens], sampling: Sampling) -> None:
        """Check that the server samples as requested, and reports log-probabilities of the sampled distribution.

        Raises:
            EngineError: If it does not.
        """
        if not prompts:
            return
        if self._unproven:
            self._require_overrides(prompts)
        if not sampling.greedy and sampling.temperature != 1.0:
            self._require_processed("temperature", prompts)
        if sampling.truncates:
            self._require_processed("truncation", prompts)

    def _require_overrides(self, prompts: Sequence[Tokens]) -> None:
        """Check that the checkpoint's generation_config.json does not change how the server samples.

        Sends an invalid value of each parameter. A server that accepts it either ignores the parameter or does not
        validate it. To tell which, compare the log-probabilities of sampled tokens with their scores.
        """
        starts = _starts(prompts)
        accepted = [
            name for name in self._unproven if self._engine.send_probe(starts[0], **{name: INVALID[name]}) < 300
        ]
        self._unproven = {name: self._unproven[name] for name in accepted}
        for prompt in starts if accepted else ():
            sample = self._sample(prompt, Sampling())
            scores = self._engine.score([sample.sequence], Sampling())[0][len(prompt) :]
            differences = [abs(one - other) for one, other in zip(sample.logprobs, scores, strict=True)]
            if not sum(differences) <= PROBE_TOLERANCE * len(differences):
                settings = ", ".join(f"{name}={self._unproven[name]}" for name in accepted)
                raise EngineError(
                    f"{self._engine.address} does not read {', '.join(accepted)}, and the checkpoint's "
                    f"generation_config.json sets {settings}: it samples from another distribution than was requested. "
                    "Start the server without that file's defaults (vLLM: --generation-config vllm), or remove them "
                    "from the file"
                )
            if min(scores, default=0.0) < -PROBE_TOLERANCE:  # a certain continuation is equal in all distributions
                self._unproven = {}
                return

    def _require_processed(self, name: str, prompts: Sequence[Tokens]) -> None:
        """Check that log-probabilities are computed after temperature and truncation.

        The probe's sampling leaves one token, the most likely one. Its log-probability is then 0. A server that reports
        unprocessed log-probabilities returns the same as for greedy decoding.
        """
        if (probe := self._unprocessed.get(name)) is None:
            return
        for prompt in _starts(prompts):
            raw, probed = _compared(self._sample(prompt, Sampling(0.0)), self._sample(prompt, probe))
            if raw:
                break
        else:  # every continuation is certain: the next call probes with its prompts
            return
        # With two equally likely tokens, a processed log-probability may equal the unprocessed one by chance.
        if sum(abs(one - other) for one, other in zip(raw, probed, strict=True)) < 0.5 * sum(map(abs, probed)):
            raise EngineError(
                f"{self._engine.address} returns log-probabilities from before {name}, not those of the distribution "
                "that it samples from. Start the server so that it processes them (vLLM: --logprobs-mode "
                "processed_logprobs), or sample at temperature 1 without top_k and top_p"
            )
        del self._unprocessed[name]

    def _sample(self, prompt: list[int], sampling: Sampling) -> Sample:
        (sample,) = self._engine.request_samples(
            [prompt], sampling, max_new_tokens=PROBE_TOKENS, seed=0, ignore_end=True
        )
        return sample


def _starts(prompts: Sequence[Tokens]) -> list[list[int]]:
    """Return prompts for probes: the start of the first, and single tokens, whose continuations are less certain."""
    first = list(prompts[0][:PROBE_TOKENS])
    tokens = dict.fromkeys(token for prompt in prompts for token in prompt[:PROBE_TOKENS])
    return [first, *([token] for token in tokens)][:MOST_PROBES]


def _compared(greedy: Sample, sampled: Sample) -> tuple[list[float], list[float]]:
    """Return both samples' log-probabilities up to the first different token, without those of certain tokens."""
    raw, probed = [], []
    for expected, token, before, after in zip(
        greedy.tokens, sampled.tokens, greedy.logprobs, sampled.logprobs, strict=False
    ):
        if token != expected:
            break
        if before < -PROBE_TOLERANCE:
            raw.append(before)
            probed.append(after)
    return raw, probed
