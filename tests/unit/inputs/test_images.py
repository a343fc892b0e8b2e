"""Random image inputs for every input format of vision-language models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from versions import case_of

from nrl_models.inputs.images import ImageInputsError, image_token, takes_images
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

# One model for each image format, with its other inputs.
FORMS = {
    "Gemma3ForConditionalGeneration": {"pixel_values": (2, 3, 56, 56)},
    "LlavaForConditionalGeneration": {"pixel_values": (2, 3, 56, 56)},
    "LlavaNextForConditionalGeneration": {"pixel_values": (2, 5, 3, 56, 56), "image_sizes": (2, 2)},
    "Mistral3ForConditionalGeneration": {"pixel_values": (2, 3, 56, 56), "image_sizes": (2, 2)},
    "Qwen2_5_VLForConditionalGeneration": {"pixel_values": (32, 1176), "image_grid_thw": (2, 3)},
    "Kimi_K25ForConditionalGeneration": {"pixel_values": (32, 3, 14, 14), "image_grid_thw": (2, 3)},
    "Idefics3ForConditionalGeneration": {
        "pixel_values": (2, 1, 3, 56, 56),
        "pixel_attention_mask": (2, 1, 56, 56),
    },
    "GraniteDoclingForConditionalGeneration": {
        "pixel_values": (2, 1, 3, 56, 56),
        "pixel_attention_mask": (2, 1),
    },
    "Lfm2VlForConditionalGeneration": {
        "pixel_values": (2, 16, 588),
        "spatial_shapes": (2, 2),
        "pixel_attention_mask": (2, 16),
    },
    "Gemma4ForConditionalGeneration": {"pixel_values": (2, 36, 588), "image_position_ids": (2, 36, 2)},
    "MiniCPMV4_6ForConditionalGeneration": {"pixel_values": (1, 3, 14, 448), "target_sizes": (2, 2)},
    "MllamaForConditionalGeneration": {
        "pixel_values": (2, 1, 4, 3, 56, 56),
        "aspect_ratio_ids": (2, 1),
        "aspect_ratio_mask": (2, 1, 4),
        "cross_attention_mask": (2, 24, 1, 4),
    },
}
NOT_IN_THE_TEXT = {"MllamaForConditionalGeneration"}  # text attends to the image in separate layers

models: dict[str, PreTrainedModel] = {}


@pytest.fixture(params=FORMS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model with random weights. Do not change it."""
    return shared(request.param)


def shared(name: str) -> PreTrainedModel:
    if (model_class := getattr(transformers, name, None)) is None:
        pytest.skip(f"this transformers has no {name}")
    if name not in models:
        torch.manual_seed(0)
        models[name] = model_class._from_config(tiny_config(model_class.config_class, None, model_class)).eval()
        randomize(models[name])
    return models[name]


