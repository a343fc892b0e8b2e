"""Argument and field names that differ between versions of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from nrl_models.common.upstream import CACHE_NAMES, cache_in, cache_input, cache_name, named_arguments


def _new(input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...


def _old(input_ids: Any, past_key_values: Any = None) -> None: ...


def _state_space(input_ids: Any, cache_params: Any = None) -> None: ...


def _both(input_ids: Any, past_key_values: Any = None, cache: Any = None) -> None: ...


def _passes_on(**kwargs: Any) -> None: ...


class Model:
    def forward(self, input_ids: Any, attention_mask: Any = None, cache: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [(_new, "cache"), (_old, "past_key_values"), (_state_space, "cache_params"), (_both, "cache")],
)
def test_cache_name_from_signature(function: Any, name: str) -> None:
    assert cache_name(function) == name
    assert cache_input(function, 1) == {name: 1}


def test_cache_name_of_function_with_kwargs() -> None:
    assert cache_name(_passes_on) == cache_name(BaseModelOutputWithPast)


def test_cache_in_keyword_arguments() -> None:
    cache = DynamicCache()
    assert all(cache_in({name: cache}) is cache for name in CACHE_NAMES)
    assert cache_in({"cache": None, "past_key_values": cache}) is cache
    assert cache_in({"cache": None}) is None
    assert cache_in({}) is None


def test_cache_in_model_output() -> None:
    cache = DynamicCache()
    fields: Any = {cache_name(BaseModelOutputWithPast): cache}
    assert cache_in(BaseModelOutputWithPast(**fields)) is cache
    assert cache_in(BaseModelOutputWithPast()) is None


def test_named_arguments_of_bound_method() -> None:
    assert named_arguments(Model().forward, (1, 2), {"cache": 3}) == {"input_ids": 1, "attention_mask": 2, "cache": 3}
    assert named_arguments(Model().forward, (), {"labels": 4}) == {"labels": 4}
