"""What a wrong party may have done instead: each guess is computed, and the one that gives its numbers is the answer.

A guess is cheap next to a search: the log-probabilities a party would give had it left out the temperature, been off
by a token, dropped the soft cap, kept the weights of before, or not read a key of the configuration. No model is known
by name: what can be left out is found in the model's head and in its configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from nrl_models.consistency.references import References
from nrl_models.logprobs.chunked import chunked_statistics
from nrl_models.logprobs.head import OutputHead, hidden_states_and_head
from nrl_models.logprobs.sampling import Sampling

EXPLAINED = 0.1
"""A guess has to leave less than this share of the difference."""

FAR = 10.0
"""Nats from which on two log-probabilities of a token are just different."""

BLOCKS = (1, 16, 32, 64, 128)
"""Sizes of the blocks in which engines cache keys and values."""

Guess = tuple[str, torch.Tensor]
"""What a party may have done instead, to follow "as if", and what it would give: `(sequences, generated)`."""

LARGE = 3e9
"""Parameters from which on no models of other configurations are built."""


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Mean absolute difference, in nats; one token counts for `FAR` at most, and so does one that only one excludes."""
    same = (first == second) | (first.isnan() & second.isnan())
    difference = (first - second).abs().nan_to_num(nan=FAR, posinf=FAR).clamp(max=FAR)
    return torch.where(same, 0.0, difference).mean().item()


