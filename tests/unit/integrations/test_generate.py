"""`generate` returns the same tokens as transformers' model for every decoding strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import new_model
from transformers import LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.testing.tiny import tiny_config

NEW = 12

# Each runs on both models with the same seed.
OPTIONS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 1.3},
    "sampling, top k and top p": {"do_sample": True, "top_k": 20, "top_p": 0.9},
    "several samples per prompt": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "penalties": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "prefill in chunks": {"do_sample": False, "prefill_chunk_size": 5},
}


@pytest.fixture(scope="module")
def models(llama_checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """transformers' model and ours, from one checkpoint."""
    return (
        transformers.AutoModelForCausalLM.from_pretrained(llama_checkpoint),
        AutoModelForCausalLM.from_pretrained(llama_checkpoint),
    )


def generate(model: PreTrainedModel, **inputs: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generated_tokens_match_transformers(
    options: dict[str, Any], models: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor
) -> None:
    expected, actual = (generate(model, input_ids=input_ids, **options) for model in models)
    assert torch.equal(actual, expected)
    assert actual.shape[1] == input_ids.shape[1] + NEW


def test_different_seed_gives_different_samples(
    models: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor
) -> None:
    first = generate(models[1], input_ids=input_ids, do_sample=True)
    torch.manual_seed(1)
    assert not torch.equal(models[1].generate(input_ids=input_ids, do_sample=True, max_new_tokens=NEW), first)


def test_scores_match_transformers(models: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor) -> None:
    options = {"do_sample": False, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected, actual = (generate(model, input_ids=input_ids, **options) for model in models)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-4, rtol=1e-4)


def test_left_padded_prompts_match_transformers(
    models: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor
) -> None:
    padded = input_ids.clone()
    padded[0, :5] = 0
    mask = torch.ones_like(padded)
    mask[0, :5] = 0
    batch = {"input_ids": padded, "attention_mask": mask, "do_sample": False}
    expected, actual = (generate(model, **batch) for model in models)
    assert torch.equal(actual, expected)
    alone = generate(models[1], input_ids=input_ids[:1, 5:], do_sample=False)
    assert torch.equal(actual[0, 5:], alone[0])


@pytest.mark.parametrize("assistant", ["assistant model", "prompt lookup"])
def test_assisted_generation_matches_greedy_decoding(
    assistant: str, models: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor, tmp_path: Path
) -> None:
    if assistant == "assistant model":
        new_model(tiny_config(LlamaConfig, {"num_hidden_layers": 1})).save_pretrained(tmp_path)
        options: dict[str, Any] = {"assistant_model": AutoModelForCausalLM.from_pretrained(tmp_path)}
    else:
        options = {"prompt_lookup_num_tokens": 3}
    prompt = {"input_ids": input_ids[:1], "do_sample": False}
    assert torch.equal(generate(models[1], **prompt, **options), generate(models[0], **prompt))


def test_generation_between_training_steps(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    """Sample, train on the samples, and sample again, as an RL trainer does."""
    rollouts = []
    for auto in (transformers.AutoModelForCausalLM, AutoModelForCausalLM):
        model = auto.from_pretrained(llama_checkpoint)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        rollouts.append([])
        for _ in range(3):
            rollouts[-1].append(generate(model.eval(), input_ids=input_ids, do_sample=True))
            tokens = rollouts[-1][-1]
            model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for expected, actual in zip(*rollouts, strict=True):
        assert torch.equal(actual, expected)
    assert not torch.equal(rollouts[0][0], rollouts[0][2])
