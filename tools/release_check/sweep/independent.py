"""Independent implementations of families missing in transformers, in torch or with other transformers classes.

They share no code with `nrl_models/families`, so a bug there cannot be on both sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from tools.release_check.sweep.independent_kimi_vl import kimi_vl_logits

Weights = Mapping[str, torch.Tensor]
Implementation = Callable[[Any, Weights, Mapping[str, Any]], torch.Tensor]
"""Computes logits from a configuration, weights by name, and inputs."""


@torch.no_grad()
def independent_logits(reference: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return logits of another implementation with the reference's weights. None if there is none.

    Args:
        reference: The plain implementation, for its weights and configuration.
        inputs: Inputs of its forward.
    """
    implementation = IMPLEMENTATIONS.get(type(reference).__name__)
    return None if implementation is None else implementation(reference.config, reference.state_dict(), inputs)


def independent_gradients(reference: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return gradients of the loss by another implementation. None if there is none.

    Args:
        reference: The plain implementation, for its weights and configuration.
        inputs: Inputs of its forward, with labels.
    """
    implementation = IMPLEMENTATIONS.get(type(reference).__name__)
    if implementation is None:
        return None
    weights = reference.state_dict()
    weights |= {name: value.detach().clone().requires_grad_() for name, value in reference.named_parameters()}
    labels = inputs["labels"]
    with torch.enable_grad():
        logits = implementation(
            reference.config, weights, {name: value for name, value in inputs.items() if name != "labels"}
        )
        if any(name.endswith("lm_head.weight") for name in weights):  # predicts the next token
            logits, labels = logits[:, :-1], labels[:, 1:]
        F.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
    return {name: value.grad for name, value in weights.items() if value.grad is not None}


def _baichuan(config: Any, weights: Weights, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Baichuan's decoder for unpadded sequences, from arXiv 2309.10305, with one of its three heads."""
    heads, ids = config.num_attention_heads, inputs["input_ids"]
    length, has_alibi = ids.shape[1], config.position_embedding_type == "alibi"

    def normalized(states: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = states.square().mean(-1, keepdim=True)
        return states / (mean_square + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def linear(states: torch.Tensor, name: str) -> torch.Tensor:
        return states @ weights[f"{name}.weight"].T

    bias = torch.full((length, length), -torch.inf).triu(1)
    if has_alibi:
        bias = bias + _alibi(heads)[:, None, None] * torch.arange(length)
    states = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        inner = normalized(states, f"{name}.input_layernorm")
        query, key, value = (
            linear(inner, f"{name}.self_attn.{which}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
            for which in "qkv"
        )
        if not has_alibi:
            base = config.rope_parameters["rope_theta"]
            query, key = _rotated(query, base), _rotated(key, base)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(-2)
        states = states + linear(attended, f"{name}.self_attn.o_proj")
        inner = normalized(states, f"{name}.post_attention_layernorm")
        gate, up = (linear(inner, f"{name}.mlp.{which}_proj") for which in ("gate", "up"))
        states = states + linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
    states = normalized(states, "model.norm")
    if "lm_head.weight" not in weights:
        return F.linear(states, weights["score.weight"], weights.get("score.bias"))
    head = weights["lm_head.weight"]
    if config.normalize_head:
        head = head / head.norm(dim=-1, keepdim=True)
    return states @ head.T


def _baichuan_of_sequence(config: Any, weights: Weights, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the scores of the last token that is not padding, `(batch, labels)`."""
    ids = inputs["input_ids"]
    columns = torch.arange(ids.shape[1])
    last = torch.where(ids != config.pad_token_id, columns, -1).amax(-1)
    return _baichuan(config, weights, inputs)[torch.arange(len(ids)), last]


def _alibi(heads: int) -> torch.Tensor:
    """Return the slopes of ALiBi for a power of two, and every second slope of twice as many for the rest."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return torch.tensor(slopes)


def _rotated(states: torch.Tensor, base: float) -> torch.Tensor:
    """Apply rotary embeddings to `(batch, heads, length, D)`. Pairs have one number in each half of `D`."""
    half = states.shape[-1] // 2
    angles = torch.arange(states.shape[-2])[:, None] / base ** (torch.arange(half) / half)
    pairs = torch.complex(states[..., :half], states[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "BaichuanForCausalLM": _baichuan,
    "BaiChuanForCausalLM": _baichuan,
    "BaichuanForSequenceClassification": _baichuan_of_sequence,
    "BaichuanForTokenClassification": _baichuan,
    "KimiVLForConditionalGeneration": kimi_vl_logits,
}
"""Implementations by the class name of the plain implementation."""
