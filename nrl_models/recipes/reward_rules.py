"""Rule-based rewards: functions of the row, the completion's text, and whether the model ended it."""

from __future__ import annotations

import re

from nrl_models.recipes.rows import Row

_NUMBER = re.compile(r"(?:(?<![\w.)\]])[-\u2212])?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][+-]?\d+)?")
"""A decimal number. A minus sign after a digit, letter or bracket is a subtraction or a range."""

_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def last_number(row: Row, reply: str, ended: bool, *, answer: str = "answer") -> float:
    """Return 1 if the last number of a completion equals the last number of the row's answer, else 0.

    A truncated completion gets 0.

    Args:
        row: Row of the data set.
        reply: Text of the completion, without special tokens.
        ended: Whether the model ended the completion.
        answer: Column with the right answer. GSM8K's answers end with the number.
    """
    given, right = _NUMBER.findall(reply), _NUMBER.findall(str(row[answer]))
    return float(bool(ended and given and right) and _value(given[-1]) == _value(right[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("\u2212", "-"))


def boxed(row: Row, reply: str, ended: bool, *, answer: str = "answer") -> float:
    r"""Return 1 if the contents of the last `\\boxed{...}` equal the row's answer, ignoring spaces, else 0.

    A truncated completion gets 0.

    Args:
        row: Row of the data set.
        reply: Text of the completion, without special tokens.
        ended: Whether the model ended the completion.
        answer: Column with the right answer.
    """
    given = _BOXED.findall(reply)
    return float(bool(ended and given) and "".join(given[-1].split()) == "".join(str(row[answer]).split()))
