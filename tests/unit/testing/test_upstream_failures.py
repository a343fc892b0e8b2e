"""Failures of generated tests that transformers' class causes are recognized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nrl_models.testing import upstream_failures
from nrl_models.testing.suite.asserts import assert_same_tensors
from nrl_models.testing.upstream_failures import is_of_reading_back, tensors_not_read_back


class ResetAfterLoading(LlamaForCausalLM):
    """A class that sets a value after loading, like Zaya of transformers."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().from_pretrained(*args, **kwargs)
        with torch.no_grad():
            model.lm_head.weight[-1] = -1.0
        return model


@pytest.mark.parametrize(
    ("model_class", "expected"), [(LlamaForCausalLM, set()), (ResetAfterLoading, {"lm_head.weight"})]
)
def test_tensors_changed_by_transformers_after_loading(
    model_class: type[LlamaForCausalLM], expected: set[str], llama_config: LlamaConfig
) -> None:
    model = model_class(llama_config)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    case: Any = SimpleNamespace(reference=lambda dtype: model, reference_class=model_class)
    assert tensors_not_read_back(case) == expected


@pytest.mark.parametrize(
    ("actual", "is_known"),
    [
        ({"a": torch.ones(2), "b": torch.zeros(2)}, True),
        ({"a": torch.ones(2), "b": torch.ones(2)}, False),
        ({"a": torch.ones(2)}, False),
        ({"a": torch.ones(3), "b": torch.zeros(2)}, False),
    ],
    ids=["known tensor", "other tensor", "missing tensor", "other shape"],
)
def test_only_known_tensors_explain_errors(
    actual: dict[str, torch.Tensor], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_failures, "tensors_not_read_back", lambda case: {"a"})
    case: Any = None
    with pytest.raises(AssertionError) as raised:
        assert_same_tensors(actual, {"a": torch.zeros(2), "b": torch.zeros(2)})
    assert is_of_reading_back(raised.value, case) is is_known
    assert not is_of_reading_back(AssertionError(str(raised.value)), case)


def test_class_that_cannot_save_explains_no_errors() -> None:
    case: Any = SimpleNamespace()  # its attributes raise
    assert tensors_not_read_back(case) == set()
