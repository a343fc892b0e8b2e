"""How tokens are sampled, and which distribution their log-probabilities belong to.

An engine samples from processed logits: divided by the temperature, then truncated to the `top_k` likeliest tokens,
then to the smallest set of them that holds `top_p` of the probability. The log-probabilities that training needs are of
that distribution (vLLM's `logprobs_mode="processed_logprobs"`), so the trainer processes its logits the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.errors import SamplingError, shown

LOWEST_TEMPERATURE = 1e-6
"""Lowest temperature above 0."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: Divisor of the logits; 0 for greedy decoding. Log-probabilities of greedy tokens are those at
            temperature 1 without `top_k` and `top_p`, as in vLLM.
        top_k: Number of most likely tokens that can be sampled; 0 for all.
        top_p: Total probability of the smallest set of most likely tokens that can be sampled; 1.0 for all.

    Raises:
        SamplingError: If a value has the wrong type or is out of range. `Engine.generate` also checks the limits of its
            engine: vLLM supports 0, and 0.01 to 2.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.temperature, LOWEST_TEMPERATURE) or is_number(self.temperature, 0.0, 0.0)):
            raise SamplingError(
                f"temperature={shown(self.temperature)}: expected a number of at least 0. Above 0, the lowest is "
                f"{LOWEST_TEMPERATURE:g}, because logits divided by less may exceed the range of fp32"
            )
        if not is_integer(self.top_k):
            raise SamplingError(f"top_k={shown(self.top_k)}: expected a whole number: 0 (all tokens) or more")
        if not (is_number(self.top_p, 0.0, 1.0) and self.top_p):
            raise SamplingError(f"top_p={shown(self.top_p)}: expected a number above 0, at most 1")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature == 0.0

    @property
    def processing(self) -> Sampling:
        """Processing of logits before log-probabilities are computed: none for greedy decoding."""
        return Sampling() if self.greedy else self

    @property
    def is_identity(self) -> bool:
        """Whether log-probabilities are those of unprocessed logits."""
        return self.processing == Sampling()

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)

    def __str__(self) -> str:
        if self.greedy:
            return "greedy"
        settings = [f"temperature {self.temperature:g}"]
        settings += [f"top-k {self.top_k}"] if self.top_k else []
        settings += [f"top-p {self.top_p:g}"] if self.top_p < 1.0 else []
        return ", ".join(settings)


def processed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Apply temperature and truncation to logits `(rows, vocab_size)`. Excluded tokens get -inf. At least fp32."""
    sampling = sampling.processing
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if sampling.truncates:
        logits = logits.masked_fill(logits < smallest_kept(logits.detach(), sampling), float("-inf"))
    return logits


def smallest_kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return a bound per row of logits: tokens at or above it can be sampled.

    The bound is half way between the smallest kept and the largest excluded logit, so that logits recomputed with other
    rounding are on the same side. Equal logits are either all kept or all excluded, because their order is arbitrary.

    Args:
        logits: `(rows, vocab_size)`, already divided by the temperature, at least fp32.
        sampling: Its `top_k` and then `top_p` are applied, as in vLLM.

    Returns:
        `(rows, 1)` in the logits' dtype; -inf for rows that keep all tokens.
    """
    vocabulary = logits.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    if sampling.top_p >= 1.0:
        if top_k == vocabulary:
            return logits.new_full((len(logits), 1), float("-inf"))
        retained, dropped = logits.topk(top_k + 1, dim=-1).values[:, -2:].unbind(-1)
        return _between(retained, logits, dropped)
    ascending = logits.sort(dim=-1).values
    weakest = ascending[:, vocabulary - top_k, None]
    ascending = ascending.masked_fill(ascending < weakest, float("-inf"))
    below = ascending.softmax(-1).cumsum(-1)
    below = below <= 1.0 - sampling.top_p
    below[:, -1] = False  # the likeliest token always stays
    first = below.sum(-1, keepdim=True)
    return _between(ascending.gather(-1, first)[:, 0], logits, None)


def _between(retained: torch.Tensor, logits: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
    """Return the midpoint of `retained` and the next smaller logit of its row, `(rows, 1)`."""
    retained = retained[:, None]
    if dropped is None or bool((dropped[:, None] >= retained).any()):  # equal logits: look for the next smaller one
        dropped = logits.masked_fill(logits >= retained, float("-inf")).amax(-1)
    dropped = dropped[:, None]
    middle = (retained + dropped) / 2
    middle = torch.where(middle > dropped, middle, retained)  # between adjacent floats, it rounds to one of them
    return torch.where(dropped.isfinite(), middle, dropped)
