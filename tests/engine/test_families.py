"""Families that both the engine and the registry have, at tiny size: they agree, after a refit too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import SETTINGS
from transformers import PreTrainedModel
from vllm import ModelRegistry

from nrl_models import registry
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.refit import RefitChecker
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling, token_logprobs, token_mult_prob_error
from nrl_models.testing.case import randomise
from nrl_models.testing.tiny import tiny_config
from tests.patterns import ONE_OF_EACH_PATTERN

BOUND = 1.0001
"""On `token_mult_prob_error` in fp32."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    # vLLM has kernels of latent attention for the published sizes alone; that published checkpoints correct the router
    # is said by a key that transformers does not know.
    "DeepseekV3ForCausalLM": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "head_dim": 64,
        "topk_method": "noaux_tc",
    },
    # It reads these keys without a default.
    "GptOssForCausalLM": {"rope_parameters": YARN},
}
"""What a tiny configuration has to have for the engine."""

LIMITS: dict[str, tuple[str, str]] = {
    "DeepseekV3ForCausalLM": (
        r"odd one out is engine decode and engine prefill. It parts between .*kv_b_proj and .*o_proj",
        "vLLM's latent attention on a CPU is not transformers', which the trainer agrees with in fp32 and in fp64",
    ),
    "GptOssForCausalLM": (
        r"parameters of the engine were not written: .*experts",
        "vLLM's loader of this model's experts and sinks writes past its reload of weights, so that the old ones stay; "
        "read from files, they agree",
    ),
    "Gemma3ForConditionalGeneration": (
        "failed to be inspected",
        "vLLM's image models import torchvision, whose builds on PyPI want CUDA",
    ),
}
"""Architectures that do not hold with this engine: what the verdict is, and the reason. They must fail with that."""

ARCHITECTURES = sorted(
    {architecture for family in ONE_OF_EACH_PATTERN for architecture in registry.FAMILIES[family]}
    & {one for one in ModelRegistry.get_supported_archs() if one.endswith(("ForCausalLM", "ForConditionalGeneration"))}
)


def test_some_architecture_is_left() -> None:
    assert len(ARCHITECTURES) >= 12
    assert LIMITS.keys() <= set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_gives_the_trainers_logprobs_after_each_refit(
    architecture: str, vllm: Callable[..., VLLMEngine], tmp_path: Path
) -> None:
    if architecture in LIMITS:
        message, reason = LIMITS[architecture]
        with pytest.raises((EngineError, AssertionError), match=message):
            check(architecture, vllm, tmp_path)
        pytest.xfail(reason)
    check(architecture, vllm, tmp_path)


def test_a_tied_output_embedding_is_refitted_too(vllm: Callable[..., VLLMEngine], tmp_path: Path) -> None:
    check("LlamaForCausalLM", vllm, tmp_path, {"tie_word_embeddings": True})


def test_what_cannot_be_refitted_agrees_as_loaded(vllm: Callable[..., VLLMEngine], tmp_path: Path) -> None:
    model = tiny_model("GptOssForCausalLM", OVERRIDES["GptOssForCausalLM"])
    model.save_pretrained(tmp_path)
    tokens = torch.randint(16, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    scores = [
        torch.tensor(engine.score(tokens.tolist(), Sampling()))[:, 1:]
        for engine in (HFEngine(model, "trainer"), vllm(tmp_path))
    ]
    assert token_mult_prob_error(*scores) <= BOUND


def tiny_model(architecture: str, overrides: dict[str, Any]) -> PreTrainedModel:
    """Our model at tiny size, every tensor random."""
    model_class = registry.model_class(architecture)
    torch.manual_seed(0)
    config = tiny_config(model_class.reference_class().config_class, {**model_class.tiny, **overrides})
    model = model_class.from_config(config, dtype=torch.float32, device="cpu").eval()
    randomise(model)
    return model


def check(
    architecture: str, vllm: Callable[..., VLLMEngine], tmp_path: Path, overrides: dict[str, Any] | None = None
) -> None:
    """Refit the engine from random weights, and again after a training step."""
    overrides = OVERRIDES.get(architecture, {}) if overrides is None else overrides
    model = tiny_model(architecture, overrides)
    model.save_pretrained(tmp_path)
    engine = vllm(tmp_path, load_format="dummy", seed=1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    settings = replace(SETTINGS, threshold=BOUND, sampling=Sampling(spreading_temperature(model)))
    cell = settings.cells()[0]
    checker = RefitChecker(str(tmp_path), engine, HFEngine(model, "trainer"), Prompts(None, vocabulary), settings, cell)
    first = checker.refit("from random weights")
    assert first.passed, _why(first)
    assert not first.before <= 1.1  # random weights show, if only by tokens that the trainer excludes
    checker.train(checker.prompts.make(cell, cell.length, 7))
    second = checker.refit("after a training step")
    assert second.passed, _why(second)
    assert second.before > BOUND


@torch.no_grad()
def spreading_temperature(model: PreTrainedModel) -> float:
    """The temperature at which a model is half as uncertain as it can be.

    Near a uniform distribution wrong hidden states go unnoticed, and so they do if one token has all the probability.
    """
    tokens = torch.randint(16, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    low, high = 0.01, 100.0
    for _ in range(20):
        temperature = (low * high) ** 0.5
        entropy = token_logprobs(model, tokens, temperature=temperature, entropy=True).entropy.mean().item()
        low, high = (
            (temperature, high)
            if entropy < 0.5 * math.log(model.config.get_text_config().vocab_size)
            else (
                low,
                temperature,
            )
        )
    return temperature


def _why(step: object) -> str:
    verdict = step.result.verdict
    return "; ".join([*step.problems, *step.result.problems, verdict.summary if verdict else ""])
