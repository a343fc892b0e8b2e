"""Word tokenizers for tiny vision-language models, and prompts with images for them."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from nrl_models.consistency.vision.image_check import ImagePrompt
from nrl_models.inputs.images import AFTER_IMAGE, BEFORE_IMAGE, first_token, image_token

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
GLM = ("glm4v", "glm4v_moe", "glm_ocr", "glm5_next")
GEMMA4 = ("gemma4", "gemma4_unified")
MINICPM = ("minicpmv4_6", "minicpmv4_7")

TOKENS: dict[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(QWEN, ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")),
    **dict.fromkeys(GLM, ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")),
    **dict.fromkeys(GEMMA4, ("<|image|>", "<|video|>", "<|image>", "<image|>")),
    **dict.fromkeys(MINICPM, ("<|image_pad|>", "<|video_pad|>", "<image>", "</image>")),
    "exaone4_5": ("<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>"),
    "internvl": ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    "qianfan_ocr": ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
    "gemma3": ("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"),
    "gemma3n": ("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"),
    "cohere2_vision": ("<|IMG_PATCH|>", "<video>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
    "cohere_compass": ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>"),
    "ernie4_5_vl_moe": ("<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    "kimi_k25": ("<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_end|>"),
    "minimax_m3_vl": ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
    "mistral3": ("[IMG]", "<video>", "<before>", "<after>"),
    "muse_glimmer": ("<|patch|>", "<|video|>", "<|image_start|>", "<|image_end|>"),
    "llama4": ("<|patch|>", "<video>", "<|image_start|>", "<|image_end|>"),
    "lfm2_vl": ("<image>", "<video>", "<|image_start|>", "<|image_end|>"),
    "paddleocr_vl": ("<|IMAGE_PLACEHOLDER|>", "<video>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    "step3p7": ("<im_patch>", "<video>", "<im_start>", "<im_end>"),
}
"""A family's tokens for an image, for a video, before an image and after it."""

PLAIN = ("<image>", "<video>", "<before>", "<after>")

ADDED_AROUND = frozenset({*QWEN, *GLM, "exaone4_5", "paddleocr_vl", "cohere_compass", "ernie4_5_vl_moe", "kimi_k25"})
"""Families whose prompts have tokens before and after an image that processors do not add."""

AUDIO = ("<|audio|>", "<|audio>", "<audio|>")
"""The tokens of audio, before it and after it. Some processors require them even without audio."""

SLICES = ("<slice>", "</slice>", "<image_id>", "</image_id>")
"""The tokens before and after a slice of an image, and before and after its index."""

WRAPPERS = ("<wrapper>", "<end of file>")
"""The token before an image's tokens, and the token after them."""

MORE_TOKENS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GLM, ("<|begin_of_video|>", "<|end_of_video|>")),
    **dict.fromkeys(GEMMA4, AUDIO),
    **dict.fromkeys(MINICPM, ("\n", *SLICES)),
    "gemma3": ("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    "gemma3n": ("\n", "\n\n", "\n\n\n", "\n\n\n\n", *AUDIO),
    "paligemma": ("\n",),
    "emu3": WRAPPERS,
    "mistral3": ("[IMG_BREAK]", "[IMG_END]"),
    "llama4": ("<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    "cohere2_vision": ("<|IMG_LINE_BREAK|>",),
    "qianfan_ocr": ("<image>",),
    "muse_glimmer": ("<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"),
    "step3p7": ("<patch_start>", "<patch_end>", "<patch_newline>"),
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
"""Additional tokens that a family's processor writes around and between the tokens of an image."""

SIZES = ((32, 32), (96, 40), (56, 112))
"""`(width, height)`: a small square, a wide image, a tall image."""

SAME_SIZE_ONLY = frozenset({"minicpmv4_6"})
"""Families whose transformers tower supports several images per forward only if they have the same size."""

IMAGES_FIRST = frozenset({"paligemma"})
"""Families whose processors put images before the text, without placeholders."""


def names_of(config: PreTrainedConfig) -> tuple[str, str, str, str]:
    """Return the family's `TOKENS`."""
    return TOKENS.get(config.model_type, PLAIN)


def tokenizer_of(config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one word per id, and the family's special tokens at the configuration's ids."""
    size = config.get_text_config().vocab_size
    words = {token: f"<{token}>" for token in range(size)}
    image, video, before, after = names_of(config)
    video_id = first_token(config, ("video_token_id", "video_token_index"))
    token_ids = {image: image_token(config), video: video_id}
    token_ids |= {before: first_token(config, BEFORE_IMAGE), after: first_token(config, AFTER_IMAGE)}
    used = {token_id for token_id in token_ids.values() if token_id is not None}
    spare = iter(number for number in range(size - 1, 0, -1) if number not in used)
    for name, token_id in token_ids.items():
        words[next(spare) if token_id is None else token_id] = name
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
    names |= dict(zip(("audio_token", "boa_token", "eoa_token"), AUDIO, strict=True))
    names |= dict(zip(("image_wrapper_token", "eof_token"), WRAPPERS, strict=True))
    slices = ("slice_start_token", "slice_end_token", "image_id_start_token", "image_id_end_token")
    names |= dict(zip(slices, SLICES, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<0>",
        pad_token="<1>",
        bos_token="<2>",
        add_bos_token=False,
        extra_special_tokens={name: word for name, word in names.items() if word in vocabulary},
    )
    # Also recognized between other special tokens.
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in (*token_ids, *more)])
    return tokenizer


def image_prompts(config: PreTrainedConfig, processor: Any) -> list[ImagePrompt]:
    """Create one prompt for each size, and one with two images."""
    image, _, before, after = names_of(config)
    placeholder = getattr(processor, "image_placeholder_token", getattr(processor, "image_token", image))
    if config.model_type in ADDED_AROUND:
        placeholder = f"{before}{placeholder}{after}"
    if config.model_type in IMAGES_FIRST:
        placeholder = ""
    second = SIZES[0] if config.model_type in SAME_SIZE_ONLY else SIZES[1]
    return [
        ImagePrompt(
            " ".join(["<20> <31> <45>", *(f"{placeholder} <{50 + index}>" for index, _ in enumerate(sizes)), "<60>"]),
            tuple(noise(*size) for size in sizes),
        )
        for sizes in [*([size] for size in SIZES), [SIZES[0], second]]
    ]


def noise(width: int, height: int) -> Image.Image:
    """Return an image of random colors, the same for the same size."""
    colors = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(width), dtype=torch.uint8)
    return Image.fromarray(colors.numpy())