def logits(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.long
def test_image_inputs_match_model_format(model: PreTrainedModel) -> None:
    inputs = inputs_for(model)
    expected = FORMS[type(model).__name__]
    words = {"input_ids", "token_type_ids", "mm_token_type_ids"}
    assert {name: tuple(value.shape) for name, value in inputs.items() if name not in words} == expected
    assert inputs["pixel_values"].dtype == torch.float32
    assert inputs["pixel_values"].std() > 0.9
    assert logits(model, inputs).isfinite().all()


@pytest.mark.long
def test_only_logits_after_image_depend_on_image(model: PreTrainedModel) -> None:
    inputs = inputs_for(model)
    others = inputs | {"pixel_values": inputs["pixel_values"] + 1.0}
    moved = (logits(model, inputs) - logits(model, others)).abs().amax(dim=(0, 2))
    assert moved[-1] > 1e-6
    if type(model).__name__ not in NOT_IN_THE_TEXT:
        # The experts chosen for later tokens affect the rounding of earlier sums in grouped experts.
        assert moved[:2].max() < min(0.1 * moved[-1], 1e-5)


def test_number_of_image_tokens_matches_features(model: PreTrainedModel) -> None:
    inputs = inputs_for(model, batch=3)
    is_image = inputs["input_ids"] == image_token(model.config)
    if type(model).__name__ in NOT_IN_THE_TEXT:
        assert not is_image.any()
        return
    count = int(is_image[0].sum())
    assert count >= 1
    assert torch.equal(is_image, torch.isin(torch.arange(is_image.shape[1]), torch.arange(3, 3 + count)).expand(3, -1))
    assert is_image.shape[1] >= count + 8
    for name in ("token_type_ids", "mm_token_type_ids"):
        assert name not in inputs or torch.equal(inputs[name].bool(), is_image)
    # The model has no image features for an additional image token.
    wrong = inputs["input_ids"].clone()
    wrong[0, -1] = image_token(model.config)
    with pytest.raises((ValueError, RuntimeError)):
        model(**inputs | {"input_ids": wrong})


def test_text_inputs_have_no_image_tokens(model: PreTrainedModel) -> None:
    inputs = inputs_for(model, images=False)
    assert inputs.keys() == {"input_ids"}
    assert not (inputs["input_ids"] == image_token(model.config)).any()
    assert logits(model, inputs).isfinite().all()


def test_labels_ignore_image_tokens(model: PreTrainedModel) -> None:
    inputs = inputs_for(model, labels=True)
    is_image = inputs["input_ids"] == image_token(model.config)
    assert (inputs["labels"] == -100).equal(is_image)
    assert inputs["labels"][~is_image].equal(inputs["input_ids"][~is_image])
    model.train()
    try:
        assert model(**inputs).loss.isfinite()
    finally:
        model.eval()


def test_bfloat16_model_gets_same_image() -> None:
    reference = shared("Qwen2_5_VLForConditionalGeneration")
    expected = inputs_for(reference)
    model = type(reference)._from_config(reference.config, dtype=torch.bfloat16).eval()
    again = inputs_for(model)
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


def test_sequence_is_extended_for_long_images() -> None:
    model = shared("LlavaNextForConditionalGeneration")
    inputs = inputs_for(model, length=4)
    count = int((inputs["input_ids"][0] == model.config.image_token_id).sum())
    assert count > 4
    assert inputs["input_ids"].shape[1] == count + 8
    assert logits(model, inputs).isfinite().all()


def test_inputs_are_deterministic_per_seed() -> None:
    model = shared("Qwen2_5_VLForConditionalGeneration")
    state = torch.get_rng_state()
    first, again, other = inputs_for(model), inputs_for(model), inputs_for(model, seed=1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    for name in ("input_ids", "pixel_values"):
        assert not torch.equal(first[name], other[name])
    assert torch.equal(torch.get_rng_state(), state)


def test_text_model_gets_no_images() -> None:
    config = tiny_config(transformers.LlamaConfig)
    model = transformers.LlamaForCausalLM(config)
    assert not takes_images(model)
    assert inputs_for(model, images=True).keys() == {"input_ids"}


def test_model_without_tower_gets_text_inputs() -> None:
    model_class = getattr(transformers, "Gemma4ForConditionalGeneration", None)
    if model_class is None:
        pytest.skip("this transformers has no Gemma 4")
    model = model_class(tiny_config(model_class.config_class))
    assert model.config.vision_config is None
    assert inputs_for(model).keys() == {"input_ids"}
    with pytest.raises(ImageInputsError, match="takes images in an unknown form"):
        inputs_for(model, images=True)


def test_tiny_model_gets_an_image_token() -> None:
    """Otherwise the forward would run on text only, and image tests would not use images."""
    case = case_of("MiniCPMV4_7ForConditionalGeneration")
    inputs = case.inputs(length=12, images=True)
    assert image_token(case.config) is not None
    assert (inputs["input_ids"] == image_token(case.config)).any()
    assert "target_sizes" in inputs


def test_unknown_image_format_raises_with_tried_formats() -> None:
    model = shared("LlavaForConditionalGeneration")

    class Strange(type(model)):  # type: ignore[misc]
        @property
        def base_model(self) -> nn.Module:
            return self

        def get_image_features(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
            raise RuntimeError(f"expected a cube, not {pixel_values.ndim} dimensions")

    strange = Strange(model.config)
    with pytest.raises(
        ImageInputsError, match=r"Strange .*\(2, 3, 56, 56\): RuntimeError: expected a cube.*images=False"
    ):
        inputs_for(strange)
    assert inputs_for(strange, images=False).keys() == {"input_ids"}
