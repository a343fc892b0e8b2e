"""MoonViT, the vision tower of Kimi-VL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import eager_attention_forward

from nrl_models.families.kimi_vl.configuration import MoonViTConfig


class MoonViTPositionEmbedding(nn.Module):
    """A learned table of positions, interpolated to the size of each image. `weight`: `(rows, columns, hidden)`."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
        )

    def forward(self, grid: list[list[int]]) -> torch.Tensor:
        """Return the positions `(P, hidden_size)` of all patches. `grid` lists the rows and columns of each image."""
        table = rearrange(self.weight, "rows columns features -> 1 features rows columns")
        own_size = [*self.weight.shape[:2]]
        sized = [table if size == own_size else F.interpolate(table, size=size, mode="bicubic") for size in grid]
        return torch.cat([rearrange(each, "1 features rows columns -> (rows columns) features") for each in sized])


class MoonViTPatchEmbed(nn.Module):
    """Maps patches to vectors, and adds their positions."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)
        self.pos_emb = MoonViTPositionEmbedding(config)

    def forward(self, pixel_values: torch.Tensor, grid: list[list[int]]) -> torch.Tensor:
        """Map patches `(P, channels, patch_size, patch_size)` to vectors `(P, hidden_size)`."""
        return self.proj(pixel_values).flatten(1) + self.pos_emb(grid)


def rotary_angles(grid: list[list[int]], head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return rotary angles `(P, D / 2)` in fp32.

    Angles with an even index depend on a patch's column, angles with an odd index on its row.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / head_dim)
    angles = []
    for height, width in grid:
        rows, columns = torch.meshgrid(
            torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
        )
        places = torch.stack([columns.flatten(), rows.flatten()], dim=-1)
        angles.append((frequencies[:, None] * places[:, None, :]).flatten(1))
    return torch.cat(angles)


def rotate(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of adjacent numbers in `states` `(P, heads, D)` by its angle. Computes in fp32."""
    first, second = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).to(states.dtype)


class MoonViTMLP(nn.Module):
    """Two linears and an activation."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden states `(..., hidden_size)` to `(..., hidden_size)`."""
        return self.fc1(self.activation(self.fc0(hidden_states)))


class MoonViTEncoderLayer(GradientCheckpointingLayer):
    """Attention within each image, then an MLP, each with a preceding norm and a residual.

    As on the hub, the attention's linears belong to the layer, and queries, keys and values have a single linear.
    """

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.num_key_value_groups = 1
        self.is_causal = False
        self.norm0 = nn.LayerNorm(config.hidden_size)
        self.norm1 = nn.LayerNorm(config.hidden_size)
        self.mlp = MoonViTMLP(config)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, angles: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Map hidden states `(P, hidden_size)` to `(P, hidden_size)`. `lengths` lists the patches per image."""
        hidden_states = hidden_states + self.wo(self._attend(self.norm0(hidden_states), angles, lengths))
        return hidden_states + self.mlp(self.norm1(hidden_states))

    def _attend(self, hidden_states: torch.Tensor, angles: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        query, key, value = self.wqkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        query, key = rotate(query, angles), rotate(key, angles)
        interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        # Attention runs for one image per call, so it needs no mask and works with every implementation.
        by_image = zip(
            *(states.transpose(0, 1)[None].split(lengths, dim=2) for states in (query, key, value)), strict=True
        )
        outputs = [interface(self, *image, None, scaling=self.scaling, dropout=0.0)[0] for image in by_image]
        return torch.cat(outputs, dim=1)[0].flatten(1)


class MoonViTEncoder(nn.Module):
    """The layers and a final norm."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoonViTEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size)
