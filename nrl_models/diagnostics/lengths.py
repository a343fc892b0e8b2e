"""How long prompts and answers are: the guide's lengths, or as long as the model takes."""

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
    """Tokens of a prompt, and of each answer.

    Args:
        limit: tokens of a sequence at most; None if there is no limit.
        prompt, new: what was asked for; None for the usual, or less if that does not fit.
        usual: of prompt and answer.
        turns: answers that go into one sequence.

    Raises:
        ConsistencyError: what was asked for does not fit.
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
            f"a prompt of {length:,} tokens and {answers} of {size:,} need {length + turns * size:,} positions, and "
            f"the model has room for {limit:,}: ask for a shorter prompt, or for fewer new tokens"
        )
    return length, size


def counting_prompt(counting: Callable[[int], list[int]], count: int, most: int | None = None) -> tuple[list[int], int]:
    """A prompt that counts to `count`, or as far as fits `most` tokens; and how far it counts.

    Args:
        counting: gives the tokens of a text that counts to a number.
        count: how far it is to count.
        most: tokens at most.

    Raises:
        ConsistencyError: not even one number fits.
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
