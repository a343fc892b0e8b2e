"""The tests of NeMo AutoModel's onboarding guide, on the Llama of nrl_models. Only the imports differ."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention as HFAttention
from transformers.models.llama.modeling_llama import LlamaMLP as HFFeedForward

from nrl_models.families.llama.model import LlamaAttention, LlamaForCausalLM, LlamaMLP


@pytest.fixture
def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=128,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )


@pytest.fixture
def model(tiny_config: LlamaConfig) -> LlamaForCausalLM:
    return LlamaForCausalLM(tiny_config)


def test_forward_shape(model: LlamaForCausalLM, tiny_config: LlamaConfig) -> None:
    batch_size, seq_len = 2, 16
    input_ids = torch.randint(0, tiny_config.vocab_size, (batch_size, seq_len))
    output = model(input_ids)
    assert output.logits.shape == (batch_size, seq_len, tiny_config.vocab_size)


def test_state_dict_roundtrip(model: LlamaForCausalLM) -> None:
    adapter = model.state_dict_adapter
    original_sd = model.state_dict()
    hf_sd = adapter.to_hf(original_sd)
    restored_sd = adapter.from_hf(hf_sd)
    for key in original_sd:
        assert torch.allclose(original_sd[key], restored_sd[key]), f"Mismatch at {key}"


def test_attention_equivalence(tiny_config: LlamaConfig) -> None:
    dtype = tiny_config.dtype
    torch.manual_seed(42)
    hf_attn = HFAttention(tiny_config, layer_idx=0).to(dtype=dtype)
    attn = LlamaAttention(tiny_config, layer_idx=0).to(dtype=dtype)
    attn.load_state_dict(hf_attn.state_dict())
    hidden = torch.randn(2, 32, tiny_config.hidden_size, dtype=dtype)
    angles = torch.rand(2, 32, hf_attn.head_dim)
    positions = angles.cos().to(dtype), angles.sin().to(dtype)
    with torch.no_grad():
        hf_out = hf_attn(hidden, position_embeddings=positions, attention_mask=None)[0]
        out = attn(hidden, position_embeddings=positions, attention_mask=None)[0]
    atol, rtol = (1e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    max_diff = (hf_out - out).abs().max().item()
    assert torch.allclose(hf_out, out, atol=atol, rtol=rtol), f"Max diff: {max_diff}"


def test_mlp_equivalence(tiny_config: LlamaConfig) -> None:
    hf_mlp = HFFeedForward(tiny_config).to(tiny_config.dtype)
    mlp = LlamaMLP(tiny_config).to(tiny_config.dtype)
    mlp.load_state_dict(hf_mlp.state_dict())
    hidden = torch.randn(2, 32, tiny_config.hidden_size, dtype=tiny_config.dtype)
    with torch.no_grad():
        assert torch.allclose(hf_mlp(hidden), mlp(hidden), atol=1e-2, rtol=1e-2)


def test_training_loss_decreases(model: LlamaForCausalLM, tiny_config: LlamaConfig) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, tiny_config.vocab_size, (2, 16))
    losses = []
    for _ in range(5):
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], "Loss should decrease during training"
