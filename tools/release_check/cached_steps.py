"""Decoding steps with a cache, whose argument name differs between versions and classes.

A class that takes its cache under one name may ignore another name in `**kwargs`. A "cached" step then runs without a
cache, and two wrong results agree. Therefore the name is read from the signature, and a step must differ from the same
step without the cache.

This module only needs torch and transformers, because `numbers` runs it in environments without nrl_models.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

FIRST_TEXT_TOKEN = 16
"""Lower token ids are reserved for special tokens."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "past_buckets_states", "mems")
"""Names that transformers has used for the cache, in arguments and outputs, newest first."""

STEPS = 3
IGNORED_BELOW = 1e-6
"""If the logits of a step with and without the cache differ by less, the step has ignored the cache."""

Inputs = Mapping[str, Any]


class CacheIgnoredError(Exception):
    """A forward accepted the cache, but its logits are those without it."""


class NoCacheError(Exception):
    """A class has no argument for a cache, or its output has no cache."""


def cache_argument(model: PreTrainedModel, *, reference_class: type[PreTrainedModel]) -> str:
    """Return the name of the cache argument, from the installed signature.

    Args:
        model: The model. If its forward is a wrapper that takes any argument, the reference's signature is used.
        reference_class: The class that `model` must equal.

    Raises:
        NoCacheError: Neither signature has a cache argument.
    """
    for forward in (type(model).forward, reference_class.forward):
        parameters = inspect.signature(inspect.unwrap(forward)).parameters
        if name := next((name for name in CACHE_NAMES if name in parameters), None):
            return name
    raise NoCacheError(f"{reference_class.__name__}.forward has none of the arguments {', '.join(CACHE_NAMES)}")


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output.

    Raises:
        NoCacheError: The output has none.
    """
    for name in CACHE_NAMES:
        if (found := output.get(name)) is not None:
            return found
    raise NoCacheError(f"{type(output).__name__} has none of {', '.join(CACHE_NAMES)}")


def step_tokens(inputs: Inputs, steps: int = STEPS) -> torch.Tensor:
    """Return the tokens of the steps `(batch, steps)`: text, the same in every sequence."""
    ids = inputs[_prefix(inputs) + "input_ids"]
    return torch.arange(FIRST_TEXT_TOKEN + 1, FIRST_TEXT_TOKEN + 1 + steps).to(ids).expand(len(ids), steps)


@torch.no_grad()
def cached_logits(model: PreTrainedModel, inputs: Inputs, name: str) -> torch.Tensor:
    """Return logits `(batch, steps, vocabulary)` of single tokens that depend on the prompt only through the cache.

    Args:
        model: The model, in evaluation mode.
        inputs: The prompt, optionally with images and audio.
        name: The argument for the cache.

    Raises:
        CacheIgnoredError: The first step has the logits of a forward without a cache.
        NoCacheError: The model returns no cache.
    """
    prefix, again = _prefix(inputs), _passed_again(inputs)
    output = model(**inputs, use_cache=True)
    logits = []
    tokens = step_tokens(inputs)
    for step in range(tokens.shape[1]):
        token = {f"{prefix}input_ids": tokens[:, step : step + 1]}
        output = model(**again, **token, **{name: cache_of(output)}, use_cache=True)
        logits.append(output.logits[:, -1])
    # After the steps, because a forward without a cache resets the state that some models keep between forwards.
    alone = model(**again, **{f"{prefix}input_ids": tokens[:, :1]}, use_cache=False).logits[:, -1]
    if (logits[0] - alone).abs().max() < IGNORED_BELOW:
        raise CacheIgnoredError(
            f"{type(model).__name__} ignores the argument {name}: a step with it equals a forward of one token"
        )
    return torch.stack(logits, dim=1)


@torch.no_grad()
def chunk_logits(model: PreTrainedModel, inputs: Inputs, name: str, steps: int = 5) -> torch.Tensor:
    """Return logits `(batch, steps, vocabulary)` of several tokens in one cached step.

    Args:
        model, inputs, name: As for `cached_logits`.
        steps: Number of tokens.

    Raises:
        NoCacheError: The model returns no cache.
    """
    cache = cache_of(model(**inputs, use_cache=True))
    tokens = {f"{_prefix(inputs)}input_ids": step_tokens(inputs, steps)}
    logits: torch.Tensor = model(**_passed_again(inputs), **tokens, **{name: cache}, use_cache=True).logits
    return logits


@torch.no_grad()
def full_logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """Compute the expected result of `cached_logits` in one forward without a cache over prompt and steps."""
    tokens = step_tokens(inputs)
    return model(**with_tokens(inputs, tokens), use_cache=False).logits[:, -tokens.shape[1] :]


def with_tokens(inputs: Inputs, tokens: torch.Tensor) -> dict[str, Any]:
    """Append text tokens to `inputs`. Inputs with one entry per token repeat their last entry."""
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
    """Return the inputs passed in each step: an encoder's sequence, whose keys and values come from the cache."""
    prefix = _prefix(inputs)
    return {key: value for key, value in inputs.items() if not key.startswith(prefix)} if prefix else {}


def _prefix(inputs: Inputs) -> str:
    return "decoder_" if "decoder_input_ids" in inputs else ""
