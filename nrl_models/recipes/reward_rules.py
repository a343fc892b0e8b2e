"""Rewards that a rule decides. A reward gets the row, the reply's text, and whether the model ended it."""

from __future__ import annotations

import re

from nrl_models.recipes.rows import Row

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def last_number(row: Row, reply: str, ended: bool, *, answer: str = "answer") -> float:
    """1 if the last number of a reply is the last of the row's answer, else 0; also 0 if it was cut off.

    Args:
        row: of the data.
        reply: the text, without special tokens.
        ended: whether the model ended it.
        answer: the column that has the right answer; GSM8K's ends with the number.
    """
    given, right = _NUMBER.findall(reply), _NUMBER.findall(str(row[answer]))
    return float(bool(ended and given and right) and _value(given[-1]) == _value(right[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def boxed(row: Row, reply: str, ended: bool, *, answer: str = "answer") -> float:
    r"""1 if what the last `\\boxed{...}` of a reply holds is the row's answer, spaces apart, else 0; also 0 if cut off.

    Args:
        row: of the data.
        reply: the text, without special tokens.
        ended: whether the model ended it.
        answer: the column that has the right answer.
    """
    given = _BOXED.findall(reply)
    return float(bool(ended and given) and "".join(given[-1].split()) == "".join(str(row[answer]).split()))
