"""What can run under context parallelism, and what is refused before the first step, with the reason."""

from __future__ import annotations

import pytest
import torch

from nrl_models import registry
from nrl_models.distributed.context_parallel import check_context_parallel, context_parallel_problems
from nrl_models.errors import ShardingError
from nrl_models.testing.tiny import tiny_config

CAN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
CANNOT = {
    "MistralForCausalLM": "sliding_attention",
    "Gemma2ForCausalLM": "caps its attention scores",
    "Gemma3ForCausalLM": "attention always gets a mask",
    "Gemma3TextForSequenceClassification": "attention always gets a mask",
    "Gemma3ForConditionalGeneration": "tokens of an image see each other",
    "GptOssForCausalLM": "has attention sinks",
}


def model_of(architecture: str, **values: object):
    cls = registry.model_class(architecture)
    return cls.from_config(tiny_config(cls.config_class, {**cls.tiny, **values}), device="meta")


@pytest.mark.parametrize("architecture", CAN)
def test_full_causal_attention_can(architecture: str) -> None:
    values = {"sliding_window": None} if "Qwen" in architecture else {}
    tokens = torch.ones(1, 16, dtype=torch.long)
    assert context_parallel_problems(model_of(architecture, **values), {"input_ids": tokens}) == []


@pytest.mark.parametrize("architecture", CANNOT)
def test_what_needs_a_mask_a_window_a_sink_or_a_cap_is_refused(architecture: str) -> None:
    with pytest.raises(ShardingError, match="cannot be run under context parallelism") as caught:
        check_context_parallel(model_of(architecture))
    assert CANNOT[architecture] in str(caught.value)
    assert "run it without context parallelism" in str(caught.value)


def test_gemma_3_is_refused_even_if_every_layer_is_full() -> None:
    model = model_of("Gemma3ForCausalLM", layer_types=["full_attention"] * 2, num_hidden_layers=2)
    assert [problem.detail for problem in context_parallel_problems(model)] == [model.limits["context parallelism"]]


@pytest.mark.parametrize(
    ("batch", "subject"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids"),
        ({"labels": torch.tensor([[5, 6]])}, "labels"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    ],
    ids=["padding", "packing", "labels", "images"],
)
def test_batches_that_need_more_than_causal_attention_are_refused(batch: dict[str, torch.Tensor], subject: str) -> None:
    model = model_of("LlamaForCausalLM")
    assert subject in {problem.subject for problem in context_parallel_problems(model, batch)}


def test_a_mask_without_padding_and_positions_in_order_are_fine() -> None:
    batch = {"attention_mask": torch.ones(1, 4), "position_ids": torch.arange(4)[None]}
    assert context_parallel_problems(model_of("LlamaForCausalLM"), batch) == []


def test_other_attention_than_sdpa_is_refused() -> None:
    model = model_of("LlamaForCausalLM")
    model.config._attn_implementation = "eager"
    assert "runs attention as 'eager'" in str(context_parallel_problems(model)[0])
