"""Random inputs for a model: text-only, or text with images and audio."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.config.positions import has_encoder
from nrl_models.common.config.walk import all_values
from nrl_models.inputs.audio import audio_inputs, audio_token
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.inputs.images import accepts_images, image_inputs, image_token, takes_images

__all__ = [
    "FIRST_TEXT_TOKEN",
    "Inputs",
    "decoder_ids",
    "first_text_token",
    "inputs_for",
    "takes_images",
    "text_ids",
    "vocabulary_size",
]

FIRST_TEXT_TOKEN = 16
"""Smallest token id of text. Lower ids may be special tokens, unless the vocabulary is small (`first_text_token`)."""


def first_text_token(vocabulary: int) -> int:
    """Return the first token id of random text: 0 for vocabularies of less than 32 tokens (DNA, digits)."""
    return FIRST_TEXT_TOKEN if vocabulary >= 2 * FIRST_TEXT_TOKEN else 0


def inputs_for(
    model: PreTrainedModel,
    *,
    batch: int = 2,
    length: int = 24,
    images: bool | None = None,
    labels: bool = False,
    seed: int = 0,
) -> Inputs:
    """Return keyword arguments for a forward of `model`, on its device; floating-point ones in fp32.

    Args:
        model: The model. If it accepts images, it runs on one to find the form.
        batch: Batch size.
        length: Sequence length, including image tokens. Longer if an image alone has as many tokens.
        images: Whether to add an image (and audio) to each sequence, if the model accepts them. None adds them if the
            model has a tower.
        labels: Whether to add labels for the loss.
        seed: Random seed.

    Raises:
        ImageInputsError: If the form of the model's images is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    forward = inspect.signature(model.forward).parameters
    # Some classes have `decoder_input_ids` for text models with an encoder, but can be built around others.
    sequences = ("input_ids", "decoder_input_ids") if has_encoder(config) else ("input_ids",)
    result: Inputs = {name: text_ids(config, (batch, length), generator) for name in sequences if name in forward}
    if has_encoder(config) and type(model).__name__.endswith("ForSequenceClassification"):
        result["input_ids"][:, -1] = config.eos_token_id  # its state is classified
    audio = images is not False
    images = takes_images(model) if images is None else images and accepts_images(model)
    if images:
        result = image_inputs(model, result, generator)
    if audio:
        result = audio_inputs(model, result, generator) or result
    if labels:
        result["labels"] = _labels(model, decoder_ids(result), generator)
    token = image_token(config)
    if token is not None and (images or (labels and accepts_images(model))):
        # In training, some models need token types even without images.
        kinds = (result["input_ids"] == token).long()
        result |= {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in forward}
    return {name: value.to(model.device) for name, value in result.items()}


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Return the number of tokens that have logits. It is at most the number of embeddings."""
    text = config.get_text_config(decoder=True)
    return min(text.vocab_size, getattr(text, "unpadded_vocab_size", None) or text.vocab_size)


def decoder_ids(inputs: Inputs) -> torch.Tensor:
    """Return the token ids `(batch, seq_len)` of the logits: the decoder's, if there is an encoder."""
    return inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]


def text_ids(config: PreTrainedConfig, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Return random token ids of text, without special tokens and image tokens (unless there are only these)."""
    vocabulary, special = vocabulary_size(config), _special_tokens(config)
    first = first_text_token(vocabulary)
    ids = torch.randint(first, vocabulary, shape, generator=generator)
    other = next((token for token in range(first, vocabulary) if token not in special), first)
    return ids.masked_fill(torch.isin(ids, torch.tensor(special)), other)


def _special_tokens(config: PreTrainedConfig) -> list[int]:
    """Return ids that are not text: end tokens, padding, images."""
    token_ids: list[Any] = []
    for key, value in all_values(config):
        if key == "vocabulary_map":
            token_ids.extend((value or {}).values())
        elif key.endswith(("_id", "token_ids", "token_index")):
            token_ids.extend(value if isinstance(value, (list, tuple)) else [value])
    return [token for token in token_ids if type(token) is int]


def _labels(model: PreTrainedModel, input_ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    name, config = type(model).__name__, model.config
    num_labels: Any = config.num_labels
    if name.endswith("ForSequenceClassification"):
        return torch.randint(0, num_labels, (len(input_ids),), generator=generator)
    if name.endswith("ForTokenClassification"):
        return torch.randint(0, num_labels, tuple(input_ids.shape), generator=generator)
    labels = input_ids.clone()
    for token in (image_token(config), audio_token(config)):
        if token is not None:
            labels[labels == token] = -100
    return labels
