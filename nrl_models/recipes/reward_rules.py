"""Rule-based rewards: functions of the row, the completion's text, and whether the model ended it."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from nrl_models.errors import Problem, ProblemKind, RecipeError
from nrl_models.recipes.rows import Row

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][+-]?\d+)?"
)
"""A decimal number. A minus sign after a digit, letter or bracket is a subtraction or a range. Commas
separate groups of three digits."""

_BRACES = re.compile(r"\\boxed\{|[{}]")


def last_number(row: Row, completion: str, ended: bool, *, answer: str = "answer") -> float:
    """Return 1 if the last number of a completion equals the last number of the row's answer, else 0.

    A truncated completion gets 0.

    Args:
        row: Row of the data set.
        completion: Text of the completion, without special tokens.
        ended: Whether the model ended the completion.
        answer: Column with the right answer. GSM8K's answers end with the number.
    """
    completion_numbers, right = _NUMBER.findall(completion), _NUMBER.findall(_answer(row, answer))
    if not (ended and completion_numbers and right):
        return 0.0
    value = _value(completion_numbers[-1])
    return float(value is not None and value == _value(right[-1]))


def _answer(row: Row, column: str) -> str:
    if column not in row:
        problem = Problem(ProblemKind.FILE, "a row", f"has {', '.join(row)}: expected {column}, the right answer")
        raise RecipeError("cannot compute the reward", [problem], ["name the column with reward.answer=COLUMN"])
    return str(row[column])


def _value(number: str) -> Decimal | None:
    """Return the value; None if its exponent is too large, which a completion may contain."""
    try:
        return Decimal(number.replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None


def boxed(row: Row, completion: str, ended: bool, *, answer: str = "answer") -> float:
    r"""Return 1 if the contents of the last `\\boxed{...}` equal the row's answer, ignoring spaces, else 0.

    A truncated completion gets 0.

    Args:
        row: Row of the data set.
        completion: Text of the completion, without special tokens.
        ended: Whether the model ended the completion.
        answer: Column with the right answer.
    """
    right, contents = _answer(row, answer), _last_boxed(completion)
    return float(ended and contents is not None and "".join(contents.split()) == "".join(right.split()))


def _last_boxed(text: str) -> str | None:
    """Return the contents of the last complete box, with braces of any depth; None if there is none."""
    contents = None
    starts: list[int | None] = []  # of open braces; None for those that are not of a box
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            starts.append(None if brace[0] == "{" else brace.end())
        elif starts and (start := starts.pop()) is not None:
            contents = text[start : brace.start()]
    return contents