class Guesses:
    """Everything one may guess about a party's log-probabilities of some sequences.

    Args:
        references: models with the right weights.
        tokens: `(sequences, length)`.
        generated: how many tokens at the end count.
        sampling: what they were sampled with.
    """

    def __init__(self, references: References, tokens: torch.Tensor, generated: int, sampling: Sampling) -> None:
        self.references, self.tokens, self.generated, self.sampling = references, tokens, generated, sampling
        model = references.model(torch.float32)
        with torch.no_grad():
            self.hidden, self.head = hidden_states_and_head(model, tokens.to(model.device))

    def explain(self, party: torch.Tensor, expected: torch.Tensor, floor: float) -> str:
        """The first guess that gives a party's numbers, to follow "as if"; empty if none does.

        Args:
            party: `(sequences, generated)`: its log-probabilities.
            expected: what they should be.
            floor: mean absolute difference, in nats, that rounding leaves.
        """
        off = distance(party, expected)
        for text, logprobs in self:
            left = distance(party, logprobs)
            if left <= max(EXPLAINED * off, floor) and left < 0.5 * off:
                return text
        return ""

    def __iter__(self) -> Iterator[Guess]:
        """The guesses, cheap ones first."""
        yield from self.about_sampling()
        yield from self.about_alignment()
        yield from self.about_the_head()
        yield from self.about_weights()
        yield from self.about_configuration()

    def about_sampling(self) -> Iterator[Guess]:
        """Some of temperature, top-k and top-p left out."""
        asked = self.sampling.processing
        tried = {asked}
        for text, variant in (
            ("the temperature was not applied", replace(asked, temperature=1.0)),
            ("top-k and top-p were not applied", Sampling(asked.temperature)),
            ("neither temperature nor top-k and top-p were applied", Sampling()),
            ("top-p was not applied", replace(asked, top_p=1.0)),
            ("top-k was not applied", replace(asked, top_k=0)),
        ):
            if variant not in tried:
                tried.add(variant)
                yield text, self._logprobs(self.hidden, self.head, variant)

    def about_alignment(self) -> Iterator[Guess]:
        """Each token given the number of the one before or behind it."""
        count = self.generated
        extended = self._logprobs(self.hidden, self.head, self.sampling, count + 1)
        unknown = torch.full_like(extended[:, :1], math.nan)
        yield "each token had the log-probability of the one before it", extended[:, :count]
        behind = torch.cat([extended[:, 2:], unknown], 1)
        yield "each token had the log-probability of the one behind it", behind

    def about_the_head(self) -> Iterator[Guess]:
        """The scale or the soft cap behind the output embedding left out."""
        for text, head in (
            ("the soft cap of the logits was not applied", replace(self.head, cap=None)),
            ("the scale of the logits was not applied", replace(self.head, scale=1.0)),
            ("the scale of the logits was applied twice", replace(self.head, scale=self.head.scale**2)),
        ):
            if (head.scale, head.cap) != (self.head.scale, self.head.cap):
                yield text, self._logprobs(self.hidden, head, self.sampling)

    def about_weights(self) -> Iterator[Guess]:
        """The weights of before the last change."""
        before = self.references.with_previous_weights(torch.float32)
        if before is None:
            return
        yield "the weights were those of before the last refit", self._of_model(before)
        prompt = self.tokens.shape[1] - self.generated
        # A cache keeps whole blocks, and never the last token of a prompt.
        for cached in sorted({(prompt - 1) // block * block for block in BLOCKS} - {0}, reverse=True):
            text = f"the keys and values of the first {cached} tokens were cached from before the last refit"
            try:
                values = self._with_cache_of(before, cached)
            except Exception:  # a model that keeps something else in its cache
                return
            yield text, values

    def about_configuration(self) -> Iterator[Guess]:
        """A key of the configuration not read."""
        original = self.references.model(torch.float32)
        if original.num_parameters() > LARGE:
            return
        for key, value in alternatives(original.config.get_text_config()):
            try:
                values = self._of_model(self.references.with_config({key: value}))
            except Exception:  # not every combination of values makes a model
                continue
            was = getattr(original.config.get_text_config(), key)
            yield f"`{key}` were {value} and not {was}", values

    @torch.no_grad()
    def _with_cache_of(self, before: PreTrainedModel, cached: int) -> torch.Tensor:
        """The right weights, on keys and values that another model computed for the first tokens."""
        model = self.references.model(torch.float32)
        tokens = self.tokens.to(model.device)
        cache = before(input_ids=tokens[:, :cached], use_cache=True).past_key_values
        hidden, head = hidden_states_and_head(model, tokens[:, cached:], past_key_values=cache)
        unknown = hidden.new_zeros(len(hidden), cached, hidden.shape[2])  # of the prompt, which does not count
        return self._logprobs(torch.cat([unknown, hidden], 1), head, self.sampling)

    @torch.no_grad()
    def _of_model(self, model: PreTrainedModel) -> torch.Tensor:
        hidden, head = hidden_states_and_head(model, self.tokens.to(model.device))
        return self._logprobs(hidden, head, self.sampling)

    @torch.no_grad()
    def _logprobs(
        self, hidden: torch.Tensor, head: OutputHead, sampling: Sampling, count: int | None = None
    ) -> torch.Tensor:
        """Of the last `count` tokens, `(sequences, count)`; of those generated by default."""
        rows, length = self.tokens.shape
        first = length - (count or self.generated)
        tokens = self.tokens[:, first:].to(hidden.device)
        states = hidden[:, first - 1 : length - 1]
        found = chunked_statistics(states.flatten(0, 1), head, tokens.flatten(), sampling).logprobs
        return found.view(rows, -1).double().cpu()


def alternatives(config: Any) -> Iterator[tuple[str, Any]]:
    """Keys of a configuration and values they have where nobody reads them: none, one, or the class's default."""
    default = type(config)()
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        yield "layer_types", ["full_attention"] * len(config.layer_types)
    for key, value in config.to_dict().items():
        if not hasattr(config, key) or isinstance(value, (str, list)) or key.startswith("_"):
            continue
        usual = getattr(default, key, None)
        if isinstance(value, dict):
            if "rope_theta" in value:
                yield from _rope_alternatives(key, value)
            continue
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if "softcap" in key or "clip" in key:
            yield key, None
        elif key == "sliding_window":
            yield from ((key, one) for one in (None, value + 1, value - 1))
        elif key.endswith("_scalar"):
            yield key, getattr(config, "head_dim", 1)
        elif key.endswith(("_multiplier", "_scale", "_scaling", "_factor")) and value != 1.0:
            yield key, 1.0
        elif key.endswith("_eps") or key == "rope_theta":
            for one in dict.fromkeys((usual, *((1e-5, 1e-6) if key.endswith("_eps") else (10_000.0,)))):
                if isinstance(one, (int, float)) and one != value:
                    yield key, one


def _rope_alternatives(key: str, value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    theta = value["rope_theta"]
    if value.get("rope_type", "default") != "default":
        yield key, {"rope_type": "default", "rope_theta": theta}
    for other in (10_000.0, 500_000.0, 1_000_000.0):
        if theta != other:
            yield key, value | {"rope_theta": other}
