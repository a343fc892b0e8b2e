"""What is quoted of an error of vLLM."""

from __future__ import annotations

import pytest

from nrl_models.engines.vllm import _first_lines


def raised(error: Exception) -> Exception:
    """The error, with where it was raised."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_an_error_is_quoted() -> None:
    assert _first_lines(raised(ValueError("no such thing"))) == "ValueError: no such thing"
    assert _first_lines(ValueError("x" * 700)) == f"ValueError: {'x' * 588} ..."


def test_an_error_without_words_is_told_by_its_code() -> None:
    assert _first_lines(raised(AssertionError())) == "AssertionError: raise error"
    assert _first_lines(AssertionError()) == "AssertionError: "
