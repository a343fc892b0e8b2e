"""Checks of a processor's output for one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from nrl_models.common.forward.token_types import PER_TOKEN
from nrl_models.errors import shown

FROM_TOKENS = ("input_ids", "attention_mask")
"""Outputs of a processor that follow from the token IDs of a sequence without padding."""


def without_tokens(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output of a processor for one sequence without `FROM_TOKENS`, see `contradictions`."""
    return {name: value for name, value in inputs.items() if name not in FROM_TOKENS}


def contradictions(tokens: Sequence[int] | torch.Tensor, inputs: Any) -> list[str]:
    """List what is wrong with the output of a processor for one sequence.

    Args:
        tokens: Token IDs of the sequence. The processor may have only its beginning, for example the prompt.
        inputs: The output: a dictionary, which may have `FROM_TOKENS`.
    """
    if not isinstance(inputs, Mapping):
        return [f"is a {type(inputs).__name__}: expected a dict"]
    outputs = {name: value for name, value in inputs.items() if value is not None}
    of_tokens = {name: value for name, value in outputs.items() if name in FROM_TOKENS or name in PER_TOKEN}
    untyped = {name: value for name, value in of_tokens.items() if not isinstance(value, torch.Tensor)}
    untyped |= {name: value for name, value in outputs.items() if isinstance(value, _SEQUENCES) and _is_numbers(value)}
    if untyped:
        wrong = (f"has {name}={shown(value)}" for name, value in untyped.items())
        return [f"{each}: expected a tensor, as with return_tensors='pt'" for each in wrong]
    shape = 1, len(tokens)
    problems = [
        f"has {name} {tuple(value.shape)}: expected {shape}, a value for each token, also of a completion"
        for name, value in of_tokens.items()
        if name in PER_TOKEN and value.shape[:2] != shape
    ]
    if "input_ids" in outputs:
        ids, sequence_ids = outputs["input_ids"].flatten().cpu(), torch.as_tensor(tokens).flatten()
        if not torch.equal(ids, sequence_ids[: len(ids)].to(ids)):
            problems.append("has other input_ids than the sequence: pass the token ids of the same processor call")
    if "attention_mask" in outputs and not bool(outputs["attention_mask"].all()):
        problems.append("has zeros in attention_mask: expected a sequence without padding")
    return problems


_SEQUENCES = list, tuple, numpy.ndarray


def _is_numbers(value: Any) -> bool:
    """Return True for a number, and for a sequence of numbers or of such sequences."""
    return isinstance(value, int | float | numpy.ndarray) or (
        isinstance(value, _SEQUENCES) and all(map(_is_numbers, value))
    )
