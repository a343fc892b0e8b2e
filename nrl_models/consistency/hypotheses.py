"""Find the cause of a wrong side's log-probabilities: try hypotheses until one reproduces them.

A hypothesis is the set of log-probabilities that a side would return with one specific bug. For example, the side
ignores the temperature or a configuration key, shifts by a token, drops the soft cap, or keeps the old weights. Trying
hypotheses is much cheaper than a search. They do not depend on the model's name, only on its head and configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from nrl_models.common.upstream import cache_in, cache_input, config_value
from nrl_models.common.value_checks import is_number
from nrl_models.consistency.references import References
from nrl_models.consistency.verdict import CauseKind, VerdictCause
from nrl_models.logprobs.chunked import chunked_statistics
from nrl_models.logprobs.head import hidden_states_and_head
from nrl_models.logprobs.logit_buffers import OutputHead
from nrl_models.logprobs.sampling import Sampling

EXPLAINED = 0.1
"""Maximum share of the difference that remains if a hypothesis explains it."""

FAR = 10.0
"""Maximum difference in nats that a token contributes. Larger differences count the same."""

BLOCKS = (1, 16, 32, 64, 128)
"""Sizes of the blocks in which engines cache keys and values."""

LARGE = 3e9
"""Number of parameters above which no models of other configurations are built."""


class Hypothesis(NamedTuple):
    """A possible cause, and the log-probabilities `(batch, generated)` that it would produce."""

    cause: VerdictCause
    logprobs: torch.Tensor


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the mean absolute difference in nats. A token counts at most `FAR`, also if only one side excludes it."""
    same = (first == second) | (first.isnan() & second.isnan())
    difference = (first - second).abs().nan_to_num(nan=FAR, posinf=FAR).clamp(max=FAR)
    return torch.where(same, 0.0, difference).mean().item()


def find_cause(
    hypotheses: Iterable[Hypothesis], party: torch.Tensor, expected: torch.Tensor, floor: float
) -> VerdictCause | None:
    """Return the cause of the first hypothesis that reproduces the log-probabilities; None if none does.

    Args:
        hypotheses: Hypotheses in the order in which they are tried.
        party: Log-probabilities of the wrong side, `(batch, generated)`.
        expected: Right log-probabilities.
        floor: Mean absolute difference, in nats, caused by rounding.
    """
    error = distance(party, expected)
    for cause, logprobs in hypotheses:
        left = distance(party, logprobs)
        if left <= max(EXPLAINED * error, floor) and left < 0.5 * error:
            return cause
    return None


