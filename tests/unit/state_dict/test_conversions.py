"""Comparing conversions by their effect."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from versions import since

from nrl_models.common.state_dict.layouts import are_alike
from nrl_models.common.upstream_conversions import PrefixChange, WeightRenaming


@since("5.9")
def test_are_alike_compares_conversions_by_effect() -> None:
    with torch.device("meta"):
        mixtral = MixtralForCausalLM(MixtralConfig(hidden_size=64, intermediate_size=8, num_hidden_layers=1))
        qwen = Qwen3MoeForCausalLM(Qwen3MoeConfig(hidden_size=64, intermediate_size=8, num_hidden_layers=1))
    assert are_alike(get_model_conversion_mapping(mixtral), get_model_conversion_mapping(mixtral))
    assert not are_alike(get_model_conversion_mapping(mixtral), get_model_conversion_mapping(qwen))
    assert not are_alike(get_model_conversion_mapping(mixtral), get_model_conversion_mapping(mixtral)[:-1])
    assert not are_alike([], [])
    assert not are_alike(None, None)
    assert not are_alike([WeightRenaming("a", "b")], [WeightRenaming("a", "c")])
    if PrefixChange.__module__.startswith("transformers"):  # from 5.6
        assert not are_alike([WeightRenaming("a", "b")], [PrefixChange(prefix_to_remove="a")])
    scoped = WeightRenaming("a", "b")
    scoped.scope_prefix = "tower"
    assert not are_alike([WeightRenaming("a", "b")], [scoped])
    first, second = get_model_conversion_mapping(mixtral), get_model_conversion_mapping(mixtral)
    converter = next(step for step in second if getattr(step, "operations", None))
    converter.operations[0].dim = 7
    assert not are_alike(first, second)
