"""Random image inputs in the form that a vision-language model accepts.

The form follows from the argument names of the model's `get_image_features`, which all such models in transformers
have. The number of tokens of an image follows from its result. If names do not determine the layout of an image, likely
layouts are tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import BatchFeature, PreTrainedConfig, PreTrainedModel

from nrl_models.common.config.walk import parts
from nrl_models.errors import NRLModelsError, one_line
from nrl_models.inputs.image_geometry import COMPANIONS, Geometry, Inputs, Shape, patch_positions, vision_part

PIXELS = ("pixel_values", "image_pixel_values", "flattened_patches", "image_patches")
"""Names of the argument that holds an image."""

POSITION_MASK = "image_embeds_position_mask"
"""Name of the argument that marks the positions of image features, in models without image tokens."""


class ImageInputsError(NRLModelsError, ValueError):
    """The format of a model's image inputs is unknown."""


def accepts_images(model: PreTrainedModel) -> bool:
    """Return True if the model's forward has an argument for images."""
    return any(name in parameters_of(model.forward) for name in PIXELS)


def takes_images(model: PreTrainedModel) -> bool:
    """Return True if the model's forward accepts images, and it has a vision tower."""
    return accepts_images(model) and getattr(model.config, "vision_config", model.config) is not None


def image_inputs(model: PreTrainedModel, inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Add one random image to each sequence in `inputs`, with its tokens after the third text token.

    Args:
        model: The model. Its `get_image_features` is run to find the form, or the complete model if it has none.
        inputs: Text inputs. `input_ids`, if present, grow if an image leaves too little room for text.
        generator: Random generator.

    Returns:
        The inputs, floating-point ones in fp32.

    Raises:
        ImageInputsError: If no known layout fits.
    """
    text = inputs["input_ids"] if "input_ids" in inputs else inputs["decoder_input_ids"]
    geometry = Geometry(model.config, *text.shape)
    forward = parameters_of(model.forward)
    # A forward that inserts features by a mask has no image tokens to count.
    places_by_mask = POSITION_MASK in forward and image_token(model.config) is None
    method = None if places_by_mask else feature_method(model, "get_image_features")
    known = parameters_of(method or model.forward)
    argument = next((name for name in PIXELS if name in known), None)
    # Before transformers 5.22, the method's argument may have another name than the forward's.
    pixels = argument if argument in forward else next(name for name in PIXELS if name in forward)
    failures: dict[str, str] = {}
    for shape in geometry.layouts(pixels, known):
        values = torch.randn(shape, generator=generator)
        if pixels == "flattened_patches":
            values[..., :2] = patch_positions(geometry, shape)
        for companions in _companions(known, geometry, shape):
            image = {pixels: values} | companions
            result = inputs | {name: value for name, value in image.items() if name in forward}
            try:
                if method is None:
                    return _without_method(model, result)
                arguments = {argument or pixels: values} | companions | _settings(model.config, known)
                count = token_count(run_on(model, method, arguments), len(text))
                return result | {"input_ids": _with_tokens(model.config, text, count)}
            except Exception as error:
                failures[str(tuple(shape))] = one_line(error)
    tried = "; ".join(f"{pixels} of shape {shape}: {failure}" for shape, failure in failures.items())
    raise ImageInputsError(
        f"{type(model).__name__} takes images in an unknown form ({tried}). "
        "Run it on text with images=False, or add the form to nrl_models/inputs/images.py."
    )


def in_order(inputs: Inputs, order: torch.Tensor) -> Inputs:
    """Reorder the sequences of a batch, together with their images.

    Args:
        inputs: Inputs from `image_inputs`, for `len(order)` sequences that have one image each, or none.
        order: Previous index of each sequence.
    """

    def moved(value: torch.Tensor) -> torch.Tensor:
        # Either each sequence has an equal number of rows, or all images of the batch are concatenated in one row.
        dim = 0 if len(value) % len(order) == 0 else value.ndim - 1
        rows = value.unflatten(dim, (len(order), -1))
        return rows.index_select(dim, order.to(value.device)).flatten(dim, dim + 1)

    # Indices into the patches of all images do not change, because images have the same size.
    return {name: value if name == "image_token_pooling" else moved(value) for name, value in inputs.items()}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or method by name."""
    return dict(inspect.signature(function).parameters)


def feature_method(model: PreTrainedModel, name: str) -> Callable[..., Any] | None:
    """Return the model's method with this name that computes features of images or audio, or None if it has none."""
    # The head's method passes its arguments on and may not name them all.
    return next((getattr(owner, name) for owner in (model.base_model, model) if hasattr(owner, name)), None)


def _settings(config: PreTrainedConfig, known: dict[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the configuration's values for arguments without a default."""
    values = {**vars(vision_part(config)), **vars(config)}
    return {
        name: values[name]
        for name, parameter in known.items()
        if parameter.default is parameter.empty and name in values and name not in COMPANIONS
    }


def _companions(known: dict[str, inspect.Parameter], g: Geometry, shape: Shape) -> Iterator[Inputs]:
    """Yield arguments for an image of this shape: first all known ones, then only those without a default."""
    required = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    for names in (known, required):
        makers = {name: COMPANIONS[name] for name in names if name in COMPANIONS}
        for chosen in product(*makers.values()):
            yield {name: make(g, shape) for name, make in zip(makers, chosen, strict=True)}


@torch.no_grad()
def run_on(model: PreTrainedModel, function: Callable[..., Any], arguments: Inputs) -> Any:
    """Call `function` of `model` with tensors moved to the model's device and dtype."""
    return function(**cast(arguments, model))


def cast(inputs: Inputs, model: nn.Module) -> Inputs:
    """Move the inputs to the model's device, and cast floating-point tensors to its dtype."""
    parameter = next(model.parameters())
    return BatchFeature(inputs).to(parameter.device, parameter.dtype).data


MOST_TOKENS = 64
"""Maximum number of image tokens to try for a model that does not report the number."""


def _without_method(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Create inputs for a model without a method for image features.

    The number of image tokens comes from the configuration. If it has none, use the first number with which the model
    runs.

    Raises:
        Exception: The model's error for the last number, if it does not run.
    """
    config = model.config
    keys = ("mm_tokens_per_image", "image_seq_length", "num_image_tokens", "num_query_tokens")
    counts: list[int] = []
    if "input_ids" in inputs and image_token(config) is not None:
        known = first_token(config, keys)
        in_part = first_token(config, IMAGE_TOKENS) is None  # the tower replaces its tokens with its features
        counts = [known] if known else list(range(1, MOST_TOKENS + 1)) if in_part else []
    for left, count in zip(range(len(counts) or 1, 0, -1), counts or [0], strict=True):
        result = dict(inputs)
        if count:
            result["input_ids"] = _with_tokens(config, inputs["input_ids"], count)
        if POSITION_MASK in parameters_of(model.forward):
            result[POSITION_MASK] = torch.zeros_like(result["input_ids"])
            result[POSITION_MASK][:, 3 : 3 + config.latent_query_num] = 1
        try:
            run_on(model, model, result)
            break
        except Exception:
            if left == 1:
                raise
    return result


def token_count(features: Any, images: int) -> int:
    """Return the number of tokens per image or audio clip, computed from the features of all `images`."""
    deep = getattr(features, "deepstack_features", None)
    if hasattr(features, "pooler_output"):
        last = getattr(features, "last_hidden_state", None)
        features = next(output for output in (features.pooler_output, last, deep and deep[0][1]) if output is not None)
    total = _rows(features)
    if not total or total % images:
        raise ValueError(f"{total} tokens for {images} images")
    return total // images


def _rows(features: Any) -> int:
    if isinstance(features, (list, tuple)):
        return sum(map(_rows, features))
    return features.numel() // features.shape[-1]


# Tokens

IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_index")
BEFORE_IMAGE = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
AFTER_IMAGE = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
TOKENS_BEFORE, TOKENS_AFTER = 3, 5


def image_token(config: PreTrainedConfig) -> int | None:
    """Return the id of image tokens, of the model or of its vision tower (Phi-4-multimodal). None if it has none."""
    return own_token(config, IMAGE_TOKENS)


def own_token(config: PreTrainedConfig, keys: Collection[str]) -> int | None:
    """Return the first token id under these keys in the configuration, or in the part of a tower."""
    text = config.get_text_config()
    towers = [part for part in parts(config).values() if part is not text]
    candidates = (first_token(part, keys) for part in (config, *towers))
    return next((token for token in candidates if token is not None), None)


def first_token(config: PreTrainedConfig, keys: Collection[str]) -> int | None:
    """Return the configuration's first token id under these keys, or None."""
    return next((value for key in keys if type(value := getattr(config, key, None)) is int), None)


def _with_tokens(config: PreTrainedConfig, input_ids: torch.Tensor, count: int) -> torch.Tensor:
    """Insert `count` image tokens after the third token. `input_ids` grow to keep five text tokens after them."""
    if (token := image_token(config)) is None:
        raise ValueError(f"the configuration has none of {', '.join(IMAGE_TOKENS)}")
    short = max(0, TOKENS_BEFORE + count + TOKENS_AFTER - input_ids.shape[1])
    input_ids = torch.cat([input_ids, input_ids[:, :1].expand(-1, short)], dim=1).clone()
    end = TOKENS_BEFORE + count
    input_ids[:, TOKENS_BEFORE:end] = token
    for keys, position in ((BEFORE_IMAGE, TOKENS_BEFORE - 1), (AFTER_IMAGE, end)):
        if (mark := first_token(config, keys)) is not None:
            input_ids[:, position] = mark
    return input_ids
