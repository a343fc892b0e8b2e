"""A synthetic data set that a model of a few million parameters learns in a minute on a CPU."""

from __future__ import annotations

import random
from typing import Any

from nrl_models.errors import Problem, ProblemKind, RecipeError


def sums(*, count: int = 2000, largest: int = 9, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of sums of two numbers: `prompt` "3 + 4 =", `completion` " 7" and `answer` "7".

    Args:
        count: Number of rows.
        largest: Largest number to add.
        seed: Random seed.

    Raises:
        RecipeError: If `count` or `largest` is less than 1.
    """
    problems = [
        Problem(ProblemKind.FILE, f"data.{name}", f"is {value}, expected at least 1")
        for name, value in (("count", count), ("largest", largest))
        if value < 1
    ]
    if problems:
        raise RecipeError("cannot make sums", problems)
    generator = random.Random(seed)
    pairs = [(generator.randint(0, largest), generator.randint(0, largest)) for _ in range(count)]
    return [{"prompt": f"{a} + {b} =", "completion": f" {a + b}", "answer": str(a + b)} for a, b in pairs]
