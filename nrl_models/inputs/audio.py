"""Random audio inputs in the form that a model accepts.

As for images (`nrl_models/inputs/images.py`), the form follows from the argument names of the model's
`get_audio_features`, and the number of tokens of a clip from its result. If names do not determine the layout, known
layouts are tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.config.walk import parts
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.inputs.images import feature_method, first_token, own_token, parameters_of, run_on, token_count

AUDIO = ("input_features", "input_values")
"""Names of the argument that holds audio."""

METHOD = "get_audio_features"
"""Method of transformers' models that accept audio."""

MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask", "input_values_mask")
"""Names of the mask that tells audio frames from padding."""

SAMPLES = "chunk_sample_lengths"
"""Name of the argument with the number of samples of a clip's frames."""

WIDTHS = ("num_mel_bins", "input_dim", "feature_size", "input_feat_size", "audio_embed_dim")
"""Names that configurations have for the number of features of a frame."""

FRAMES_OF_TOKEN = "audio_length_per_tok"
"""Key of the number of frames per token, if audio is added to the tokens and has no separate positions."""

STRIDES = ("conv_stride", "upsampling_ratios", "downsampling_ratios")
"""Names of lists whose product is the number of samples per frame."""

FRAMES = 6
"""Number of frames of a waveform."""

AUDIO_TOKENS = ("audio_token_id", "audio_token_index")
TOKENS_AFTER = 4


def audio_token(config: PreTrainedConfig) -> int | None:
    """Return the id of audio tokens, or None if the model has none."""
    return own_token(config, AUDIO_TOKENS)


def takes_audio(model: PreTrainedModel) -> bool:
    """Return True if the forward accepts audio, and the configuration has a tower, and tokens or frames per token."""
    named = any(name in parameters_of(model.forward) for name in AUDIO)
    has_tower = getattr(model.config, "audio_config", model.config) is not None
    return named and has_tower and (audio_token(model.config) is not None or hasattr(model.config, FRAMES_OF_TOKEN))


def audio_inputs(model: PreTrainedModel, inputs: Inputs, generator: torch.Generator) -> Inputs | None:
    """Add one random clip to each sequence in `inputs`, with its tokens before the last four text tokens.

    Args:
        model: The model. If it has a method for audio features, it is run to find the form.
        inputs: Text inputs, optionally with images. `input_ids` grow by the tokens of a clip.
        generator: Random generator.

    Returns:
        The inputs, floating-point ones in fp32. None if the model does not accept audio, or its form is unknown.
    """
    if not takes_audio(model) or "input_ids" not in inputs:
        return None
    forward, method = parameters_of(model.forward), feature_method(model, METHOD)
    known = forward if method is None else parameters_of(method)
    if (name := next((name for name in AUDIO if name in known and name in forward), None)) is None:
        return None
    if frames := getattr(model.config, FRAMES_OF_TOKEN, None):
        batch, length = inputs["input_ids"].shape
        width = next(filter(None, (_width(vars(part)) for part in parts(model.config).values())), None)
        if width is None:
            return None
        return inputs | {name: torch.randn(batch, width, frames * length, generator=generator)}
    for clips in _forms(model.config, name, known, len(inputs["input_ids"]), generator):
        try:
            counts = [] if method is None else _counts(model.config, run_on(model, method, clips), len(clips[name]))
        except Exception:  # the model does not accept this form
            continue
        forward_inputs = {key: value for key, value in clips.items() if key in forward}
        for count in counts or [size // stride for size in clips[name].shape[1:] for stride in (2, 4, 8)]:
            result = inputs | forward_inputs | {"input_ids": _with_tokens(model.config, inputs["input_ids"], count)}
            try:
                run_on(model, model, result)
            except Exception:  # the model does not accept this number of tokens
                continue
            return result
    return None


def _forms(
    config: PreTrainedConfig, name: str, known: Collection[str], batch: int, generator: torch.Generator
) -> Iterator[Inputs]:
    """Yield random clips in each form that the method may accept, with masks and lengths."""
    masks = [mask for mask in MASKS if mask in known]
    # Some models negate a mask, which has to be boolean; others sum it.
    dtypes = (torch.bool, torch.long) if masks else (torch.bool,)
    towers = [part for part in parts(config).values() if part is not config.get_text_config()]
    layouts = [(part, *layout) for part in towers for layout in _layouts(part, batch)]
    for (part, shape, frames), dtype in product(layouts, dtypes):
        clips = {name: torch.randn(shape, generator=generator)}
        clips |= {mask: torch.ones(batch, frames, dtype=dtype) for mask in masks}
        if SAMPLES in known:
            clips[SAMPLES] = torch.full((batch,), frames * getattr(part, "hop_length", 1))
        yield clips


def _layouts(part: PreTrainedConfig, batch: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield possible shapes of a batch of clips, each with the number of frames of a clip.

    A spectrogram has as many frames as the tower has positions or expects per window, else 48.
    """
    values = vars(part)
    if samples := getattr(part, "samples_per_token", None):  # the waveform
        yield (batch, 4 * samples), 4 * samples
    for stride in (math.prod(values[key]) for key in STRIDES if isinstance(values.get(key), (list, tuple))):
        samples = FRAMES * stride  # the waveform, which convolutions shorten
        yield (batch, 1, samples), samples
        yield (batch, samples), samples
    if (width := _width(values)) is None:
        return
    places, window = values.get("max_source_positions"), values.get("n_window")
    for frames in (*filter(None, [window and 2 * window, places and 2 * places]), 48):
        yield (batch, width, frames), frames
        yield (batch, frames, width), frames


def _width(values: Mapping[str, Any]) -> int | None:
    """Return the number of features per frame from a configuration's values; None if they do not have it."""
    if (width := next((values[key] for key in WIDTHS if key in values), None)) is not None:
        return width * values.get("num_stacked_frames", 1)
    channels = values.get("subsampling_conv_channels")
    return channels[0] if channels else None  # transformers' classes use it as the width


def _counts(config: PreTrainedConfig, features: Any, clips: int) -> list[int]:
    """Return possible numbers of tokens of a clip: that of its features, or the padded number."""
    padded = getattr(config, "audio_soft_tokens_per_image", None)
    return [token_count(features, clips), *([] if padded is None else [padded])]


def _with_tokens(config: PreTrainedConfig, input_ids: torch.Tensor, count: int) -> torch.Tensor:
    first, last = input_ids[:, :-TOKENS_AFTER], input_ids[:, -TOKENS_AFTER:]
    marks = first_token(config, ("audio_start_token_id",)), first_token(config, ("audio_end_token_id",))
    audio = [marks[0], *[audio_token(config)] * count, marks[1]]
    between = torch.tensor([token for token in audio if token is not None]).expand(len(input_ids), -1)
    return torch.cat([first, between, last], dim=1)
