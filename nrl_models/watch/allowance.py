"""How far trainer and engine may differ: the measured noise floor, or more if healthy steps differ by more."""

from __future__ import annotations

import math

from nrl_models.logprobs.sampling import Sampling

FLOOR_FACTOR = 8.0
"""A difference may be this many times the noise floor."""

HEALTHY_FACTOR = 4.0
"""A difference may be this many times the largest of the first healthy ones."""

HEALTHY_OBSERVATIONS = 3
"""Number of first observations that count. Later ones do not raise the bound, so a slow drift is found."""

OBSERVED_TOKENS = 16
"""Tokens of an observation. Comparisons of fewer tokens are pooled, because the mean of a few varies too much."""

CERTAIN_TOKENS = 128
"""The mean over fewer tokens varies, so it allows more: by the square root of the missing factor, up to the bar."""

SMALLEST_EXCESS = 1e-4
"""Engines in fp32 differ by this much from transformers."""

FIRST_EXCESS = 1e-3
"""Bound on the excess before anything was observed, if the noise floor explains no more."""


class Allowance:
    """A bound on `token_mult_prob_error`.

    Args:
        floor: measured noise floor, at least 1; None, infinite or NaN if it cannot be measured.
        bar: bound before anything was observed, if there is no floor.
    """

    def __init__(self, floor: float | None, bar: float) -> None:
        self.floor = floor if floor is not None and math.isfinite(floor) else None
        self.bar = bar
        self._excesses: list[float] = []  # that the first healthy comparisons allow
        self._pooled, self._pooled_tokens = 0.0, 0

    def learn(self, error: float, tokens: int) -> None:
        """Note the error of a healthy comparison, the mean over a number of tokens."""
        self._pooled += tokens * error
        self._pooled_tokens += tokens
        if self._pooled_tokens >= OBSERVED_TOKENS:
            if len(self._excesses) < HEALTHY_OBSERVATIONS:
                self._excesses.append(self._allowed(self._pooled / self._pooled_tokens, self._pooled_tokens))
            self._pooled, self._pooled_tokens = 0.0, 0

    def _allowed(self, error: float, tokens: int) -> float:
        """Return the excess that an observed error allows."""
        allowed = HEALTHY_FACTOR * (error - 1.0)
        return max(allowed, min(allowed * math.sqrt(max(1.0, CERTAIN_TOKENS / tokens)), self.bar - 1.0))

    def bound(self, sampling: Sampling) -> float:
        """Return the largest healthy error. A temperature below 1 enlarges differences of logits."""
        healthy = self._excesses
        if self.floor is None:
            return 1.0 + max(*healthy, SMALLEST_EXCESS) if healthy else self.bar
        scale = max(1.0, 1.0 / sampling.processing.temperature)
        first = SMALLEST_EXCESS if healthy else FIRST_EXCESS
        return 1.0 + max([*healthy, first, scale * FLOOR_FACTOR * (self.floor - 1.0)])
