"""Random inputs of the kind a model takes: text alone, or text with images."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

Inputs = dict[str, Any]

FIRST_WORD = 16
"""Token ids below are left to special tokens."""


def inputs_for(
    model_class: type,
    config: PreTrainedConfig,
    device: torch.device,
    *,
    batch: int = 2,
    length: int = 24,
    images: bool | None = None,
    labels: bool = False,
    seed: int = 0,
) -> Inputs:
    """Keyword arguments for a forward of `model_class`, on `device`.

    Args:
        model_class: the class under test.
        config: its configuration.
        device: where the tensors go.
        batch: number of sequences.
        length: tokens in each.
        images: whether to put an image in each sequence; None puts one wherever the model takes any.
        labels: whether to add labels for the loss.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab_size = config.get_text_config().vocab_size
    input_ids = torch.randint(FIRST_WORD, vocab_size, (batch, length), generator=generator)
    input_ids[torch.isin(input_ids, torch.tensor(_special_tokens(config)))] = FIRST_WORD
    result: Inputs = {"input_ids": input_ids}
    takes_images = getattr(config, "vision_config", None) is not None
    if takes_images and images is not False:
        result |= _image_inputs(config, input_ids, generator)
    if labels:
        result["labels"] = _labels(model_class, config, input_ids, generator)
        if takes_images and "token_type_ids" not in result:
            result["token_type_ids"] = torch.zeros_like(input_ids)
    return {name: value.to(device) for name, value in result.items()}


def _special_tokens(config: PreTrainedConfig) -> list[int]:
    """Ids that stand for something else than a word: ends, padding, images."""
    values = [
        value
        for part in (config, config.get_text_config())
        for key, value in part.to_dict().items()
        if key.endswith(("token_id", "token_index"))
    ]
    return [one for value in values for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]


def _image_inputs(config: PreTrainedConfig, input_ids: torch.Tensor, generator: torch.Generator) -> Inputs:
    """One image of fixed size a sequence, its tokens after the third word."""
    vision = config.vision_config
    count = config.mm_tokens_per_image
    input_ids[:, 3 : 3 + count] = config.image_token_id
    token_type_ids = (input_ids == config.image_token_id).long()
    size = (len(input_ids), getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
    return {"pixel_values": torch.randn(size, generator=generator), "token_type_ids": token_type_ids}


def _labels(
    model_class: type, config: PreTrainedConfig, input_ids: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    name = model_class.__name__
    if name.endswith("ForSequenceClassification"):
        return torch.randint(0, config.num_labels, (len(input_ids),), generator=generator)
    if name.endswith("ForTokenClassification"):
        return torch.randint(0, config.num_labels, tuple(input_ids.shape), generator=generator)
    return input_ids.clone()
