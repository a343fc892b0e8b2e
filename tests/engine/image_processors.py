"""Tiny processors of images: transformers' own classes, with a tokenizer of words and the sizes of a configuration."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from nrl_models.consistency.vision.image_check import ImagePrompt
from nrl_models.inputs.images import AFTER_IMAGE, BEFORE_IMAGE, Geometry, first_token, image_token

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GLM = ("glm4v", "glm4v_moe", "glm_ocr")

TOKENS: dict[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(QWEN, ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")),
    **dict.fromkeys(GLM, ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")),
    "exaone4_5": ("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>"),
    "internvl": ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    "qianfan_ocr": ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    "gemma3": ("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image|>", "<|video|>", "<|image>", "<image|>"),
    "cohere2_vision": ("<|IMG_PATCH|>", "<video>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    "mistral3": ("[IMG]", "<video>", "<before>", "<after>"),
    "llama4": ("<|patch|>", "<video>", "<|image_start|>", "<|image_end|>"),
    "lfm2_vl": ("<image>", "<video>", "<|image_start|>", "<|image_end|>"),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>", "<video>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
}
"""What a family's tokenizer calls the tokens of images, of videos, before and after an image."""

PLAIN = ("<image>", "<video>", "<before>", "<after>")

AROUND = frozenset({*QWEN, *GLM, "exaone4_5", "paddleocr_vl"})
"""Those whose prompts have tokens before and after an image, which no processor adds."""

MORE_TOKENS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GLM, ("<|begin_of_video|>", "<|end_of_video|>")),
    "gemma3": ("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    "paligemma": ("\n",),
    "mistral3": ("[IMG_BREAK]", "[IMG_END]"),
    "llama4": ("<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    "cohere2_vision": ("<|IMG_LINE_BREAK|>",),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        (
            "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "\n", "\n\n",
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
    ),
    "lfm2_vl": (
        "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
    ),
}  # fmt: skip
"""What else a family's processor writes around and between the tokens of an image."""

SAME = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v", "glm_ocr": "glm4v"}
"""Model types whose processor transformers has under another one."""

SIZES = ((32, 32), (96, 40), (56, 112))
"""`(width, height)`: a small square, a wide one, a tall one."""


def save_processor(config: PreTrainedConfig, folder: Path) -> Any:
    """Save a processor for a tiny model beside it, and return it.

    Raises:
        KeyError: transformers has none for this model.
    """
    source = CONFIG_MAPPING[SAME.get(config.model_type, config.model_type)]
    kind = PROCESSOR_MAPPING[source]
    geometry = Geometry(config, 1, 1)
    tokens = int((geometry.side // geometry.patch) ** 2 * getattr(config, "downsample_ratio", 1.0) ** 2)
    image = _image_processor(config, IMAGE_PROCESSOR_MAPPING[source], geometry, tokens)
    wanted = inspect.signature(kind.__init__).parameters
    parts = {"image_processor": image, "tokenizer": tokenizer_of(config)}
    if "video_processor" in wanted:
        parts["video_processor"] = VIDEO_PROCESSOR_MAPPING[source]() if source in VIDEO_PROCESSOR_MAPPING else None
    values = {
        "patch_size": geometry.patch,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": 1,
        "num_image_tokens": tokens,
        "image_seq_len": int(tokens / getattr(config, "scale_factor", 1) ** 2),
        "spatial_merge_size": getattr(config, "spatial_merge_size", 1),
        "image_seq_length": getattr(config, "mm_tokens_per_image", tokens),
    }
    processor = kind(**parts, **{name: value for name, value in values.items() if name in wanted})
    processor.save_pretrained(folder)
    return processor


def _image_processor(config: PreTrainedConfig, kinds: Any, geometry: Geometry, tokens: int) -> Any:
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
    if hasattr(defaults, "max_image_size") and isinstance(defaults.max_image_size, dict):
        values |= {"size": {"longest_edge": 2 * geometry.side}, "max_image_size": {"longest_edge": geometry.side}}
    elif type(getattr(defaults, "max_image_size", None)) is int:
        values["max_image_size"] = geometry.side
        values["min_image_size"] = geometry.side // 2
    if getattr(config, "image_grid_pinpoints", None):
        values["image_grid_pinpoints"] = config.image_grid_pinpoints
    made = kind(**values)
    if config.model_type == "paligemma":
        made.image_seq_length = tokens
    return made


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
    more = MORE_TOKENS.get(config.model_type, ())
    for name in more:
        words[next(spare)] = name
    model = Tokenizer(models.WordLevel({word: token for token, word in words.items()}, unk_token="<0>"))
    vocabulary = model.get_vocab()
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"image_token": image, "video_token": video, "boi_token": before, "eoi_token": after}
    names |= {"start_image_token": before, "end_image_token": after, "context_image_token": image}
    names |= {"image_start_token": before, "image_end_token": after}
    names |= {"video_start_token": before, "video_end_token": after, "img_line_break_token": "<|IMG_LINE_BREAK|>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<0>",
        pad_token="<1>",
        bos_token="<2>",
        extra_special_tokens={name: word for name, word in names.items() if word in vocabulary},
    )
    # Whole also where nothing but other special words stands around them.
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in (*places, *more)])
    return made


def names_of(config: PreTrainedConfig) -> tuple[str, str, str, str]:
    """See `TOKENS`."""
    return TOKENS.get(config.model_type, PLAIN)


def image_prompts(config: PreTrainedConfig, processor: Any) -> list[ImagePrompt]:
    """One prompt for each size, and one with two images."""
    one, _, before, after = names_of(config)
    placeholder = getattr(processor, "image_token", one)
    if config.model_type in AROUND:
        placeholder = f"{before}{placeholder}{after}"
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
