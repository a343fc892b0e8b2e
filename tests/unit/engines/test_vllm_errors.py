"""Quoting errors of vLLM."""

from __future__ import annotations

import pytest

from nrl_models.errors import one_line


def raised(error: Exception) -> Exception:
    """Return the error with its traceback."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_an_error_is_quoted() -> None:
    assert one_line(raised(ValueError("no such thing"))) == "ValueError: no such thing"
    assert one_line(ValueError("2 errors:\n  a\n  b")) == "ValueError: 2 errors: a b"
    assert one_line(ValueError("x" * 700)) == f"ValueError: {'x' * 700}"  # the error of a worker ends with its cause


def test_an_error_without_words_is_told_by_its_code() -> None:
    assert one_line(raised(AssertionError())) == "AssertionError: raise error"
    assert one_line(AssertionError()) == "AssertionError: "
