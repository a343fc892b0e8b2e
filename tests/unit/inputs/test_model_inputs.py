"""Random inputs for each kind of model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, LlamaConfig, PreTrainedModel

from nrl_models import registry
from nrl_models.consistency.prompts import Prompts
from nrl_models.inputs.model_inputs import FIRST_TEXT_TOKEN, inputs_for, text_ids
from nrl_models.testing.tiny import tiny_config


@cache
def model(kind: str) -> PreTrainedModel:
    config_class = Gemma3Config if kind.startswith("Gemma3") else LlamaConfig
    return registry.model_class(kind).from_config(tiny_config(config_class))


def inputs(architecture: str = "LlamaForCausalLM", **options: Any) -> dict[str, torch.Tensor]:
    return inputs_for(model(architecture), **options)


def vision_inputs(kind: str = "ForConditionalGeneration", **options: Any) -> dict[str, torch.Tensor]:
    return inputs(f"Gemma3{kind}", **options)


def test_text_inputs() -> None:
    batch_ = inputs(batch=3, length=500)
    assert batch_.keys() == {"input_ids"}
    ids = batch_["input_ids"]
    assert ids.shape == (3, 500)
    assert ids.dtype == torch.int64
    assert ids.min() >= FIRST_TEXT_TOKEN
    assert ids.max() == 511  # the last token of the vocabulary
    assert len(ids.unique()) > 400


def test_text_inputs_exclude_special_tokens() -> None:
    config = tiny_config(LlamaConfig, {"vocab_size": 32, "eos_token_id": [20, 21], "pad_token_id": 25})
    ids = inputs_for(registry.model_class("LlamaForCausalLM").from_config(config), length=2000)["input_ids"]
    assert set(ids.unique().tolist()) == set(range(FIRST_TEXT_TOKEN, 32)) - {20, 21, 25}


@pytest.mark.parametrize(
    ("vocabulary", "special", "expected"),
    [
        (1, {}, {0}),
        (4, {"bos_token_id": 1, "eos_token_id": 2}, {0, 3}),
        (3, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}, {0}),
        (16, {"bos_token_id": 1, "eos_token_id": 2}, {0, *range(3, 16)}),
        (17, {"bos_token_id": 0, "eos_token_id": 1}, set(range(2, 17))),
        (40, {"bos_token_id": 16, "eos_token_id": 17}, set(range(18, 40))),
    ],
)
def test_text_ids_of_small_vocabularies(vocabulary: int, special: dict[str, int], expected: set[int]) -> None:
    token_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | special
    ids = text_ids(LlamaConfig(vocab_size=vocabulary, **token_ids), (2, 1000), torch.Generator().manual_seed(0))
    assert set(ids.unique().tolist()) == expected


@pytest.mark.parametrize(("vocabulary", "expected"), [(1, {0}), (16, set(range(16))), (40, set(range(16, 40)))])
def test_counting_prompts_without_a_tokenizer(vocabulary: int, expected: set[int]) -> None:
    assert set(Prompts(None, vocabulary).counting(100)) == expected


def test_inputs_are_deterministic_and_keep_rng_state() -> None:
    inputs(), vision_inputs()  # building the models draws random numbers
    state = torch.get_rng_state()
    for create in (inputs, vision_inputs):
        first, again, other = create(labels=True), create(labels=True), create(labels=True, seed=1)
        assert first.keys() == again.keys() == other.keys()
        assert all(torch.equal(first[name], tensor) for name, tensor in again.items())
        assert not torch.equal(first["input_ids"], other["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "shape", "top"),
    [("ForCausalLM", (2, 24), 511), ("ForSequenceClassification", (2,), 1), ("ForTokenClassification", (2, 24), 1)],
)
def test_labels_match_model_head(kind: str, shape: tuple[int, ...], top: int) -> None:
    batch = inputs(f"Llama{kind}", labels=True)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["labels"].shape == shape
    assert 0 <= batch["labels"].min() <= batch["labels"].max() <= top
    if kind == "ForCausalLM":
        assert torch.equal(batch["labels"], batch["input_ids"])
        assert batch["labels"] is not batch["input_ids"]


def test_image_in_each_sequence() -> None:
    config, batch_ = tiny_config(Gemma3Config), vision_inputs(batch=3)
    assert batch_.keys() == {"input_ids", "pixel_values", "token_type_ids"}
    is_image = batch_["input_ids"] == config.image_token_id
    assert torch.equal(is_image, batch_["token_type_ids"].bool())
    assert is_image[:, 3:7].all()
    assert is_image.sum() == 3 * config.mm_tokens_per_image
    size = config.vision_config.image_size
    assert batch_["pixel_values"].shape == (3, 3, size, size)
    assert batch_["pixel_values"].std() > 0.9


def test_inputs_without_images() -> None:
    batch = vision_inputs(images=False)
    assert batch.keys() == {"input_ids"}
    assert not batch["input_ids"].eq(tiny_config(Gemma3Config).image_token_id).any()
    trained = vision_inputs(images=False, labels=True)
    assert trained["token_type_ids"].eq(0).all()


def test_inputs_are_on_model_device() -> None:
    gemma = registry.model_class("Gemma3ForConditionalGeneration").from_config(tiny_config(Gemma3Config), device="meta")
    batch = inputs_for(gemma)
    assert all(tensor.is_meta for tensor in batch.values())
