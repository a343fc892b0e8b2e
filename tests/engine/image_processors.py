"""Tiny processors of images: transformers' own classes, with a tokenizer of words and the sizes of a configuration."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from nrl_models.consistency.images import ImagePrompt
from nrl_models.inputs.images import AFTER_IMAGE, BEFORE_IMAGE, Geometry, first_token, image_token

QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TOKENS: dict[str, tuple[str, str, str, str]] = {
    name: QWEN for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
} | {
    "internvl": ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    "gemma3": ("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"),
    "mistral3": ("[IMG]", "<video>", "<before>", "<after>"),
    "aya_vision": ("<image>", "<video>", "<before>", "<after>"),
}
"""What a family's tokenizer calls the tokens of images, of videos, before and after an image."""

PLAIN = ("<image>", "<video>", "<before>", "<after>")

SIZES = ((32, 32), (96, 40), (56, 112))
"""`(width, height)`: a small square, a wide one, a tall one."""


def save_processor(config: PreTrainedConfig, folder: Path) -> Any:
    """Save a processor for a tiny model beside it, and return it.

    Raises:
        KeyError: transformers has none for this model.
    """
    kind = PROCESSOR_MAPPING[type(config)]
    geometry = Geometry(config, 1, 1)
    image = _image_processor(config, geometry)
    wanted = inspect.signature(kind.__init__).parameters
    parts = {"image_processor": image, "tokenizer": tokenizer_of(config)}
    if "video_processor" in wanted:
        parts["video_processor"] = VIDEO_PROCESSOR_MAPPING[type(config)]() if type(config) in _with_video() else None
    tokens = (geometry.side // geometry.patch) ** 2
    values = {
        "patch_size": geometry.patch,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": 1,
        "spatial_merge_size": getattr(config, "spatial_merge_size", 1),
        "image_seq_length": getattr(config, "mm_tokens_per_image", getattr(config, "image_seq_length", tokens)),
    }
    processor = kind(**parts, **{name: value for name, value in values.items() if name in wanted})
    processor.save_pretrained(folder)
    return processor


def _with_video() -> Any:
    return VIDEO_PROCESSOR_MAPPING.keys()


def _image_processor(config: PreTrainedConfig, geometry: Geometry) -> Any:
    kinds = IMAGE_PROCESSOR_MAPPING[type(config)]
    kind = kinds.get("torchvision") or kinds.get("pil") if isinstance(kinds, dict) else next(filter(None, kinds))
    square = {"height": geometry.side, "width": geometry.side}
    values: dict[str, Any] = {"patch_size": geometry.patch}
    defaults = kind()
    if getattr(defaults, "merge_size", None):
        pixels = (geometry.patch * geometry.merge) ** 2
        values |= {"merge_size": geometry.merge, "temporal_patch_size": geometry.frames}
        values["size"] = {"shortest_edge": 4 * pixels, "longest_edge": 36 * pixels}
    elif "longest_edge" in (defaults.size or {}):
        values["size"] = {"longest_edge": geometry.side}
    elif "shortest_edge" in (defaults.size or {}):
        values |= {"size": {"shortest_edge": geometry.side}, "crop_size": square}
    else:
        values["size"] = square
    return kind(**values)


def tokenizer_of(config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    """A word for each id, and the family's special tokens at the configuration's ids."""
    size = config.get_text_config().vocab_size
    words = {token: f"<{token}>" for token in range(size)}
    image, video, before, after = names_of(config)
    video_id = first_token(config, ("video_token_id", "video_token_index"))
    places = {image: image_token(config), video: video_id}
    places |= {before: first_token(config, BEFORE_IMAGE), after: first_token(config, AFTER_IMAGE)}
    taken = {place for place in places.values() if place is not None}
    spare = iter(number for number in range(size - 1, 0, -1) if number not in taken)
    for name, place in places.items():
        words[next(spare) if place is None else place] = name
    model = Tokenizer(models.WordLevel({word: token for token, word in words.items()}, unk_token="<0>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"image_token": image, "video_token": video, "boi_token": before, "eoi_token": after}
    names |= {"start_image_token": before, "end_image_token": after, "context_image_token": image}
    return PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<0>", pad_token="<1>", extra_special_tokens=names | {"video_token": video}
    )


def names_of(config: PreTrainedConfig) -> tuple[str, str, str, str]:
    """See `TOKENS`."""
    return TOKENS.get(config.model_type, PLAIN)


def image_prompts(config: PreTrainedConfig, processor: Any) -> list[ImagePrompt]:
    """One prompt for each size, and one with two images."""
    one, _, before, after = names_of(config)
    placeholder = getattr(processor, "image_token", one)
    around = config.model_type in TOKENS and TOKENS[config.model_type] is QWEN
    placeholder = f"{before}{placeholder}{after}" if around else placeholder
    return [
        ImagePrompt(
            " ".join(["<20> <31> <45>", *(f"{placeholder} <{50 + place}>" for place, _ in enumerate(sizes)), "<60>"]),
            tuple(noise(*size) for size in sizes),
        )
        for sizes in [*([size] for size in SIZES), [SIZES[0], SIZES[1]]]
    ]


def noise(width: int, height: int) -> Image.Image:
    """An image of many colours."""
    return Image.effect_noise((width, height), 90).convert("RGB").point([value * 3 % 256 for value in range(256)] * 3)
