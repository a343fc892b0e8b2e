"""Prompts with images: rows, prompts, the engine's completions, and the trainer's inputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from recipe_inputs import byte_tokenizer, gemma4_processor, rows_with_images
from tokenizers import processors
from versions import case_of

from nrl_models import registry
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import EngineError, RecipeError
from nrl_models.logprobs import Sampling, rollout_logprobs, token_logprobs
from nrl_models.losses import Normalize, token_weights
from nrl_models.recipes import read_recipe, recipes
from nrl_models.recipes.image_prompts import image_prompt
from nrl_models.recipes.policy_batch import SampleBatch
from nrl_models.recipes.rows import rows
from nrl_models.testing.case import FamilyCase

CASE = case_of("Gemma4ForConditionalGeneration")
MESSAGES = [{"role": "user", "content": "A<image>B"}]
RED, BLUE = (Image.new("RGB", (48, 48), color) for color in ("red", "blue"))


@pytest.fixture(scope="module")
def processor() -> Any:
    return gemma4_processor(CASE.reference().config)


@pytest.fixture
def prompts(processor: Any) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    return [image_prompt(processor, MESSAGES, [image]) for image in (RED, BLUE)]


# Rows and prompts


def test_rows_open_images(tmp_path: Path) -> None:
    found = rows(str(rows_with_images(tmp_path)), images="images", columns={"prompt": "$problem"})
    assert [image.size for image in found[0]["images"]] == [(96, 48)]
    assert found[1]["images"][0].getpixel((0, 0)) == (25, 230, 90)
    assert found[1]["prompt"] == found[1]["problem"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"picture": "1.png"}, r"images: 'images' is not a column; it has picture"),
        ({"images": ["2.png"]}, r"2\.png.*cannot be read as an image"),
        ({"images": "rows.jsonl"}, r"rows\.jsonl.*cannot be read as an image"),
        ({"images": [3]}, r"images has int: expected an image, or a file's name"),
    ],
)
def test_invalid_images_raise(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(RecipeError, match=message):
        rows(str(file), images="images")


def test_image_prompt_placeholder_positions(processor: Any) -> None:
    image = processor.image_token_id
    ids, inputs = image_prompt(processor, MESSAGES, [RED])
    assert processor.tokenizer.decode([token for token in ids if token != image]) == "uA<boi><eoi>Ba"
    assert inputs["mm_token_type_ids"].sum() == ids.count(image) == 64
    assert set(inputs) == {"pixel_values", "image_position_ids", "mm_token_type_ids"}
    parts = [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "B"}]
    again, others = image_prompt(processor, [{"role": "user", "content": parts}], [BLUE])
    assert again == ids
    assert not torch.equal(others["pixel_values"], inputs["pixel_values"])


def test_image_prompt_has_no_appended_eos(processor: Any) -> None:
    expected, inputs = image_prompt(processor, MESSAGES, [RED])
    appending = gemma4_processor(CASE.reference().config)
    tokenizer = appending.tokenizer
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert tokenizer("B")["input_ids"][-1] == tokenizer.eos_token_id
    found, others = image_prompt(appending, MESSAGES, [RED])
    assert found == expected
    assert {name: value.shape for name, value in others.items()} == {
        name: value.shape for name, value in inputs.items()
    }


def test_mismatched_prompts_and_images_raise(processor: Any) -> None:
    with pytest.raises(RecipeError, match=r"names 1 images .* and the row has 2"):
        image_prompt(processor, MESSAGES, [RED, BLUE])
    with pytest.raises(RecipeError, match="has to be a list of messages"):
        image_prompt(processor, "A<image>B", [RED])
    with pytest.raises(RecipeError, match="supports no images: the checkpoint only has a"):
        image_prompt(byte_tokenizer(CASE.reference().config), MESSAGES, [RED])


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("gemma4/vlm_grpo_e4b", "engine.name=vllm", r"'vllm' accepts only token ids here.*expected hf-generate"),
        ("llama/sft", "data.images=images", r"only grpo, dr_grpo and dapo support images"),
    ],
)
def test_recipes_without_image_support_raise(name: str, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read_recipe(recipes()[name], [override])


# Engine and trainer


def test_rollouts_are_scored_with_their_images(prompts: list[Any]) -> None:
    """One batch with two completions for each of two images, and one without an image. The tokens are the same."""
    (red, of_red), (blue, of_blue) = prompts
    assert red == blue
    engine, model = HFEngine(CASE.reference()), CASE.model()
    asked, inputs = [red, blue, red, blue, [100, 101]], [of_red, of_blue, of_red, of_blue, {}]
    samples = engine.generate(asked, Sampling(), max_new_tokens=5, seed=3, ignore_end=False, model_inputs=inputs)
    batch = SampleBatch.of(samples)
    found = rollout_logprobs(model, batch.sequences, score=batch.score, model_inputs=batch.model_inputs).logprobs
    torch.testing.assert_close(found, batch.logprobs.float(), rtol=1e-5, atol=1e-5)
    for number, (sample, own) in enumerate(zip(samples, batch.model_inputs, strict=True)):
        alone = token_logprobs(model, torch.tensor([sample.sequence]), score=batch.score[number][None], **own).logprobs
        torch.testing.assert_close(found[number, None, : alone.shape[1]], alone, rtol=1e-5, atol=1e-5)
    swapped = [batch.model_inputs[place] for place in (1, 0, 3, 2, 4)]
    others = rollout_logprobs(model, batch.sequences, score=batch.score, model_inputs=swapped).logprobs
    assert (others - found)[:4].abs().amax(1).min() > 1e-3
    assert torch.equal(others[4], found[4])
    with pytest.raises(ValueError, match="model_inputs for 2 of 5 sequences"):
        rollout_logprobs(model, batch.sequences, model_inputs=inputs[:2])


def test_completion_ends_before_image_placeholder(prompts: list[Any]) -> None:
    (red, inputs), _ = prompts
    model = CASE.new_pair()[0]
    image, word = model.config.image_token_id, 120

    def third_is_an_image(_: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -1e4)
        forced[..., word] = 0.0
        taken = sum(1 for _ in forwards)
        forwards.append(None)
        if taken % 4 == 2:
            forced[..., image] = 1e4
        return forced

    forwards: list[None] = []
    model.lm_head.register_forward_hook(third_is_an_image)
    engine = HFEngine(model)
    (sample,) = engine.generate([red], Sampling(), max_new_tokens=4, ignore_end=False, model_inputs=[inputs])
    assert (sample.tokens, sample.finish_reason) == ((word, word), "placeholder")
    forwards[:] = [None] * 2
    (empty,) = engine.generate([red], Sampling(), max_new_tokens=4, ignore_end=False, model_inputs=[inputs])
    assert (empty.tokens, empty.logprobs) == ((), ())
    forwards.clear()
    with pytest.raises(EngineError, match=r"placeholder of an image.* in sequences \[0\].*ignore_end=False"):
        engine.generate([red], Sampling(), max_new_tokens=4, model_inputs=[inputs])
    batch = SampleBatch.of([sample, empty])
    for normalize in Normalize:
        weights = token_weights(batch.sampled, normalize, 4 if normalize is Normalize.LONGEST else None)
        assert math.isfinite(weights.sum())
        assert not weights[1].any()
    forwards.clear()
    (text,) = engine.generate([red], Sampling(), max_new_tokens=4, ignore_end=False)
    assert text.tokens[2] == image, "without images, the placeholder is an ordinary token"


def test_engine_scores_sequence_with_images(prompts: list[Any]) -> None:
    (red, inputs), _ = prompts
    engine = HFEngine(CASE.new_pair()[0])
    (sample,) = engine.generate([red], Sampling(), max_new_tokens=3, ignore_end=False, model_inputs=[inputs])
    count = len(sample.tokens)
    (seen,) = engine.score([sample.sequence], Sampling(), last=count, model_inputs=[sample.sequence_inputs])
    assert seen[-count:] == pytest.approx(sample.logprobs, abs=1e-5)
    black = sample.sequence_inputs | {"pixel_values": torch.zeros_like(sample.model_inputs["pixel_values"])}
    (other,) = engine.score([sample.sequence], Sampling(), last=count, model_inputs=[black])
    assert other[-count:] != pytest.approx(sample.logprobs, abs=1e-5)


def test_processor_token_ids_and_masks_are_ignored(prompts: list[Any]) -> None:
    (red, inputs), _ = prompts
    model = CASE.model()
    engine, options = HFEngine(model), {"max_new_tokens": 3, "ignore_end": False}
    from_processor = {"input_ids": torch.tensor([red]), "attention_mask": torch.ones(1, len(red)).long()}
    (expected,) = engine.generate([red], Sampling(), **options, model_inputs=[inputs])
    (sample,) = engine.generate([red], Sampling(), **options, model_inputs=[{**from_processor, **inputs}])
    assert sample == expected
    assert sample.model_inputs.keys() == inputs.keys()
    count, given = len(sample.tokens), [{**from_processor, **sample.sequence_inputs}]
    (scores,) = engine.score([sample.sequence], Sampling(), last=count, model_inputs=given)
    assert scores[-count:] == pytest.approx(expected.logprobs, abs=1e-5)
    found = rollout_logprobs(model, [sample.sequence], model_inputs=given).logprobs[0, -count:]
    assert found.tolist() == pytest.approx(expected.logprobs, abs=1e-5)


def test_conflicting_processor_inputs_raise(prompts: list[Any]) -> None:
    (red, inputs), _ = prompts
    engine = HFEngine(CASE.model())
    ids = torch.tensor([red])
    for given, message in (
        ({"input_ids": ids + 1}, "has other input_ids than the sequence: pass the token ids of the same processor"),
        ({"attention_mask": ids > red[0]}, "has zeros in attention_mask: expected a sequence without padding"),
        ({"input_ids": [red]}, r"has input_ids=.*: expected a tensor, as with return_tensors='pt'"),
    ):
        message = f"(?s)model_inputs of sequence 1 {message}"
        given = {"model_inputs": [inputs, {**given, **inputs}]}
        with pytest.raises(EngineError, match=message):
            engine.generate([red, red], Sampling(), max_new_tokens=1, ignore_end=False, **given)
        with pytest.raises(EngineError, match=message):
            engine.score([red, red], Sampling(), **given)
        with pytest.raises(ValueError, match=message):
            rollout_logprobs(engine.model, [red, red], **given)


def test_raw_images_without_processor_raise(prompts: list[Any]) -> None:
    (red, _), _ = prompts
    engine = HFEngine(CASE.new_pair()[0], name="some engine")
    with pytest.raises(EngineError, match="some engine accepts no raw images here, and 1 of 1 prompts have some"):
        engine.generate([red], Sampling(), max_new_tokens=1, images=[[object()]])


def test_engine_without_image_support_raises() -> None:
    engine = HFEngine(FamilyCase(registry.model_class("LlamaForCausalLM")).model(), name="some engine")
    with pytest.raises(EngineError, match="some engine accepts only token ids here, and 1 of 2 prompts have images"):
        engine.generate([[20], [21]], Sampling(), max_new_tokens=1, model_inputs=[{}, {"pixel_values": torch.zeros(1)}])
