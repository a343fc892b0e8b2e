"""Check the inputs of an engine: sequences, sampling parameters and options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

import torch

from nrl_models.common.forward.processor_outputs import contradictions, without_tokens
from nrl_models.common.value_checks import is_integer
from nrl_models.engines.engine_types import Capabilities, Tokens
from nrl_models.errors import EngineError, EngineOptionError, did_you_mean, itemised, shown
from nrl_models.logprobs.sampling import Sampling


class Limited(Protocol):
    """An engine, which has a name and limits."""

    name: str

    def capabilities(self) -> Capabilities:
        """Return the engine's limits."""


def require_sampling(engine: Limited, sampling: Any) -> None:
    """Check that an argument is a `Sampling`.

    Raises:
        EngineError: If it is not.
    """
    if not isinstance(sampling, Sampling):
        raise EngineError(f"sampling={shown(sampling)}: {engine.name} expects a Sampling, e.g. Sampling(temperature=1)")


def require_limits(engine: Limited, sampling: Sampling, max_new_tokens: int) -> None:
    """Check that the engine supports the temperature, and that `max_new_tokens` is at least 1.

    Raises:
        EngineError: If either is out of range.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise EngineError(f"max_new_tokens={max_new_tokens!r}: expected a whole number of at least 1")
    known = engine.capabilities()
    low, high = known.min_temperature, known.max_temperature
    if not sampling.greedy and not low <= sampling.temperature <= high:
        limit = f"from {low:g}" + (f" to {high:g}" if high < math.inf else "")
        raise EngineError(
            f"temperature={sampling.temperature:g}: {engine.name} samples at 0 (greedy) and at temperatures {limit}. "
            "Choose one of them, or another engine"
        )


SEEDS = -(2**63), 2**64 - 1
"""The smallest and the largest random seed that torch accepts."""


def require_options(
    engine: str,
    unknown: Iterable[str],
    known: Sequence[str],
    *,
    load_format: Any = "auto",
    max_length: Any = None,
    seed: Any = 0,
) -> None:
    """Check the options that were passed to an engine.

    Args:
        engine: The engine's name, for the error.
        unknown: Names of options that it does not have.
        known: Names of its options.
        load_format: `auto` or `dummy`.
        max_length: None or a positive whole number.
        seed: A random seed of torch.

    Raises:
        EngineOptionError: If options are unknown or have invalid values. The message lists all of them.
    """
    wrong = []
    if names := [f"{name}{did_you_mean(name, known)}" for name in unknown]:
        wrong.append(f"{engine} has no option {', '.join(names)}: expected {', '.join(known)}")
    if load_format not in ("auto", "dummy"):
        wrong.append(f"load_format={shown(load_format)}: expected auto or dummy")
    if max_length is not None and not is_integer(max_length, 1):
        wrong.append(f"max_length={shown(max_length)}: expected a positive whole number")
    if not is_integer(seed, *SEEDS):
        wrong.append(f"seed={shown(seed)}: expected a whole number from -2**63 to 2**64 - 1")
    if wrong:
        raise EngineOptionError("; ".join(wrong))


def require_max_length(value: Any) -> None:
    """Check that an engine's length limit is None or a positive whole number.

    Raises:
        EngineError: If it is not.
    """
    require_options("", (), (), max_length=value)


def require_lengths(engine: Limited, sequences: Sequence[Tokens], more: int = 0) -> None:
    """Check that every sequence plus `more` tokens fits the engine, and that all tokens are in its vocabulary.

    Raises:
        EngineError: If some do not fit, or are not lists of token ids. The message lists all of them.
    """
    if isinstance(sequences, str) or not isinstance(sequences, Sequence):  # an iterator could be read only once
        raise EngineError(f"{engine.name} expects a list of token id lists, and got {shown(sequences)}")
    known = engine.capabilities()
    problems = []
    for index, tokens in enumerate(sequences):
        if not isinstance(tokens, Sequence) or not all(
            isinstance(token, Integral) and not isinstance(token, bool) for token in tokens
        ):
            problems.append(f"sequence {index} is {shown(tokens)}: expected a list of token ids")
            continue
        if not tokens:
            problems.append(f"sequence {index} is empty")
        if known.max_length is not None and len(tokens) + more > known.max_length:
            problems.append(
                f"sequence {index} has {len(tokens)} tokens"
                + (f" and {more} more are requested" if more else "")
                + f", and the engine's limit is {known.max_length}"
            )
        if known.vocabulary is not None and tokens and not 0 <= min(tokens) <= max(tokens) < known.vocabulary:
            problems.append(
                f"sequence {index} has token {max(tokens) if max(tokens) >= known.vocabulary else min(tokens)}, and "
                f"the vocabulary has {known.vocabulary}"
            )
    if problems:
        raise EngineError(f"{engine.name} cannot process these sequences:", *itemised(problems))


def require_recordable(engine: Limited, tokens: Tokens, *, decode_last: bool, more: int = 0) -> None:
    """Check the arguments of `Engine.module_calls`, see `require_lengths`.

    Raises:
        EngineError: If the sequence does not fit, or has a single token and `decode_last` is set.
    """
    require_lengths(engine, [tokens], more)
    if decode_last and len(tokens) < 2:
        raise EngineError(
            f"{engine.name} decodes the last token after the tokens before it: decode_last expects at least two tokens"
        )


def require_one_each(sequences: Sequence[Tokens], **inputs: Any) -> None:
    """Check that inputs have an entry for each sequence; None if they were not passed.

    Raises:
        EngineError: If some do not.
    """
    for name, values in inputs.items():
        if values is not None and (not isinstance(values, Sequence) or len(values) != len(sequences)):
            description = f"{len(values)} entries" if isinstance(values, Sequence) else shown(values)
            raise EngineError(
                f"{name} has {description}: expected a list of one for each of {len(sequences)} sequences"
            )


def plain_tokens(sequences: Sequence[Tokens]) -> list[list[int]]:
    """Return sequences as lists of Python integers, without NumPy's, which JSON does not accept."""
    return [[int(token) for token in tokens] for tokens in sequences]


def media_inputs(
    engine: Limited, sequences: Sequence[Tokens], model_inputs: Sequence[Any]
) -> list[Mapping[str, torch.Tensor]]:
    """Return processor outputs without token ids and masks, which the engine makes. One object remains one.

    Raises:
        EngineError: If an output is for other token ids, or has padding.
    """
    model_inputs = list(model_inputs)  # columns of a data set create a new object at each access
    checked = [contradictions(tokens, inputs) for tokens, inputs in zip(sequences, model_inputs, strict=True)]
    problems = [
        f"model_inputs of sequence {index} {each}" for index, messages in enumerate(checked) for each in messages
    ]
    if problems:
        raise EngineError(f"{engine.name} cannot process these sequences:", *itemised(problems))
    # Engines batch sequences with the same object.
    media = {id(inputs): without_tokens(inputs) for inputs in model_inputs}
    return [media[id(inputs)] for inputs in model_inputs]
