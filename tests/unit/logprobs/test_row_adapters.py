"""PEFT adapters that change complete rows: log-probabilities equal those of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.errors import HeadError, UnknownArgumentError
from nrl_models.logprobs import rollout_logprobs, token_logprobs
from nrl_models.logprobs.microbatches import RowLayout, layout_of
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

INVOCATION = [7, 8]
LENGTHS = (14, 11, 9)
BOUND = 2e-5


def activated_lora(*targets: str) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", target_modules=[*targets], alora_invocation_tokens=INVOCATION, r=4)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "activated LoRA": lambda: activated_lora("q_proj", "v_proj"),
}


def adapted(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig), dtype=torch.float32).eval()
    randomize(model)
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prompt" in name or "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(16, 480, (length,), generator=generator) for length in LENGTHS]
    for row in rows:
        row[4:6] = torch.tensor(INVOCATION)
    return rows


@torch.no_grad()
def alone(model: Any, row: torch.Tensor) -> torch.Tensor:
    """Return PEFT's log-probabilities of a sequence. Its logits begin with those of virtual tokens."""
    logits = model(input_ids=row[None]).logits[0, -len(row) :]
    return logits[:-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]


@pytest.mark.parametrize("chunk_size", ["auto", None])
@pytest.mark.parametrize("name", ADAPTERS)
def test_logprobs_match_separate_sequences(name: str, chunk_size: str | None, sequences: list[torch.Tensor]) -> None:
    model = adapted(ADAPTERS[name]())
    rollouts = rollout_logprobs(model, sequences, chunk_size=chunk_size)
    rows = [row.flip(0) for row in sequences]  # pads on the left
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flip(1)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).flip(1)
    padded = token_logprobs(model, ids, attention_mask=mask, chunk_size=chunk_size)
    for number, row in enumerate(sequences):
        expected = alone(model, row)
        torch.testing.assert_close(rollouts.logprobs[number, 1 : len(row)], expected, rtol=0, atol=BOUND)
        torch.testing.assert_close(padded.logprobs[number, 1 - len(row) :], expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ADAPTERS)
def test_gradients_match_full_logits(name: str, sequences: list[torch.Tensor]) -> None:
    model = adapted(ADAPTERS[name]())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rollout_logprobs(model, sequences, loss=lambda result: -result.logprobs.sum())
    gradients = [parameter.grad for parameter in parameters]
    model.zero_grad()
    for row in sequences:
        logits = model(input_ids=row[None]).logits[0, -len(row) :]
        torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum").backward()
    for gradient, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_packed_rows_raise(name: str, sequences: list[torch.Tensor]) -> None:
    model = adapted(ADAPTERS[name]())
    assert layout_of(model) is RowLayout.PADDED
    positions = torch.cat([torch.arange(len(row)) for row in sequences])[None]
    with pytest.raises(UnknownArgumentError, match="position_ids: a row has several sequences"):
        token_logprobs(model, torch.cat(sequences)[None], position_ids=positions)
    with pytest.raises(UnknownArgumentError, match="position_ids: a row has several sequences"):
        token_logprobs(model.get_base_model(), torch.cat(sequences)[None], position_ids=positions, reference=model)


def test_disabled_adapter_has_no_virtual_tokens(sequences: list[torch.Tensor]) -> None:
    model = adapted(ADAPTERS["prompt tuning"]())
    for chunk_size in ("auto", None):
        with model.disable_adapter():
            output = token_logprobs(model, sequences[0][None], chunk_size=chunk_size)
        expected = token_logprobs(model.get_base_model(), sequences[0][None])
        torch.testing.assert_close(output.logprobs, expected.logprobs, rtol=0, atol=BOUND)


def test_activated_lora_on_output_embedding_requires_full_logits(sequences: list[torch.Tensor]) -> None:
    model = adapted(activated_lora("q_proj", "lm_head"))
    with pytest.raises(HeadError, match=r"depends on the row.*chunk_size=None"):
        token_logprobs(model, sequences[0][None])
    output = rollout_logprobs(model, sequences, chunk_size=None)
    for number, row in enumerate(sequences):
        torch.testing.assert_close(output.logprobs[number, 1 : len(row)], alone(model, row), rtol=0, atol=BOUND)


def test_lora_is_packed() -> None:
    assert layout_of(adapted(LoraConfig(target_modules=["q_proj"]))) is RowLayout.PACKED
