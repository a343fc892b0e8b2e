"""Kimi-VL in plain torch, from its report (arXiv 2504.07491), with transformers' DeepSeek-V3 as the language model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

KEYS_SLOPE = -0.75
"""Slope of the cubic kernel with which torch interpolates images."""


def kimi_vl_logits(config: Any, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return logits of text with or without images."""
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "pixel_values")}
    ids, grids = inputs["input_ids"], rest.pop("image_grid_hws", None)
    embedded = weights["language_model.model.embed_tokens.weight"][ids]
    if grids is not None:
        patches = inputs["pixel_values"].split([rows * columns for rows, columns in grids.tolist()])
        images = [_image(config, weights, *image) for image in zip(patches, grids.tolist(), strict=True)]
        embedded = embedded.clone()
        embedded[ids == config.media_placeholder_token_id] = torch.cat(images)
    decoder = DeepseekV3ForCausalLM._from_config(config.text_config).eval()
    prefix = "language_model."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if missing := decoder.state_dict().keys() - own.keys():
        raise ValueError(f"Kimi-VL has no {sorted(missing)}")
    logits: torch.Tensor = functional_call(
        decoder, own, kwargs={"inputs_embeds": embedded, "use_cache": False, **rest}
    ).logits
    return logits


def _image(
    config: Any, weights: Mapping[str, torch.Tensor], patches: torch.Tensor, grid: tuple[int, int]
) -> torch.Tensor:
    """Return the embeddings of one image, one for each square of merged patches."""
    vision, (rows, columns) = config.vision_config, grid

    def linear(states: torch.Tensor, name: str) -> torch.Tensor:
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalized(states: torch.Tensor, name: str) -> torch.Tensor:
        centered = states - states.mean(-1, keepdim=True)
        deviation = (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centered / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    tower = "vision_tower"
    kernel = weights[f"{tower}.patch_embed.proj.weight"]
    states = patches.flatten(1) @ kernel.flatten(1).T + weights[f"{tower}.patch_embed.proj.bias"]
    table = weights[f"{tower}.patch_embed.pos_emb.weight"]
    down, across = _bicubic(table.shape[0], rows), _bicubic(table.shape[1], columns)
    states = states + torch.einsum("ri,cj,ijf->rcf", down, across, table).flatten(0, 1)
    turns = _turns(rows, columns, vision.hidden_size // vision.num_attention_heads, vision.rope_theta)
    for layer in range(vision.num_hidden_layers):
        name = f"{tower}.encoder.blocks.{layer}"
        packed = linear(normalized(states, f"{name}.norm0"), f"{name}.wqkv")
        query, key, value = (part.unflatten(-1, (vision.num_attention_heads, -1)) for part in packed.chunk(3, dim=-1))
        query, key = _turned(query, turns), _turned(key, turns)
        scores = torch.einsum("phd,qhd->hpq", query, key) / math.sqrt(query.shape[-1])
        attended = torch.einsum("hpq,qhd->phd", scores.softmax(-1), value).flatten(1)
        states = states + linear(attended, f"{name}.wo")
        inner = F.gelu(linear(normalized(states, f"{name}.norm1"), f"{name}.mlp.fc0"), approximate="tanh")
        states = states + linear(inner, f"{name}.mlp.fc1")
    states = normalized(states, f"{tower}.encoder.final_layernorm")
    states = normalized(states, "multi_modal_projector.pre_norm").unflatten(0, (rows, columns))
    high, wide = vision.merge_kernel_size
    squares = [
        states[row : row + high, column : column + wide].flatten()
        for row in range(0, rows, high)
        for column in range(0, columns, wide)
    ]
    inner = F.gelu(linear(torch.stack(squares), "multi_modal_projector.linear_1"))
    return linear(inner, "multi_modal_projector.linear_2")


def _bicubic(size: int, wanted: int) -> torch.Tensor:
    """Return the matrix `(wanted, size)` that interpolates a row of numbers with the cubic kernel of Keys (1981)."""
    matrix = torch.zeros(wanted, size)
    for target in range(wanted):
        place = (target + 0.5) * size / wanted - 0.5
        for source in range(math.floor(place) - 1, math.floor(place) + 3):
            matrix[target, min(max(source, 0), size - 1)] += _cubic(abs(place - source))
    return matrix


def _cubic(distance: float) -> float:
    a = KEYS_SLOPE
    if distance <= 1:
        return (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    return a * (distance**3 - 5 * distance**2 + 8 * distance - 4) if distance < 2 else 0.0


def _turns(rows: int, columns: int, head_dim: int, theta: float) -> torch.Tensor:
    """Return the complex number by which each pair of a head is multiplied: columns and rows take turns."""
    turns = torch.zeros(rows, columns, head_dim // 4, 2)
    for pair in range(head_dim // 4):
        frequency = theta ** (-4 * pair / head_dim)
        turns[:, :, pair, 0] = torch.arange(columns) * frequency
        turns[:, :, pair, 1] = (torch.arange(rows) * frequency)[:, None]
    angles = turns.flatten(2).flatten(0, 1)
    return torch.polar(torch.ones_like(angles), angles)


def _turned(states: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Multiply adjacent pairs of `states` `(patches, heads, head_dim)` by `turns` `(patches, head_dim / 2)`."""
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)
