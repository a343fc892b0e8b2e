"""Packed rows that would not compute each document as if it were alone raise an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nrl_models import registry, rollout_logprobs, token_logprobs
from nrl_models.testing.case import FamilyCase

LLAMA = cast(Any, registry.model_class("LlamaForCausalLM"))
LENGTHS = (7, 3)
IDS = torch.arange(20, 30)[None]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def own_attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.fixture
def own_name() -> Iterator[str]:
    """An attention implementation without a mask function."""
    AttentionInterface.register("own", own_attention)
    yield "own"
    AttentionInterface._global_mapping.pop("own")
    AttentionMaskInterface._global_mapping.pop("own", None)


def alone(model: PreTrainedModel) -> list[torch.Tensor]:
    return [token_logprobs(model, part).logprobs[0, 1:] for part in IDS.split(LENGTHS, dim=1)]


@torch.no_grad()
def test_attention_without_mask_function_packs_no_rows(own_name: str) -> None:
    model = FamilyCase(LLAMA).model()
    expected = alone(model)
    model.set_attn_implementation(own_name)
    with pytest.raises(ValueError, match=r"'own' has no mask function. Register one.* or use sdpa"):
        token_logprobs(model, IDS, position_ids=POSITIONS)
    found = rollout_logprobs(model, [part[0].tolist() for part in IDS.split(LENGTHS, dim=1)])
    for row, length, wanted in zip(found.logprobs, LENGTHS, expected, strict=True):
        torch.testing.assert_close(row[1:length], wanted, rtol=0, atol=1e-5)
    AttentionMaskInterface.register(own_name, sdpa_mask)
    packed = token_logprobs(model, IDS, position_ids=POSITIONS).logprobs[0]
    torch.testing.assert_close(packed[1:7], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[8:], expected[1], rtol=0, atol=1e-5)


ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 16,
        "long_factor": [3.0] * 16,
        "original_max_position_embeddings": 5,
        "factor": 4.0,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
}


@pytest.mark.parametrize(
    ("rope", "lengths", "raises"),
    [
        ("longrope", (7, 3), True),
        ("longrope", (7, 6), False),
        ("longrope", (5, 3), False),
        ("dynamic", (7, 3), True),
        ("dynamic", (7, 6), True),
        ("dynamic", (7, 7), False),
        ("dynamic", (5, 3), False),
    ],
)
@torch.no_grad()
def test_rope_that_depends_on_the_longest_document(rope: str, lengths: tuple[int, int], raises: bool) -> None:
    config = {"head_dim": 32, "max_position_embeddings": 20 if rope == "longrope" else 5}
    parameters = {"rope_parameters": ROPES[rope]}
    model = FamilyCase(LLAMA, tiny=config | parameters).model()
    ids = torch.arange(20, 20 + sum(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    if raises:
        with pytest.raises(ValueError, match="above 5 tokens, the longest document of a batch changes the rotary"):
            token_logprobs(model, ids, position_ids=positions)
        return
    packed = token_logprobs(model, ids, position_ids=positions).logprobs[0]
    start = 0
    for part in ids.split(lengths, dim=1):
        expected = token_logprobs(model, part).logprobs[0, 1:]
        torch.testing.assert_close(packed[start + 1 : start + part.shape[1]], expected, rtol=0, atol=1e-5)
        start += part.shape[1]
