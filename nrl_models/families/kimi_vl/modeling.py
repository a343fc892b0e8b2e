"""Kimi-VL in transformers' style: MoonViT, a projector, and transformers' DeepSeek-V3.

transformers has no Kimi-VL. This is the reference model that the family's tests compare with. Its modules have the
hub's names. Follows the Kimi-VL report (arXiv 2504.07491). Two-dimensional rotary positions as in VisionLLaMA
(arXiv 2403.00522), positions interpolated as in NaViT (arXiv 2307.06304).

Shape suffixes: `P` patches of all images, `N` images, `T` tokens of all images, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM, eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from nrl_models.common.upstream import CACHE_NAMES, cache_input
from nrl_models.families.kimi_vl.configuration import KimiVLConfig, MoonViTConfig

# The vision tower


class MoonViTPositionEmbedding(nn.Module):
    """A learned table of positions, interpolated to the size of each image. `weight`: `(rows, columns, hidden)`."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
        )

    def forward(self, grid: list[list[int]]) -> torch.Tensor:
        """Positions `(P, hidden)` of the patches of images of `grid`, rows and columns of each."""
        table = rearrange(self.weight, "rows columns features -> 1 features rows columns")
        own_size = [*self.weight.shape[:2]]
        sized = [table if size == own_size else F.interpolate(table, size=size, mode="bicubic") for size in grid]
        return torch.cat([rearrange(each, "1 features rows columns -> (rows columns) features") for each in sized])


class MoonViTPatchEmbed(nn.Module):
    """Patches to vectors, with their positions."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)
        self.pos_emb = MoonViTPositionEmbedding(config)

    def forward(self, pixel_values: torch.Tensor, grid: list[list[int]]) -> torch.Tensor:
        """`(P, channels, patch, patch)` to `(P, hidden)`."""
        return self.proj(pixel_values).flatten(1) + self.pos_emb(grid)


def rotary_angles(grid: list[list[int]], head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Angles `(P, D / 2)` in fp32: even ones turn with a patch's column, odd ones with its row."""
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
    """`states` `(P, heads, D)`, each pair of neighboring numbers turned by its angle; computed in fp32."""
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
        """`(..., hidden)` to `(..., hidden)`."""
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
        """`(P, hidden)` to `(P, hidden)`; `lengths` are the numbers of patches of the images."""
        hidden_states = hidden_states + self.wo(self._attend(self.norm0(hidden_states), angles, lengths))
        return hidden_states + self.mlp(self.norm1(hidden_states))

    def _attend(self, hidden_states: torch.Tensor, angles: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        query, key, value = self.wqkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        query, key = rotate(query, angles), rotate(key, angles)
        interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        # An image at a time: no mask is needed, and every implementation computes it.
        by_image = zip(
            *(states.transpose(0, 1)[None].split(lengths, dim=2) for states in (query, key, value)), strict=True
        )
        outputs = [interface(self, *image, None, scaling=self.scaling, dropout=0.0)[0] for image in by_image]
        return torch.cat(outputs, dim=1)[0].flatten(1)


class MoonViTEncoder(nn.Module):
    """The layers and a last norm."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoonViTEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size)


@dataclass
class KimiVLCausalLMOutputWithPast(CausalLMOutputWithPast):
    """The output of a causal language model, and the images it saw.

    Args:
        image_hidden_states: `(T, hidden)`, embeddings of all images; None without images.
    """

    image_hidden_states: torch.Tensor | None = None


class KimiVLPreTrainedModel(PreTrainedModel):
    """What Kimi-VL's models share."""

    config_class: type[PreTrainedConfig] = KimiVLConfig
    base_model_prefix = ""
    input_modalities = ("image", "text")  # type: ignore[assignment]  # as transformers writes it
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoonViTEncoderLayer", "DeepseekV3DecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoonViTPositionEmbedding):
            nn.init.normal_(module.weight, std=self.config.get_text_config().initializer_range)


