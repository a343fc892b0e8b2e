"""Tokens that stand for images, videos and audio: which ones end a completion."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, Qwen2_5_VLConfig, Qwen2_5OmniThinkerConfig

from nrl_models import Sampling, registry, rollout_logprobs
from nrl_models.engines.hf import HFEngine
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.inputs.placeholders import placeholders
from nrl_models.testing.tiny import tiny_config


def test_placeholders_of_passed_media() -> None:
    config = tiny_config(Qwen2_5OmniThinkerConfig)
    image, video, audio = config.image_token_id, config.video_token_id, config.audio_token_id
    assert len({image, video, audio}) == 3
    assert placeholders(config, {"pixel_values", "image_grid_thw"}) == {image}
    assert placeholders(config, {"input_features", "feature_attention_mask"}) == {audio}
    assert placeholders(config, {"pixel_values_videos", "video_grid_thw"}) == {image, video}
    assert placeholders(config, {"pixel_values", "pixel_values_videos", "input_features"}) == {image, video, audio}
    assert placeholders(config, {"mm_token_type_ids"}) == set()
    assert placeholders(LlamaConfig(), {"pixel_values", "input_features"}) == set()


def test_completion_ends_before_video_token() -> None:
    """Further video tokens have no features: transformers' class raises for them."""
    torch.manual_seed(0)
    config = tiny_config(Qwen2_5_VLConfig)
    model = registry.model_class("Qwen2_5_VLForConditionalGeneration").from_config(config).eval()
    image_inputs, video = inputs_for(model, batch=1, images=True), config.video_token_id
    ids = image_inputs["input_ids"].masked_fill(image_inputs["input_ids"] == config.image_token_id, video)
    inputs = {
        "pixel_values_videos": image_inputs["pixel_values"],
        "video_grid_thw": image_inputs["image_grid_thw"],
        "mm_token_type_ids": image_inputs["mm_token_type_ids"] * 2,
    }
    engine, prompts, options = HFEngine(model), [ids[0].tolist()], {"max_new_tokens": 4, "ignore_end": False}
    (sample,) = engine.generate(prompts, Sampling(0.0), **options, model_inputs=[inputs])
    assert len(sample.tokens) == 4
    with torch.no_grad():  # the video token becomes a little likelier than the first token
        model.lm_head.weight[video] = model.lm_head.weight[sample.tokens[0]] * 1.01
    (sample,) = engine.generate(prompts, Sampling(0.0), **options, model_inputs=[inputs])
    assert (sample.tokens, sample.finish_reason) == ((), "placeholder")
    rollout = rollout_logprobs(model, [sample.sequence], model_inputs=[sample.sequence_inputs])
    assert rollout.mask.sum() == len(prompts[0]) - 1
    (text,) = engine.generate([[20, 21, 22]], Sampling(0.0), max_new_tokens=4)
    assert len(text.tokens) == 4
