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

QUESTIONS = ("_can_set_attn_implementation", "_can_set_experts_implementation")

SERVED = [registry.model_class(name) for name in registry.architectures() if registry.unmet_requirement(name) is None]


@pytest.fixture
def _nothing_asked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear transformers' caches on the classes, which subclasses would inherit."""
    for model_class in SERVED:
        for base in model_class.__mro__:
            for kept in [f"{question}_cached_value" for question in QUESTIONS]:
                if kept in vars(base):
                    monkeypatch.delattr(base, kept)


@pytest.mark.usefixtures("_nothing_asked_yet")
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_family_can_be_set_to_what_its_reference_can(question: str) -> None:
    for model_class in SERVED:
        answer = getattr(model_class, question)()
        assert answer is getattr(model_class.reference_class(), question)(), model_class


@pytest.mark.parametrize(
    "question",
    [question for question in (*QUESTIONS, "is_custom_code") if hasattr(modeling_paligemma.PaliGemmaModel, question)],
)
@pytest.mark.usefixtures("_nothing_asked_yet")
def test_a_rewritten_decoder_answers_as_what_it_replaces(question: str) -> None:
    """Otherwise transformers would not rename its tensors or apply its settings."""
    original = modeling_paligemma.PaliGemmaModel
    rewritten = registry.model_class("PaliGemmaForConditionalGeneration").rewrite_of(original)
    assert rewritten is not None
    assert getattr(rewritten, question)() == getattr(original, question)()


@pytest.mark.usefixtures("_nothing_asked_yet")
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_an_experts_implementation_is_used_though_no_hugging_face_model_was_built(
    experts: str, mixtral_config: MixtralConfig, input_ids: torch.Tensor
) -> None:
    model = AutoModelForCausalLM.from_config(mixtral_config, backend=BackendConfig(experts=experts)).eval()
    assert model.config._experts_implementation == experts
    reference: PreTrainedModel = new_model(mixtral_config).eval()
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, reference(input_ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_nothing_asked_yet")
def test_the_default_implementations_are_the_references(mixtral_config: MixtralConfig) -> None:
    model = AutoModelForCausalLM.from_config(mixtral_config)
    reference = new_model(mixtral_config)
    assert model.config._attn_implementation == reference.config._attn_implementation
    assert model.config._experts_implementation == reference.config._experts_implementation


class OwnDecoder(modeling_llama.LlamaModel):
    """A decoder written by the family."""


class OwnDecoderForCausalLM(FamilyModel, modeling_llama.LlamaForCausalLM):
    rewrites = {modeling_llama.LlamaModel: OwnDecoder}


def test_a_rewritten_decoder_returns_what_is_asked_for(llama_config: LlamaConfig, input_ids: torch.Tensor) -> None:
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


def test_a_class_may_be_assigned_to_another_name_than_upstreams(llama_config: LlamaConfig) -> None:
    model = TunedLlama.from_config(llama_config)
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied) is TunedLlama
    assert type(copied).__name__ == "LlamaForCausalLM"  # the name that saved checkpoints contain
