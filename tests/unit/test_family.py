"""Properties that transformers derives from a model's class and module, independent of the order of queries."""

from __future__ import annotations

import pickle

import pytest
import torch
from checkpoints import new_model
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.paligemma import modeling_paligemma

from nrl_models import AutoModelForCausalLM, BackendConfig, registry
from nrl_models.family import FamilyModel

METHODS = ("_can_set_attn_implementation", "_can_set_experts_implementation")

SERVED = [registry.model_class(name) for name in registry.architectures() if registry.unmet_requirement(name) is None]


@pytest.fixture
def _clear_class_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear transformers' caches on the classes. Subclasses would inherit the cached values."""
    for model_class in SERVED:
        for base in model_class.__mro__:
            for attribute in [f"{method}_cached_value" for method in METHODS]:
                if attribute in vars(base):
                    monkeypatch.delattr(base, attribute)


@pytest.mark.usefixtures("_clear_class_caches")
@pytest.mark.parametrize("method", METHODS)
def test_settable_implementations_match_reference(method: str) -> None:
    for model_class in SERVED:
        answer = getattr(model_class, method)()
        assert answer is getattr(model_class.reference_class(), method)(), model_class


@pytest.mark.parametrize(
    "method",
    [method for method in (*METHODS, "is_custom_code") if hasattr(modeling_paligemma.PaliGemmaModel, method)],
)
@pytest.mark.usefixtures("_clear_class_caches")
def test_rewritten_decoder_matches_original_class_properties(method: str) -> None:
    """Otherwise transformers would not rename its tensors or apply its settings."""
    original = modeling_paligemma.PaliGemmaModel
    rewritten = registry.model_class("PaliGemmaForConditionalGeneration").rewrite_of(original)
    assert rewritten is not None
    assert getattr(rewritten, method)() == getattr(original, method)()


@pytest.mark.usefixtures("_clear_class_caches")
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_implementation_without_transformers_model(
    experts: str, mixtral_config: MixtralConfig, input_ids: torch.Tensor
) -> None:
    model = AutoModelForCausalLM.from_config(mixtral_config, backend=BackendConfig(experts=experts)).eval()
    assert model.config._experts_implementation == experts
    reference: PreTrainedModel = new_model(mixtral_config).eval()
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, reference(input_ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_clear_class_caches")
def test_default_implementations_match_reference(mixtral_config: MixtralConfig) -> None:
    model = AutoModelForCausalLM.from_config(mixtral_config)
    reference = new_model(mixtral_config)
    assert model.config._attn_implementation == reference.config._attn_implementation
    assert model.config._experts_implementation == reference.config._experts_implementation


class OwnDecoder(modeling_llama.LlamaModel):
    """A decoder written by the family."""


class OwnDecoderForCausalLM(FamilyModel, modeling_llama.LlamaForCausalLM):
    rewrites = {modeling_llama.LlamaModel: OwnDecoder}


def test_rewritten_decoder_returns_hidden_states(llama_config: LlamaConfig, input_ids: torch.Tensor) -> None:
    model = OwnDecoderForCausalLM.from_config(llama_config).eval()
    reference = new_model(llama_config).eval()
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        expected = reference(input_ids, output_hidden_states=True).hidden_states
        actual = model(input_ids, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected) == llama_config.num_hidden_layers + 1
    torch.testing.assert_close(actual, expected)


class Tuned(FamilyModel):
    """A family class with another name than transformers'."""


TunedLlama = Tuned.head(modeling_llama.LlamaForCausalLM)


def test_pickle_of_class_with_other_variable_name(llama_config: LlamaConfig) -> None:
    model = TunedLlama.from_config(llama_config)
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied) is TunedLlama
    assert type(copied).__name__ == "LlamaForCausalLM"  # the name that saved checkpoints contain
