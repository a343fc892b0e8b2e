"""Argument and field names that differ between versions of transformers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModel, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from nrl_models.common.upstream import (
    CACHE_NAMES,
    cache_in,
    cache_input,
    cache_name,
    config_value,
    named_arguments,
    with_additive_masks,
)
from tests.unit.common.source_names import is_private, own_names, private_attributes, trees


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


DECLARED = frozenset(
    {
        "_attn_implementation",
        "_can_record_outputs",
        "_ep_plan",
        "_from_config",
        "_keys_to_ignore_on_load_missing",
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_save",
        "_no_split_modules",
        "_supports_sdpa",
        "_tied_weights_keys",
        "_tp_plan",
    }
)
"""Attributes that model classes declare, and that classes outside of transformers have as well."""


def is_upstream_module(file: str) -> bool:
    return Path(file).name.startswith("upstream")


def test_private_names_of_transformers_are_used_in_upstream_modules() -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    model, layer = LlamaForCausalLM(config), nn.Linear(1, 1)
    objects = (model, config, model.generation_config, AutoModel, AutoModel._model_mapping, DynamicCache())
    uses = [
        f"{file}:{line}: {name}"
        for file, tree in trees().items()
        for line, name in private_attributes(tree)
        if not is_upstream_module(file)
        and name not in own_names() | DECLARED
        and not hasattr(layer, name)  # a name of torch
        and any(hasattr(one, name) for one in objects)
    ]
    assert not uses, "\n".join(["use these in nrl_models.common.upstream:", *uses])


def test_private_names_of_transformers_are_imported_in_upstream_modules() -> None:
    imports = [
        f"{file}:{node.lineno}: {node.module}.{alias.name}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for alias in node.names
        if not is_upstream_module(file) and is_private(alias.name)
    ]
    assert not imports, "\n".join(["import these from nrl_models.common.upstream:", *imports])


def test_config_value_reads_common_value_of_layers() -> None:
    config = LlamaConfig(hidden_size=64)
    assert config_value(config, "hidden_size", None) == 64
    assert config_value(config, "absent", 3) == 3


def test_copy_with_additive_masks_leaves_config_unchanged() -> None:
    config = LlamaConfig(attn_implementation="sdpa")
    assert with_additive_masks(config)._attn_implementation == "eager"
    assert config._attn_implementation == "sdpa"
