"""Random audio inputs for every input format."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from versions import needs

from nrl_models import registry
from nrl_models.inputs.audio import audio_token, takes_audio
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.onboarding.detect import detect
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config
from tools.variants import case_of

# One model for each audio format, with its other inputs and its number of audio tokens.
FORMS = {
    "GlmAsrForConditionalGeneration": ({"input_features": (2, 128, 48), "input_features_mask": (2, 48)}, 6),
    "GraniteSpeechForConditionalGeneration": ({"input_features": (2, 48, 160)}, 12),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        {"input_features": (2, 128, 128), "feature_attention_mask": (2, 128)},
        32,
    ),
    "MossTranscribeDiarizeForConditionalGeneration": (
        {"input_features": (2, 80, 128), "input_features_mask": (2, 128), "padding_mask": (2, 128)},
        16,
    ),
    "MuseSparkForConditionalGeneration": ({"input_values": (2, 7680), "input_values_mask": (2, 7680)}, 4),
    "Gemma3nForConditionalGeneration": ({"input_features": (2, 48, 128), "input_features_mask": (2, 48)}, 6),
    "Gemma4ForConditionalGeneration": ({"input_features": (2, 48, 128), "input_features_mask": (2, 48)}, 12),
    "Gemma4UnifiedForConditionalGeneration": ({"input_features": (2, 48, 256), "input_features_mask": (2, 48)}, 48),
    "Qwen2AudioForConditionalGeneration": (
        {"input_features": (2, 128, 128), "feature_attention_mask": (2, 128)},
        32,
    ),
    "Dots3NoteForConditionalGeneration": ({"input_features": (2, 128, 48), "chunk_sample_lengths": (2,)}, 6),
    "FunAsrNanoForConditionalGeneration": ({"input_features": (2, 48, 560), "input_features_mask": (2, 48)}, 48),
    "OmniASRForConditionalGeneration": ({"input_values": (2, 1, 1920), "padding_mask": (2, 1920)}, 5),
    "Apertus1p5ForConditionalGeneration": ({"input_values": (2, 1, 3600), "padding_mask": (2, 3600)}, 6),
    "NemotronH_Omni_Reasoning_V3": ({"input_features": (2, 48, 80), "input_features_mask": (2, 48)}, 6),
}


@lru_cache
def shared(name: str) -> PreTrainedModel:
    """A tiny model with random weights. Do not change it."""
    if unmet := registry.unmet_requirement(name):
        pytest.skip(f"{name} needs {unmet}")
    if (model_class := getattr(transformers, name, None)) is None:
        pytest.skip(f"this transformers has no {name}")
    family = registry.model_class(name)
    torch.manual_seed(0)
    model = model_class._from_config(tiny_config(model_class.config_class, family and family.tiny, model_class)).eval()
    randomize(model)
    return model


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_audio_inputs_match_model_format(name: str) -> None:
    model, (arguments, tokens) = shared(name), FORMS[name]
    inputs = inputs_for(model)
    assert {key: tuple(inputs[key].shape) for key in arguments} == arguments
    assert (inputs["input_ids"] == audio_token(model.config)).sum(dim=1).tolist() == [tokens, tokens]


CODED = ("Apertus1p5ForConditionalGeneration",)
"""Models that read audio codes. With random weights, all clips have the same codes."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FORMS if name not in CODED])
@torch.no_grad()
def test_last_logits_depend_on_audio(name: str) -> None:
    model = shared(name)
    inputs = inputs_for(model)
    audio = next(key for key in FORMS[name][0] if inputs[key].is_floating_point())
    other = inputs | {audio: inputs[audio] + torch.randn_like(inputs[audio])}
    assert (model(**inputs).logits - model(**other).logits)[:, -1].abs().max() > 1e-4


@needs("Gemma4ForConditionalGeneration")
def test_model_without_audio_tower_takes_no_audio() -> None:
    """Gemma 4 31B has an audio token, and no tower."""
    for variant, expected in (("E2B", True), ("31B", False)):
        model = case_of(f"Gemma4ForConditionalGeneration#{variant}").reference()
        assert takes_audio(model) is expected
        assert ("input_features" in inputs_for(model)) is expected
        assert "pixel_values" in inputs_for(model)


def test_text_inputs_have_no_audio_tokens() -> None:
    model = shared("GlmAsrForConditionalGeneration")
    inputs = inputs_for(model, images=False)
    assert list(inputs) == ["input_ids"]
    assert not (inputs["input_ids"] == audio_token(model.config)).any()


def test_labels_ignore_audio_tokens() -> None:
    model = shared("GlmAsrForConditionalGeneration")
    inputs = inputs_for(model, labels=True)
    assert torch.equal(inputs["labels"] == -100, inputs["input_ids"] == audio_token(model.config))


def test_unknown_audio_format_is_noted() -> None:
    detection = detect(transformers.VoxtralForConditionalGeneration)  # its default sizes do not match each other
    assert detection.modalities == ("text",)
    assert detection.note == "takes audio, which was not tried"


def test_audio_tower_is_traced() -> None:
    detection = detect(transformers.GraniteSpeechForConditionalGeneration)
    assert detection.modalities == ("text", "audio")
    attention = "transformers.models.granite_speech.modeling_granite_speech:GraniteSpeechConformerAttention"
    assert detection.groups[attention] == [("to_q", "to_kv")]
