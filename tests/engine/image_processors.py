"""Tiny image processors: transformers' classes, a word tokenizer, and the sizes of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

from nrl_models.inputs.image_geometry import Geometry
from tests.engine.image_tokens import GEMMA4, MINICPM, tokenizer_of

SHARED_PROCESSORS = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v", "glm_ocr": "glm46v"}
"""Model types that use the processor of another model type."""

FEATURE_EXTRACTORS = {
    "gemma3n": "Gemma3nAudioFeatureExtractor",
    "gemma4": "Gemma4AudioFeatureExtractor",
    "gemma4_unified": "Gemma4UnifiedAudioFeatureExtractor",
}
"""Feature extractors that processors require in addition to images. transformers has no auto class for them."""

SETTINGS: dict[str, Callable[[PreTrainedConfig, Geometry], dict[str, Any]]] = {
    "aria": lambda config, geometry: {"max_image_size": geometry.side},
    **dict.fromkeys(
        GEMMA4,
        lambda config, geometry: {
            "size": None,
            "patch_size": geometry.patch,
            "pooling_kernel_size": geometry.merge,
            "max_soft_tokens": 70,
        },
    ),
    # Images of this size are not sliced: transformers' tower does not support slices of several sizes in one forward.
    **dict.fromkeys(
        MINICPM, lambda config, geometry: {"patch_size": geometry.patch, "scale_resolution": 2 * geometry.side}
    ),
    # Side of a tile in tokens.
    "cohere2_vision": lambda config, geometry: {
        "patch_size": geometry.side // geometry.patch // config.downsample_factor
    },
    "kimi_k25": lambda config, geometry: {
        "size": {"max_height": geometry.side * 2, "max_width": geometry.side * 2},
        "max_patches": 64,
    },
    "lfm2_vl": lambda config, geometry: {
        "encoder_patch_size": geometry.patch,
        "tile_size": 4 * geometry.patch,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
    },
    "muse_glimmer": lambda config, geometry: {"max_image_tokens": 36},
    "step3p7": lambda config, geometry: {
        "size": {"height": geometry.side, "width": geometry.side},
        "patch_size": geometry.side,
        "vision_patch_size": geometry.patch,
    },
}
"""Processor arguments specific to a family, for the sizes of a tiny tower."""


def save_processor(config: PreTrainedConfig, folder: Path) -> Any:
    """Save a processor in the folder of a tiny model, and return it.

    Raises:
        KeyError: transformers has none for this model.
    """
    source = CONFIG_MAPPING[SHARED_PROCESSORS.get(config.model_type, config.model_type)]
    kind = PROCESSOR_MAPPING[source]
    geometry = Geometry(config, 1, 1)
    tokens = int((geometry.side // geometry.patch) ** 2 * getattr(config, "downsample_ratio", 1.0) ** 2)
    image = _image_processor(config, IMAGE_PROCESSOR_MAPPING[source], geometry, tokens)
    parameters = inspect.signature(kind.__init__).parameters
    parts = {"image_processor": image, "tokenizer": tokenizer_of(config)}
    if "video_processor" in parameters and source in VIDEO_PROCESSOR_MAPPING:
        parts["video_processor"] = _video_processor(VIDEO_PROCESSOR_MAPPING[source])
    if "feature_extractor" in parameters:
        parts["feature_extractor"] = getattr(transformers, FEATURE_EXTRACTORS[config.model_type])()
    values = {
        "patch_size": geometry.patch,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": 1,
        "num_image_tokens": tokens,
        "num_query_tokens": getattr(config, "num_query_tokens", None),
        "image_seq_len": int(tokens / getattr(config, "scale_factor", 1) ** 2),
        "spatial_merge_size": getattr(config, "spatial_merge_size", 1),
        "image_seq_length": getattr(
            config, "mm_tokens_per_image", getattr(config, "vision_soft_tokens_per_image", tokens)
        ),
        "size_conversion": {
            geometry.side: next(iter(getattr(config, "projector_patch_to_query_dict", {0: 0}).values()))
        },
    }
    processor = kind(**parts, **{name: value for name, value in values.items() if name in parameters})
    processor.save_pretrained(folder)
    return processor


def _video_processor(kind: Any) -> Any:
    # writing text onto frames requires a font, which is missing
    return kind(draw_on_frames=False) if hasattr(kind, "draw_on_frames") else kind()


def _image_processor(config: PreTrainedConfig, kinds: Mapping[str, Any], geometry: Geometry, tokens: int) -> Any:
    kind = kinds.get("torchvision") or kinds["pil"]
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
    if getattr(config, "image_grid_pinpoints", None):
        values["image_grid_pinpoints"] = config.image_grid_pinpoints
    if config.model_type in SETTINGS:
        values |= SETTINGS[config.model_type](config, geometry)
    processor = kind(**values)
    if config.model_type == "paligemma":
        processor.image_seq_length = tokens
    return processor
