"""Names and shapes of a model's tensors in other layouts, compared with transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WEIGHTS, assert_same, edit_config, hf_tensors, new_model, stored
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV3Config, Gemma3Config, LlamaConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama
from versions import since

from nrl_models import StateDictAdapter
from nrl_models.auto import auto_class_of
from nrl_models.common.state_dict.layouts import (
    TensorSpec,
    convert_layout,
    has_own_tensors,
    hub_conversions,
    own_tensors,
    transformers_views,
)
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.upstream_conversions import PrefixChange, revert_weight_conversion
from nrl_models.families.llama.model import LlamaFamily
from nrl_models.testing.tiny import tiny_config


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        self.bias = None
        self.register_buffer("kept", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("computed", torch.zeros(5), persistent=False)
        self.inner = nn.Linear(3, 1, bias=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"not": 1, "a tensor": 2}


def test_own_tensors_are_parameters_and_persistent_buffers() -> None:
    assert own_tensors(WithBuffers()) == {
        "weight": TensorSpec((2, 3), torch.bfloat16),
        "kept": TensorSpec((4,), torch.int64),
        "inner.weight": TensorSpec((1, 3), torch.float32),
    }


def test_transformers_views_are_identities() -> None:
    views = dict(transformers_views(WithBuffers()))
    assert {name: (view.parameter, view.steps) for name, view in views.items()} == {
        name: (name, ()) for name in own_tensors(WithBuffers())
    }


@pytest.mark.parametrize(
    "config", [tiny_config(DeepseekV3Config), tiny_config(Gemma3Config)], ids=lambda config: config.model_type
)
def test_names_and_order_match_transformers(config: Any) -> None:
    model = auto_class_of(config).from_config(config, device="meta")
    with torch.device("meta"):
        reference = model.reference_class()(config)
    own = own_tensors(model)
    placed = {name: view.region_in(own[view.parameter].shape).shape for name, view in transformers_views(model)}
    assert placed == {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert list(placed) == list(reference.state_dict())


def test_tied_names_follow_config(llama_config: LlamaConfig) -> None:
    assert tied_names(auto_class_of(llama_config).from_config(llama_config)) == {}
    llama_config.tie_word_embeddings = True
    model = auto_class_of(llama_config).from_config(llama_config)
    assert tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_names(model.model) == {}


def test_has_own_tensors_compares_name_shape_and_dtype(llama_config: LlamaConfig) -> None:
    model = auto_class_of(llama_config).from_config(llama_config)
    specs, adapter = own_tensors(model), model.state_dict_adapter
    assert has_own_tensors(model, specs)
    model.model.norm.bfloat16()
    assert not has_own_tensors(model, specs)
    assert model.state_dict_adapter is not adapter
    model.model.norm.float()
    assert has_own_tensors(model, specs)
    model.register_buffer("scale", torch.ones(1))
    assert not has_own_tensors(model, specs)
    del model.scale
    model.lm_head.weight = nn.Parameter(torch.ones(3, 256))
    assert not has_own_tensors(model, specs)
    assert not has_own_tensors(model.model, specs)


# The hub's layout


def test_hub_layout_equals_transformers_layout_by_default(llama: PreTrainedModel) -> None:
    assert hub_conversions(llama) is None
    adapter = StateDictAdapter(llama)
    assert adapter.hub == adapter.transformers
    assert list(adapter.hub) == list(adapter.transformers)


def test_convert_layout_tensor_order(llama: PreTrainedModel) -> None:
    adapter = StateDictAdapter(llama)
    backwards = dict(reversed(adapter.transformers.items()))
    assert list(convert_layout(llama, backwards, adapter.specs, None)) == list(backwards)
    converted = convert_layout(llama, backwards, adapter.specs, [])
    assert converted == adapter.transformers
    loaded = new_model(copy.deepcopy(llama.config))
    loaded._weight_conversions = []
    assert list(converted) == list(revert_weight_conversion(loaded, dict(reversed(loaded.state_dict().items()))))


def test_hub_layout_matches_files_of_transformers(mixtral: PreTrainedModel) -> None:
    adapter = StateDictAdapter(mixtral)
    expected = revert_weight_conversion(mixtral, dict(mixtral.state_dict()))
    assert list(adapter.hub) == list(expected)
    assert {name: tensor.shape for name, tensor in adapter.hub.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }


# An optional prefix in checkpoints

HAS_PREFIXES = PrefixChange.__module__.startswith("transformers")
if HAS_PREFIXES:
    changes = [PrefixChange(prefix_to_remove="language_model")]
    register_checkpoint_conversion_mapping("PrefixedForCausalLM", changes, overwrite=True)
needs_prefixes = pytest.mark.skipif(not HAS_PREFIXES, reason="transformers 5.5 does not support optional prefixes")


class PrefixedForCausalLM(LlamaFamily, modeling_llama.LlamaForCausalLM):
    pass


Upstream = type("PrefixedForCausalLM", (modeling_llama.LlamaForCausalLM,), {})


@needs_prefixes
@since("5.10")  # 5.6 does not look up conversions by class name
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_checkpoint_prefix_is_kept(prefix: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    tensors = {prefix + name: tensor for name, tensor in llama.state_dict().items()}
    save_file(tensors, tmp_path / "given" / WEIGHTS, metadata={"format": "pt"})
    llama.config.save_pretrained(tmp_path / "given")
    edit_config(tmp_path / "given", architectures=["PrefixedForCausalLM"])
    model, reference = (
        model_class.from_pretrained(tmp_path / "given") for model_class in (PrefixedForCausalLM, Upstream)
    )
    assert_same(hf_tensors(model), llama.state_dict())
    assert set(model.state_dict_adapter.hub) == set(tensors)
    model.save_pretrained(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    assert stored(tmp_path / "ours").keys() == tensors.keys()


@needs_prefixes
def test_new_model_has_no_prefix(llama_config: LlamaConfig) -> None:
    model = PrefixedForCausalLM.from_config(llama_config, device="meta")
    assert hub_conversions(model) is None
    assert set(model.state_dict_adapter.hub) == set(model.state_dict_adapter.transformers)
