"""Cached decoding steps with whatever name the installed signature has for the cache.

A class that takes its cache under one name may swallow the other in `**kwargs`. Then a "cached" step runs without a
cache, and two wrong results agree. So the name is read from the signature, and a step has to differ from the same step
without the cache.

This module needs torch and transformers only: `numbers` runs it in environments without nrl_models.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

FIRST_TEXT_TOKEN = 16
"""Lower token ids are left to special tokens."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "past_buckets_states", "mems")
"""Names that transformers has used for the cache, in arguments and outputs, the newest first."""

STEPS = 3
IGNORED_BELOW = 1e-6
"""A step whose logits differ by less from the same step without a cache has ignored it."""

Inputs = Mapping[str, Any]


class CacheIgnoredError(Exception):
    """A forward took the cache, and its logits are those of a forward without it."""


class NoCacheError(Exception):
    """A class has no argument for a cache, or its output has none."""


def cache_argument(model: PreTrainedModel, *, reference_class: type[PreTrainedModel]) -> str:
    """The name of the argument for the cache, from the installed signature.

    Args:
        model: the model. Its own signature counts; a wrapper that takes anything has its reference's.
        reference_class: the class that `model` must equal.

    Raises:
        NoCacheError: neither names one.
    """
    for forward in (type(model).forward, reference_class.forward):
        parameters = inspect.signature(inspect.unwrap(forward)).parameters
        if name := next((name for name in CACHE_NAMES if name in parameters), None):
            return name
    raise NoCacheError(f"{reference_class.__name__}.forward has none of the arguments {', '.join(CACHE_NAMES)}")


def cache_of(output: Any) -> Any:
    """The cache in a model's output.

    Raises:
        NoCacheError: the output has none.
    """
    for name in CACHE_NAMES:
        if (found := output.get(name)) is not None:
            return found
    raise NoCacheError(f"{type(output).__name__} has none of {', '.join(CACHE_NAMES)}")


def step_tokens(inputs: Inputs, steps: int = STEPS) -> torch.Tensor:
    """The tokens of the steps `(batch, steps)`: text, the same in every sequence."""
    ids = inputs[_prefix(inputs) + "input_ids"]
    return torch.arange(FIRST_TEXT_TOKEN + 1, FIRST_TEXT_TOKEN + 1 + steps).to(ids).expand(len(ids), steps)


@torch.no_grad()
def cached_logits(model: PreTrainedModel, inputs: Inputs, name: str) -> torch.Tensor:
    """Logits `(batch, steps, vocabulary)` of single tokens that see the prompt through the cache only.

    Args:
        model: the model, in evaluation mode.
        inputs: the prompt, perhaps with images and audio.
        name: the argument for the cache.

    Raises:
        CacheIgnoredError: the first step has the logits of a forward without a cache.
        NoCacheError: the model returns no cache.
    """
    prefix, again = _prefix(inputs), _passed_again(inputs)
    output = model(**inputs, use_cache=True)
    logits = []
    tokens = step_tokens(inputs)
    for step in range(tokens.shape[1]):
        token = {f"{prefix}input_ids": tokens[:, step : step + 1]}
        output = model(**again, **token, **{name: cache_of(output)}, use_cache=True)
        logits.append(output.logits[:, -1])
    # After the steps, because a forward without a cache resets what some models keep between forwards.
    alone = model(**again, **{f"{prefix}input_ids": tokens[:, :1]}, use_cache=False).logits[:, -1]
    if (logits[0] - alone).abs().max() < IGNORED_BELOW:
        raise CacheIgnoredError(
            f"{type(model).__name__} ignores the argument {name}: a step with it equals a forward of one token"
        )
    return torch.stack(logits, dim=1)


@torch.no_grad()
def chunk_logits(model: PreTrainedModel, inputs: Inputs, name: str, steps: int = 5) -> torch.Tensor:
    """Logits `(batch, steps, vocabulary)` of several tokens in one cached step.

    Args:
        model, inputs, name: as for `cached_logits`.
        steps: how many tokens.

    Raises:
        NoCacheError: the model returns no cache.
    """
    cache = cache_of(model(**inputs, use_cache=True))
    tokens = {f"{_prefix(inputs)}input_ids": step_tokens(inputs, steps)}
    logits: torch.Tensor = model(**_passed_again(inputs), **tokens, **{name: cache}, use_cache=True).logits
    return logits


@torch.no_grad()
def full_logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The logits that `cached_logits` should give, from one forward without a cache over prompt and steps."""
    tokens = step_tokens(inputs)
    return model(**with_tokens(inputs, tokens), use_cache=False).logits[:, -tokens.shape[1] :]


def with_tokens(inputs: Inputs, tokens: torch.Tensor) -> dict[str, Any]:
    """`inputs` with text tokens at the end. Inputs with an entry for each token repeat their last entry."""
    name = _prefix(inputs) + "input_ids"
    ids, count = inputs[name], tokens.shape[1]
    per_token = ("mask", "ids")
    extended = dict(inputs) | {name: torch.cat([ids, tokens], dim=1)}
    for key, value in inputs.items():
        same_sequence = key != name and key.startswith("decoder_") == name.startswith("decoder_")
        if same_sequence and key.endswith(per_token) and value.ndim > 1 and value.shape[:2] == ids.shape:
            extended[key] = torch.cat([value, *[value[:, -1:]] * count], dim=1)
    return extended


def _passed_again(inputs: Inputs) -> Inputs:
    """Inputs that each step also gets: an encoder's sequence, whose keys and values come from the cache."""
    prefix = _prefix(inputs)
    return {key: value for key, value in inputs.items() if not key.startswith(prefix)} if prefix else {}


def _prefix(inputs: Inputs) -> str:
    return "decoder_" if "decoder_input_ids" in inputs else ""
