"""Quoting errors of vLLM, and options that vLLM ignores."""

from __future__ import annotations

import pytest

from nrl_models.engines.vllm.vllm_start import require_model_impl
from nrl_models.errors import EngineError, one_line


def raised(error: Exception) -> Exception:
    """Return the error with its traceback."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_one_line_error() -> None:
    assert one_line(raised(ValueError("no such thing"))) == "ValueError: no such thing"
    assert one_line(ValueError("2 errors:\n  a\n  b")) == "ValueError: 2 errors: a b"
    assert (
        one_line(ValueError("x" * 700)) == f"ValueError: {'x' * 700}"
    )  # not truncated: worker errors end with the cause


def test_one_line_error_without_message_shows_source_line() -> None:
    assert one_line(raised(AssertionError())) == "AssertionError: raise error"
    assert one_line(AssertionError()) == "AssertionError: "


def test_misspelled_model_impl_raises() -> None:
    with pytest.raises(EngineError, match=r"model_impl='transformer': expected one of transformers, vllm"):
        require_model_impl("transformer", ("vllm", "transformers"))
    require_model_impl("vllm", ("vllm", "transformers"))
