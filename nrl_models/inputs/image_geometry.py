"""Shapes of images and of their accompanying arguments, from a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import torch
from einops import rearrange, repeat
from transformers import PreTrainedConfig

from nrl_models.common.config.walk import parts

Inputs = dict[str, Any]


Shape = tuple[int, ...]


class Geometry:
    """Geometry of one image per sequence, from a configuration.

    Args:
        config: The configuration.
        batch: Number of sequences, and of images.
        length: Sequence length.

    Attributes:
        channels: Channels of an image.
        patch: Side of a patch in pixels.
        frames: Frames per patch.
        merge: Side of the square of patches that form one token.
        grid: Patches per side if the model accepts any number: four tokens, and at least sixteen patches.
        side: Side of an image in pixels, if it is fixed.
        tiles: Maximum number of tiles of an image.
        flat: Numbers per flattened patch.
    """

    def __init__(self, config: PreTrainedConfig, batch: int, length: int) -> None:
        vision = vision_part(config)

        def first(*names: str, default: int) -> int:
            for part, name in product((vision, config), names):
                value = getattr(part, name, None)
                value = value[0] if isinstance(value, (list, tuple)) and value else value
                if isinstance(value, int) and value:
                    return value
            return default

        self.batch, self.length = batch, length
        self.channels = first("num_channels", "in_channels", "in_chans", default=3)
        self.patch = first("patch_size", "spatial_patch_size", default=14)
        self.frames = first("temporal_patch_size", "patch_temporal", default=1)
        self.merge = first("spatial_merge_size", "merge_kernel_size", "merge_size", "pooling_kernel_size", default=2)
        self.grid = 2 * max(self.merge, 2)
        self.side = first("image_size", default=4 * self.patch)
        self.tiles = first("max_num_tiles", default=1)
        self.flat = first("patch_embed_hidden_size", default=self.channels * self.patch**2)

    def layouts(self, pixels: str, names: Collection[str]) -> list[Shape]:
        """Return possible shapes of the argument `pixels`, given the names of the other arguments, likeliest first."""
        b, c, p, s, m, n = self.batch, self.channels, self.patch, self.side, self.merge, self.grid**2
        if pixels == "flattened_patches":
            return [(b, n, 2 + self.flat)]
        if {"image_grid_thw", "image_grid_hw", "image_grid_hws"} & set(names):
            return [(b * n, c * self.frames * p * p), (b * n, c, p, p), (b * n, c * p * p), (b * n, m * p, m * p, c)]
        if {"spatial_shapes", "image_position_ids", "image_token_pooling"} & set(names):
            return [(b, n, c * p * p), (b, n, c * m * m * p * p)]
        if "target_sizes" in names:
            return [(1, c, p, b * n * p), (b, c, p, n * p)]
        if "aspect_ratio_ids" in names:
            return [(b, 1, self.tiles, c, s, s)]
        untiled = [(b, c, s, s), (b, 1, c, s, s), (b, n, c * p * p)]
        if "image_sizes" in names:  # two by two tiles of an image, plus the complete image
            return [(b, 5, c, s, s), *untiled]
        if {"pixel_attention_mask", "image_attention_mask"} & set(names):
            return [untiled[1], untiled[0]]
        return untiled


def vision_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of `config` that describes images, or all of it if there is no such part."""
    text = config.get_text_config()
    others = [part for part in parts(config).values() if part is not text]
    keys = ("patch_size", "image_size", "resolution", "patch_embed_hidden_size")
    return next((part for key, part in product(keys, others) if hasattr(part, key)), config)


def _grid(g: Geometry, shape: Shape) -> torch.Tensor:
    return torch.tensor([[g.grid, g.grid]] * g.batch)


def patch_positions(g: Geometry, shape: Shape) -> torch.Tensor:
    """Return column and row of each patch, `(batch, patches, 2)`."""
    rows, columns = torch.meshgrid(torch.arange(g.grid), torch.arange(g.grid), indexing="ij")
    return repeat([columns, rows], "xy rows columns -> batch (rows columns) xy", batch=g.batch)


def _pooling(g: Geometry, shape: Shape) -> torch.Tensor:
    """Return the four patches that each token pools, `(tokens, 4)`. Indices count the patches of all images."""
    patches = torch.arange(g.batch * g.grid**2)
    squares = "(image rows down columns across) -> (image rows columns) (down across)"
    return rearrange(patches, squares, image=g.batch, rows=g.grid // 2, down=2, across=2)


def _size(g: Geometry, shape: Shape) -> torch.Tensor:
    return torch.tensor([[g.side * (2 if len(shape) == 5 else 1)] * 2] * g.batch)


def _ones(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


COMPANIONS: dict[str, tuple[Callable[[Geometry, Shape], torch.Tensor], ...]] = {
    "image_grid_thw": (lambda g, shape: torch.cat([_ones(g.batch, 1), _grid(g, shape)], dim=1),),
    "image_grid_hw": (_grid,),
    "image_grid_hws": (_grid,),
    "spatial_shapes": (_grid,),
    "target_sizes": (_grid,),
    "image_sizes": (_size,),
    "pixel_attention_mask": (
        lambda g, shape: _ones(*shape[:2], *shape[3:], dtype=torch.bool),
        lambda g, shape: _ones(*shape[:2], dtype=torch.bool),
    ),
    "pixel_mask": (lambda g, shape: _ones(g.batch, g.side, g.side, dtype=torch.bool),),
    "image_attention_mask": (
        lambda g, shape: _ones(g.batch, g.length, 1),
        lambda g, shape: _ones(*shape[:2], *(size // g.patch for size in shape[3:]), dtype=torch.bool),
    ),
    "image_position_ids": (patch_positions,),
    "image_merge_sizes": (lambda g, shape: torch.tensor([g.merge] * g.batch),),
    "image_token_pooling": (_pooling,),
    "image_grids": (lambda g, shape: torch.tensor([[g.grid // 2, g.grid // 2, 0, 0]] * g.batch),),
    "image_num_crops": (lambda g, shape: _ones(g.batch),),
    "qformer_input_ids": (lambda g, shape: torch.arange(16, 22).repeat(g.batch, 1),),
    "high_res_pixel_values": (lambda g, shape: torch.linspace(-1, 1, math.prod(shape)).view(shape),),
    "aspect_ratio_ids": (lambda g, shape: _ones(g.batch, 1),),
    "aspect_ratio_mask": (lambda g, shape: _ones(g.batch, 1, g.tiles),),
    "cross_attention_mask": (lambda g, shape: _ones(g.batch, g.length, 1, g.tiles),),
}
"""Functions that create the arguments accompanying an image; if a name has two meanings, both."""