class Hypotheses:
    """All hypotheses about the log-probabilities of some sequences.

    Args:
        references: Models with the right weights.
        tokens: Token ids, `(batch, seq_len)`.
        generated: Number of tokens at the end to compare.
        sampling: Sampling parameters of these tokens.
    """

    def __init__(self, references: References, tokens: torch.Tensor, generated: int, sampling: Sampling) -> None:
        self.references, self.tokens, self.generated, self.sampling = references, tokens, generated, sampling
        self.model = references.model(torch.float32)
        with torch.no_grad():
            self.hidden, self.head = hidden_states_and_head(self.model, tokens.to(self.model.device))

    def __iter__(self) -> Iterator[Hypothesis]:
        """Yield the hypotheses, cheap ones first."""
        yield from self.about_logits()
        yield from self.about_alignment()
        yield from self.about_weights()
        yield from self.about_configuration()

    def about_logits(self) -> Iterator[Hypothesis]:
        """Yield ignored sampling parameters, an ignored soft cap, and a scale of the logits applied never or twice."""
        right, head = self.sampling.processing, self.head
        tried = {(right, head)}
        for kind, message, sampling, end in (
            (CauseKind.SAMPLING, "the temperature was not applied", replace(right, temperature=1.0), head),
            (CauseKind.SAMPLING, "top-k and top-p were not applied", Sampling(right.temperature), head),
            (CauseKind.SAMPLING, "neither temperature nor top-k and top-p were applied", Sampling(), head),
            (CauseKind.SAMPLING, "top-p was not applied", replace(right, top_p=1.0), head),
            (CauseKind.SAMPLING, "top-k was not applied", replace(right, top_k=0), head),
            (CauseKind.HEAD, "the soft cap of the logits was not applied", right, replace(head, cap=None)),
            (CauseKind.HEAD, "the scale of the logits was not applied", right, replace(head, scale=1.0)),
            (CauseKind.HEAD, "the scale of the logits was applied twice", right, replace(head, scale=head.scale**2)),
        ):
            if (sampling, end) not in tried:
                tried.add((sampling, end))
                yield Hypothesis(VerdictCause(kind, message), self._logprobs(self.hidden, end, sampling))

    def about_alignment(self) -> Iterator[Hypothesis]:
        """Yield shifts: each token has the log-probability of the previous or the next token."""
        extended = self._logprobs(self.hidden, self.head, self.sampling, self.generated + 1)
        unknown = torch.full_like(extended[:, :1], math.nan)
        for neighbor, logprobs in (
            ("previous", extended[:, : self.generated]),
            ("next", torch.cat([extended[:, 2:], unknown], 1)),
        ):
            message = f"each token had the log-probability of the {neighbor} token"
            yield Hypothesis(VerdictCause(CauseKind.ALIGNMENT, message), logprobs)

    def about_weights(self) -> Iterator[Hypothesis]:
        """Yield weights, and cached keys and values, from before the last refit."""
        before = self.references.with_previous_weights(torch.float32)
        if before is None:
            return
        message = "the weights were those of before the last refit"
        yield Hypothesis(VerdictCause(CauseKind.STALE_WEIGHTS, message), self._of_model(before))
        prompt = self.tokens.shape[1] - self.generated
        # A cache stores complete blocks, and never the last token of a prompt.
        for cached in sorted({(prompt - 1) // block * block for block in BLOCKS} - {0}, reverse=True):
            message = f"the keys and values of the first {cached} tokens were cached from before the last refit"
            try:
                yield Hypothesis(VerdictCause(CauseKind.STALE_CACHE, message), self._with_cache_of(before, cached))
            except Exception:  # a model with other contents in its cache
                return

    def about_configuration(self) -> Iterator[Hypothesis]:
        """Yield configuration keys that were ignored, so that another value applied."""
        if self.model.num_parameters() > LARGE:
            return
        config = self.model.config.get_text_config()
        for key, value in alternatives(config):
            message = f"`{key}` were {value} and not {config_value(config, key, None)}"
            try:
                logprobs = self._of_model(self.references.with_config({key: value}))
            except Exception:  # some combinations of values are invalid
                continue
            yield Hypothesis(VerdictCause(CauseKind.CONFIG, message, key), logprobs)

    @torch.no_grad()
    def _with_cache_of(self, before: PreTrainedModel, cached: int) -> torch.Tensor:
        """Return log-probabilities of the right weights, with keys and values of `before` for the first tokens."""
        tokens = self.tokens.to(self.model.device)
        cache = cache_in(before(input_ids=tokens[:, :cached], use_cache=True))
        inputs = cache_input(self.model.forward, cache)
        hidden, head = hidden_states_and_head(self.model, tokens[:, cached:], **inputs)
        unknown = hidden.new_zeros(len(hidden), cached, hidden.shape[2])  # in the prompt, which is not compared
        return self._logprobs(torch.cat([unknown, hidden], 1), head, self.sampling)

    @torch.no_grad()
    def _of_model(self, model: PreTrainedModel) -> torch.Tensor:
        hidden, head = hidden_states_and_head(model, self.tokens.to(model.device))
        return self._logprobs(hidden, head, self.sampling)

    @torch.no_grad()
    def _logprobs(
        self, hidden: torch.Tensor, head: OutputHead, sampling: Sampling, count: int | None = None
    ) -> torch.Tensor:
        """Return log-probabilities of the last `count` tokens, `(batch, count)`; default: the generated tokens."""
        rows, length = self.tokens.shape
        first = length - (count or self.generated)
        tokens = self.tokens[:, first:].to(hidden.device)
        states = hidden[:, first - 1 : length - 1]
        logprobs = chunked_statistics(states.flatten(0, 1), head, tokens.flatten(), sampling).logprobs
        return logprobs.view(rows, -1).double().cpu()


_MISSING = object()


def alternatives(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield configuration keys with the value they would have if ignored: none, one, or the class's default."""
    default = type(config)()
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        yield "layer_types", ["full_attention"] * len(config.layer_types)
    for key, value in config.to_dict().items():
        if config_value(config, key, _MISSING) is _MISSING or key.startswith("_"):
            continue
        if isinstance(value, dict) and "rope_theta" in value:
            yield from ((key, rope) for rope in _rope_alternatives(value))
        if not is_number(value):
            continue
        if "softcap" in key or "clip" in key:
            yield key, None
        elif key == "sliding_window":
            yield from ((key, window) for window in (None, value + 1, value - 1))
        elif key.endswith("_scalar") and (head_dim := config_value(config, "head_dim", 1)) != value:
            yield key, head_dim
        elif key.endswith(("_multiplier", "_scale", "_scaling", "_factor")) and value != 1.0:
            yield key, 1.0
        elif key.endswith("_eps") or key == "rope_theta":
            usual = (config_value(default, key, None), *((1e-5, 1e-6) if key.endswith("_eps") else (10_000.0,)))
            yield from ((key, other) for other in dict.fromkeys(usual) if other not in (None, value))


def _rope_alternatives(rope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    theta = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        yield {"rope_type": "default", "rope_theta": theta}
    yield from (rope | {"rope_theta": other} for other in (10_000.0, 500_000.0, 1_000_000.0) if other != theta)
