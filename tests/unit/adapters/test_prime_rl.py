"""The interface of prime-rl 0.8, with a stand-in written from its public source: the package is not on the index."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import assert_same
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from nrl_models import registry
from nrl_models.adapters import prime_rl
from nrl_models.adapters.hub_table import HubTable
from nrl_models.errors import TrainerError, UnknownArchitectureError, UnknownArgumentError
from nrl_models.testing.case import FamilyCase

EXPERTS, DENSE, JOINED = "MixtralForCausalLM", "LlamaForCausalLM", "BaichuanForCausalLM"
IMAGES = "Gemma3ForConditionalGeneration"


class Base(PreTrainedModel):
    """The interface of `PreTrainedModelPrimeRL`, with the settings of prime-rl's own layers."""

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *_: Any, **__: Any) -> str:
        return attn_implementation or "flash_attention_3"

    def get_correct_experts_implementation(self, requested_experts: Any) -> str:
        return "eager"

    @classmethod
    def is_hf_state_dict(cls, state_dict: Any) -> bool:
        raise NotImplementedError

    @classmethod
    def is_prime_state_dict(cls, state_dict: Any) -> bool:
        raise NotImplementedError

    @classmethod
    def conversion_chain(cls, config: Any) -> list[Any]:
        return []

    @classmethod
    def keep_in_fp32_for_weight_transfer(cls, name: str) -> bool:
        return False

    def init_buffers_post_meta(self) -> None:
        raise NotImplementedError

    def convert_to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for operation in reversed(self.conversion_chain(self.config)):
            operation.prime_to_hf(state_dict)
        return state_dict

    def convert_to_prime(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for operation in self.conversion_chain(self.config):
            operation.hf_to_prime(state_dict)
        return state_dict


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for `prime_rl.trainer.models` with a custom class for one configuration."""
    module: Any = ModuleType("prime_rl.trainer.models")
    module.PreTrainedModelPrimeRL = Base
    module._CUSTOM_CAUSAL_LM_MAPPING = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())
    module._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE = {"llama": Base}
    module._CUSTOM_VLM_MAPPING = {}
    for name in ("prime_rl", "prime_rl.trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["prime_rl.trainer"].models = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prime_rl.trainer.models", module)
    installs(monkeypatch, "0.8.0")
    return module


def installs(monkeypatch: pytest.MonkeyPatch, prime: str) -> None:
    """Pretend that this version of prime-rl is installed."""
    monkeypatch.setattr(registry, "version", lambda name: prime if name == "prime-rl" else version(name))


def registered_model(models: Any, name: str) -> tuple[FamilyCase, Any]:
    """Build a tiny model of the class that prime-rl receives for an architecture, with the reference's weights."""
    assert prime_rl.register(name) == [name]
    case = FamilyCase(registry.model_class(name))
    by_model_type = models._CUSTOM_VLM_MAPPING if name == IMAGES else models._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE
    model_class = by_model_type[case.config_class.model_type]
    assert models._CUSTOM_CAUSAL_LM_MAPPING[case.config_class] is model_class
    assert issubclass(model_class, case.model_class)
    assert issubclass(model_class, Base)
    model = model_class._from_config(case.config, dtype=torch.float32).eval()
    model.load_state_dict(case.reference().state_dict())
    return case, model


@pytest.mark.parametrize(
    "name", [EXPERTS, "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", JOINED, IMAGES, DENSE]
)
def test_conversion_chain_round_trip(name: str, models: Any) -> None:
    case, model = registered_model(models, name)
    tensors, expected = model.state_dict(), model.state_dict_adapter.to_hf(model.state_dict())
    differs = expected.keys() != tensors.keys()
    converted = dict(tensors)
    assert model.convert_to_hf(converted) is converted
    assert_same(converted, expected)
    assert (model.is_prime_state_dict(dict.fromkeys(tensors)), model.is_hf_state_dict(dict.fromkeys(tensors))) == (
        differs,
        not differs,
    )
    assert (model.is_prime_state_dict(converted), model.is_hf_state_dict(converted)) == (False, True)
    assert model.convert_to_prime(converted) is converted
    assert_same(converted, tensors)
    (table,) = type(model).conversion_chain(case.config)  # also available on the class, with only a configuration
    assert table.parts == model.conversion_chain(model.config)[0].parts
    assert model.conversion_chain(model.config)[0] is model.conversion_chain(model.config)[0]


@pytest.mark.parametrize("name", [EXPERTS, JOINED])
def test_conversion_per_layer_matches_complete_conversion(name: str, models: Any) -> None:
    _, model = registered_model(models, name)
    tensors = model.state_dict()
    layers = {key.split(".")[2] if key.startswith("model.layers.") else "" for key in tensors}
    sent: dict[str, Any] = {}
    for layer in layers:
        part = {
            key: tensor
            for key, tensor in tensors.items()
            if layer == (key.split(".")[2] if key.startswith("model.layers.") else "")
        }
        sent |= model.convert_to_hf(part)
    assert_same(sent, model.state_dict_adapter.to_hf(tensors))


def test_incomplete_tensors_are_not_converted(models: Any) -> None:
    _, model = registered_model(models, JOINED)
    part = "model.layers.0.self_attn.k_proj.weight"
    tensors = model.state_dict()
    converted = model.convert_to_hf({name: tensor for name, tensor in tensors.items() if name != part})
    assert "model.layers.0.self_attn.W_pack.weight" not in converted
    assert "model.layers.0.self_attn.q_proj.weight" in converted
    assert model.convert_to_prime({"model.norm.weight": tensors["model.norm.weight"]}).keys() == {"model.norm.weight"}


def test_naming_error_is_detected(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = registered_model(models, EXPERTS)
    original, expected = model.state_dict(), model.state_dict_adapter.to_hf(model.state_dict())
    right = HubTable.prime_to_hf

    def wrong(self: HubTable, state_dict: dict[str, Any]) -> None:
        right(self, state_dict)
        one, other = (next(name for name in state_dict if f"experts.0.{part}." in name) for part in ("w1", "w3"))
        state_dict[one], state_dict[other] = state_dict[other], state_dict[one]

    monkeypatch.setattr(HubTable, "prime_to_hf", wrong)
    with pytest.raises(AssertionError):
        assert_same(model.convert_to_hf(dict(original)), expected)


def test_logits_match_transformers(models: Any) -> None:
    case, model = registered_model(models, EXPERTS)
    inputs = case.inputs()
    with torch.no_grad():
        expected = case.reference()(**inputs).logits
        actual = model(**inputs, seq_lens=torch.tensor([1]), seq_lens_are_pre_shard=False, routed_experts=None).logits
    torch.testing.assert_close(actual, expected)
    with pytest.raises(UnknownArgumentError, match="routed_experts: expected none"):
        model(**inputs, routed_experts=torch.zeros(1))
    assert model.config._attn_implementation == case.reference().config._attn_implementation


def test_buffers_are_computed_after_meta(models: Any) -> None:
    case, model = registered_model(models, EXPERTS)
    with torch.device("meta"):
        empty = type(model)(case.config)
    empty.to_empty(device="cpu")
    for buffer in empty.buffers():
        buffer.fill_(float("nan"))
    empty.init_buffers_post_meta()
    assert_same(dict(empty.named_buffers()), dict(case.reference().named_buffers()))


def test_fp32_routers_are_transferred_in_fp32(models: Any) -> None:
    _, model = registered_model(models, "DeepseekV3ForCausalLM")
    fp32_names = [name for name in model.state_dict() if model.keep_in_fp32_for_weight_transfer(name)]
    patterns = model._keep_in_fp32_modules_strict  # since transformers 5.24 also the router's weight
    assert any("e_score_correction_bias" in name for name in fp32_names)
    assert fp32_names == [name for name in model.state_dict() if any(pattern in name for pattern in patterns)]


def test_prime_rl_classes_are_replaced_only_if_named(models: Any) -> None:
    registered = prime_rl.register()
    assert {EXPERTS, IMAGES} <= set(registered)
    assert DENSE not in registered
    assert models._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE["llama"] is Base
    assert not [name for name in registered if name.endswith("Classification")]
    assert prime_rl.register(DENSE) == [DENSE]
    assert issubclass(models._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE["llama"], registry.model_class(DENSE))


def test_documented_hook(models: Any) -> None:
    page = Path(__file__).parents[3] / "docs" / "trainers.md"
    (code,) = [
        block for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S) if "prime_rl" in block
    ]
    exec(code)
    assert issubclass(models._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE["mixtral"], registry.model_class(EXPERTS))


def test_unsupported_architectures_raise(models: Any) -> None:
    with pytest.raises(UnknownArchitectureError, match="LlamaForSequenceClassification, NovaForCausalLM"):
        prime_rl.register(EXPERTS, "LlamaForSequenceClassification", "NovaForCausalLM")
    assert {"llama": Base} == models._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE


def test_unsupported_prime_rl_version_raises(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, "0.9.0")
    with pytest.raises(TrainerError, match=r"needs prime-rl<0\.9,>=0\.8; 0\.9\.0 is installed"):
        prime_rl.register()