class MoonViTModel(KimiVLPreTrainedModel):
    """MoonViT with its patches merged."""

    config_class: type[PreTrainedConfig] = MoonViTConfig
    main_input_name = "pixel_values"
    _can_record_outputs = {"hidden_states": MoonViTEncoderLayer}

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__(config)
        self.patch_embed = MoonViTPatchEmbed(config)
        self.encoder = MoonViTEncoder(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        """Encode packed patches of images.

        Args:
            pixel_values: `(P, channels, patch_size, patch_size)`.
            image_grid_hws: Rows and columns of patches of each image, `(N, 2)`.
            kwargs: Not used.

        Returns:
            `last_hidden_state` `(T, merged_patches, hidden_size)`, with the patches of each token in row order.

        Raises:
            ValueError: If the grids do not match the patches, or are not multiples of `merge_kernel_size`.
        """
        grid = image_grid_hws.tolist()
        down, across = self.config.merge_kernel_size
        lengths = [height * width for height, width in grid]
        if sum(lengths) != len(pixel_values):
            raise ValueError(
                f"image_grid_hws {grid} are {sum(lengths)} patches, but pixel_values has {len(pixel_values)}"
            )
        if indivisible := [size for size in grid if size[0] % down or size[1] % across]:
            raise ValueError(f"images of {indivisible} patches cannot be merged by {down} x {across}: pad them")
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        angles = rotary_angles(grid, head_dim, self.config.rope_theta, pixel_values.device)
        hidden_states = self.patch_embed(pixel_values, grid)
        for block in self.encoder.blocks:
            hidden_states = block(hidden_states, angles, lengths)
        hidden_states = self.encoder.final_layernorm(hidden_states)
        squares = "(rows down columns across) features -> (rows columns) (down across) features"
        merged = [
            rearrange(image, squares, rows=height // down, down=down, across=across)
            for image, (height, _) in zip(hidden_states.split(lengths), grid, strict=True)
        ]
        return BaseModelOutput(last_hidden_state=torch.cat(merged))


# The complete model


class KimiVLMultiModalProjector(nn.Module):
    """Merged patches to embeddings of the language model."""

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__()
        vision: Any = config.vision_config
        down, across = vision.merge_kernel_size
        merged = vision.hidden_size * down * across
        self.pre_norm = nn.LayerNorm(vision.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(merged, merged)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(merged, config.get_text_config().hidden_size)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """`(T, merged patches, vision hidden)` to `(T, hidden)`."""
        return self.linear_2(self.act(self.linear_1(self.pre_norm(patches).flatten(1))))


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel, GenerationMixin):
    """Kimi-VL: text with images to logits. Modules have the hub's names."""

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__(config)
        self.vision_tower = MoonViTModel._from_config(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM._from_config(config.text_config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The language model's."""
        return self.language_model.get_output_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """The language model's, which older versions of transformers do not find."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the language model's."""
        self.language_model.set_input_embeddings(value)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Set the language model's."""
        self.language_model.set_output_embeddings(value)

    def get_image_features(self, pixel_values: torch.Tensor, image_grid_hws: torch.Tensor) -> torch.Tensor:
        """Return embeddings of images, `(T, hidden_size)`. For arguments, see `MoonViTModel.forward`."""
        patches = self.vision_tower(pixel_values.to(self.dtype), image_grid_hws).last_hidden_state
        return self.multi_modal_projector(patches)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_hws: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> KimiVLCausalLMOutputWithPast:
        """Return logits, and the loss for `labels`.

        Args:
            input_ids: `(batch, seq_len)`, with `config.media_placeholder_token_id` at image tokens.
            pixel_values: Patches of all images in the order of their tokens, `(P, channels, patch_size, patch_size)`.
            image_grid_hws: Rows and columns of patches of each image, `(N, 2)`.
            attention_mask: This and all others are as in any causal model.

        Raises:
            ValueError: If images have no sizes, or the number of image tokens does not match `input_ids`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        images = None
        if pixel_values is not None:
            if image_grid_hws is None:
                raise ValueError("pixel_values need image_grid_hws, the rows and columns of patches of each image")
            images = self.get_image_features(pixel_values, image_grid_hws).to(inputs_embeds)
            places = self._places(input_ids, inputs_embeds)
            if (wanted := int(places.sum())) != len(images):
                raise ValueError(f"the images are {len(images)} tokens, but input_ids has {wanted} places for them")
            inputs_embeds = inputs_embeds.masked_scatter(places[..., None].expand_as(inputs_embeds), images)
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **cache_input(self.language_model.forward, past_key_values if cache is None else cache),
            **kwargs,
        )
        loss = None
        if labels is not None:
            more = {"vocab_size": self.config.text_config.vocab_size, "ignore_index": self.config.ignore_index}
            loss = self.loss_function(logits=outputs.logits, labels=labels, **more, **kwargs)
        return KimiVLCausalLMOutputWithPast(loss=loss, **outputs, image_hidden_states=images)

    def _places(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """Where images go, `(batch, tokens)`."""
        token = self.config.media_placeholder_token_id
        if input_ids is not None:
            return input_ids == token
        embedding = self.get_input_embeddings()(torch.tensor(token, device=inputs_embeds.device))
        return (inputs_embeds == embedding).all(-1)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        pixel_values: torch.Tensor | None = None,
        image_grid_hws: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go with the prompt only: their keys and values are in the cache afterwards."""
        upstream: Any = super()
        inputs = upstream.prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs |= {"pixel_values": pixel_values, "image_grid_hws": image_grid_hws}
        return inputs


AutoConfig.register(MoonViTConfig.model_type, MoonViTConfig, exist_ok=True)
AutoConfig.register(KimiVLConfig.model_type, KimiVLConfig, exist_ok=True)
AutoModelForImageTextToText.register(KimiVLConfig, KimiVLForConditionalGeneration, exist_ok=True)
