"""How tokens are sampled, and which distribution their log-probabilities belong to.

An engine samples from processed logits: divided by the temperature, then truncated to the `top_k` likeliest tokens,
then to the smallest set of them that holds `top_p` of the probability. The log-probabilities that training needs are of
that distribution (vLLM's `logprobs_mode="processed_logprobs"`), so the trainer processes its logits the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch

from nrl_models.errors import SamplingError, shown


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each next token is sampled.

    Args:
        temperature: what logits are divided by; 0 takes the likeliest token. Log-probabilities of greedy tokens are
            those of the distribution at temperature 1, without `top_k` and `top_p`, as vLLM gives them.
        top_k: how many of the likeliest tokens can be sampled; 0 is all.
        top_p: the probability of the smallest set of likeliest tokens that can be sampled; 1.0 is all.

    Raises:
        SamplingError: a value has the wrong type or is out of range. `Engine.generate` also checks the range of its
            engine: vLLM samples at 0 and from 0.01 to 2.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not 0.0 <= float(self.temperature) < float("inf"):
            raise SamplingError(f"temperature={shown(self.temperature)}: expected a number of at least 0")
        if not isinstance(self.top_k, Integral) or int(self.top_k) < 0:
            raise SamplingError(f"top_k={shown(self.top_k)}: expected a whole number: 0 (all tokens) or more")
        if not isinstance(self.top_p, Real) or not 0.0 < float(self.top_p) <= 1.0:
            raise SamplingError(f"top_p={shown(self.top_p)}: expected a number above 0, at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def processing(self) -> Sampling:
        """How logits are processed before log-probabilities are taken: not at all for greedy tokens."""
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
    """Logits `(rows, vocabulary)` as tokens are sampled from them, fp32 or wider; -inf for those that cannot be."""
    sampling = sampling.processing
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if sampling.truncates:
        logits = logits.masked_fill(logits < smallest_kept(logits.detach(), sampling), float("-inf"))
    return logits


def smallest_kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """A bound for each row of logits: tokens at or above it can be sampled, the others cannot.

    It lies half way between the smallest kept and the largest dropped logit, so that logits which are recomputed with
    other roundings fall on the same side. Equal logits are all kept or all dropped: which of them a sort puts first is
    arbitrary.

    Args:
        logits: `(rows, vocabulary)`, divided by the temperature already, fp32 or wider.
        sampling: its `top_k` and `top_p` are applied, in this order, as in vLLM.

    Returns:
        `(rows, 1)`, of the logits' dtype; -inf in rows that keep every token.
    """
    vocabulary = logits.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    if sampling.top_p >= 1.0:
        if top_k == vocabulary:
            return logits.new_full((len(logits), 1), float("-inf"))
        kept, dropped = logits.topk(top_k + 1, dim=-1).values[:, -2:].unbind(-1)
        return _between(kept, logits, dropped)
    ascending = logits.sort(dim=-1).values
    weakest = ascending[:, vocabulary - top_k, None]
    ascending = ascending.masked_fill(ascending < weakest, float("-inf"))
    below = ascending.softmax(-1).cumsum(-1)
    below = below <= 1.0 - sampling.top_p
    below[:, -1] = False  # the likeliest token always stays
    first = below.sum(-1, keepdim=True)
    return _between(ascending.gather(-1, first)[:, 0], logits, None)


def _between(kept: torch.Tensor, logits: torch.Tensor, dropped: torch.Tensor | None) -> torch.Tensor:
    """Half way from `kept` down to the next smaller logit of its row."""
    kept = kept[:, None]
    if dropped is None or bool((dropped[:, None] >= kept).any()):  # equal logits: look for the next smaller one
        dropped = logits.masked_fill(logits >= kept, float("-inf")).amax(-1)
    dropped = dropped[:, None]
    return torch.where(dropped.isfinite(), (kept + dropped) / 2, dropped)
