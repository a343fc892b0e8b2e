"""Tokens that a model replaces with features of images, videos and audio."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedConfig

from nrl_models.inputs.audio import AUDIO, audio_token
from nrl_models.inputs.images import image_token, own_token

VIDEO_TOKENS = ("video_token_id", "video_token_index")


def placeholders(config: PreTrainedConfig, names: Collection[str]) -> set[int]:
    """Return the token ids that the model replaces with features if its forward gets these inputs.

    The model raises if such a token has no feature, so a completion cannot have one. Without features of a medium, its
    token is embedded as text. Some models (GLM-4V) also have the image token in videos.

    Args:
        config: The model's configuration.
        names: Names of the inputs, as a processor returns them: `pixel_values`, `pixel_values_videos`, ...
    """
    videos = any("video" in name for name in names)
    images = videos or any(part in name for name in names for part in ("image", "pixel", "patches"))
    audio = any("audio" in name or name.startswith(AUDIO) for name in names)
    token_ids = (
        image_token(config) if images else None,
        own_token(config, VIDEO_TOKENS) if videos else None,
        audio_token(config) if audio else None,
    )
    return {token for token in token_ids if token is not None}
