"""What is quoted of an error of vLLM."""

from __future__ import annotations

from nrl_models.engines.vllm import _first_lines


def raised(error: Exception) -> Exception:
    """The error, with where it was raised."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_is_quoted() -> None:
    assert _first_lines(raised(ValueError("no such thing"))) == "ValueError: no such thing"
    assert _first_lines(ValueError("x" * 700)) == f"ValueError: {'x' * 588} ..."


def test_an_error_without_words_is_told_by_its_code() -> None:
    assert _first_lines(raised(AssertionError())) == "AssertionError: raise error"
    assert _first_lines(AssertionError()) == "AssertionError: "
