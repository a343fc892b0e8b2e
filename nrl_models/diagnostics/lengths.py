"""Lengths of prompts and answers: the guide's, or less if the model's limit is lower."""

from __future__ import annotations

from collections.abc import Callable

from nrl_models.errors import ConsistencyError


def fitting_lengths(
    limit: int | None,
    prompt: int | None,
    new: int | None,
    *,
    usual: tuple[int, int],
    turns: int = 1,
) -> tuple[int, int]:
    """Return the number of tokens of the prompt and of each answer.

    Args:
        limit: Maximum number of tokens of a sequence; None if there is no limit.
        prompt, new: Requested numbers; None for the usual ones, or less if those do not fit.
        usual: Usual numbers of prompt and answer.
        turns: Number of answers in one sequence.

    Raises:
        ConsistencyError: If the requested numbers do not fit.
    """
    if limit is None:
        return prompt or usual[0], new or usual[1]
    share = min(1.0, limit / (usual[0] + turns * usual[1]))
    size = new or (max(1, int(share * usual[1])) if prompt is None else min(usual[1], (limit - prompt) // turns))
    length = prompt or min(usual[0], limit - turns * size)
    if length < 1 or size < 1 or length + turns * size > limit:
        answers = "an answer" if turns == 1 else f"{turns} answers"
        length, size = prompt or usual[0], new or usual[1]
        raise ConsistencyError(
            f"a prompt of {length:,} tokens and {answers} of {size:,} need {length + turns * size:,} positions, but "
            f"the model has {limit:,}: use a shorter prompt, or fewer new tokens"
        )
    return length, size


def counting_prompt(counting: Callable[[int], list[int]], count: int, most: int | None = None) -> tuple[list[int], int]:
    """Create a prompt that counts to `count`, or to a lower number if it has more than `most` tokens.

    Args:
        counting: Returns the tokens of a text that counts to a number.
        count: The last number.
        most: Maximum number of tokens.

    Returns:
        The prompt and its last number.

    Raises:
        ConsistencyError: If not even one number fits.
    """
    tokens = counting(count)
    if most is None or len(tokens) <= most:
        return tokens, count
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if len(counting(middle)) <= most:
            low = middle
        else:
            high = middle
    if not low:
        raise ConsistencyError(f"not even a prompt that counts to 1 fits {most} tokens")
    return counting(low), low
