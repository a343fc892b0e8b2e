"""Checks of the arguments of losses."""

from __future__ import annotations

import math
from typing import Any

import torch

from nrl_models.common.dtypes import unreadable
from nrl_models.common.value_checks import not_zero_or_one
from nrl_models.errors import NonFiniteError, UnknownArgumentError, shown


def require_tensors(**values: Any) -> None:
    """Check that arguments are dense tensors of real numbers; None is an argument that was not passed.

    Raises:
        UnknownArgumentError: If one is not.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise UnknownArgumentError(f"{name}={shown(value)}: expected a tensor")
        if value is not None and value.is_complex():
            raise UnknownArgumentError(f"{name} is of {value.dtype}: expected real numbers")
        if value is not None and (value.is_nested or value.layout is not torch.strided):
            raise UnknownArgumentError(f"{name} {unreadable(value)}")


def require_one_shape(dimensions: str, **values: torch.Tensor | None) -> None:
    """Check that tensors have one shape, so that torch does not broadcast them.

    Args:
        dimensions: Names of the dimensions, separated by commas.
        values: The tensors by name. The first has the shape that the others need; None is ignored.

    Raises:
        ValueError: If shapes differ.
        UnknownArgumentError: If an argument is not a tensor.
    """
    require_tensors(**values)
    shapes = {name: tuple(value.shape) for name, value in values.items() if value is not None}
    first, *others = shapes.values()
    if len(first) != len(dimensions.split(", ")) or any(shape != first for shape in others):
        named_shapes = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"expected ({dimensions}) of all; got {named_shapes}")


def require_mask(mask: torch.Tensor) -> None:
    """Check that a mask has no values other than 0 and 1, or False and True.

    Raises:
        ValueError: If it has.
    """
    if mask.dtype == torch.bool or torch.compiler.is_compiling():  # compiled code cannot read values
        return
    if (other := not_zero_or_one(mask)) is not None:
        raise ValueError(
            f"mask has the value {other:g}: expected 1 or True for sampled tokens and 0 or False for "
            "others. To scale the loss of a token, multiply the result of token_weights"
        )


def require_values(logprobs: torch.Tensor, weights: torch.Tensor, **wrong: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Check that only counted tokens of sequences without NaN in `logprobs` have valid values.

    A NaN log-probability of the policy is left alone: its gradient is NaN, so the update is skipped.

    Args:
        logprobs: Log-probabilities of the policy, `(batch, seq_len)`.
        weights: Weights of the tokens, `(batch, seq_len)`.
        wrong: By name of an argument: its values, and True for each invalid one, `(batch, seq_len)` each.

    Raises:
        NonFiniteError: If a weight is negative, NaN or infinite, or a counted token has an invalid value.
    """
    if torch.compiler.is_compiling():  # the values of tensors are unknown
        return
    counted = (weights > 0) & ~(logprobs.isnan() & (weights > 0)).any(1, keepdim=True)
    every = {"weights": (weights, ~((weights >= 0) & (weights < math.inf)))}
    every |= {name: (values, invalid & counted) for name, (values, invalid) in wrong.items()}
    if not bool(torch.stack([invalid.any() for _, invalid in every.values()]).any()):
        return
    name, values, invalid = next((name, *pair) for name, pair in every.items() if bool(pair[1].any()))
    row, column = invalid.nonzero()[0].tolist()
    raise NonFiniteError(
        f"{name} of token {column} of sequence {row}: {values[row, column].item()}, with a log-probability of "
        f"{logprobs[row, column].item():g} and a weight of {weights[row, column].item():g}. Expected finite numbers, "
        "and weights of at least 0. Set the weights of tokens without a value to 0"
    )
