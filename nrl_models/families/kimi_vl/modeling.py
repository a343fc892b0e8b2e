"""Kimi-VL in transformers' style: MoonViT, a projector, and transformers' DeepSeek-V3.

transformers has no Kimi-VL. This is the reference model that the family's tests compare with. Its modules have the
hub's names. Follows the Kimi-VL report (arXiv 2504.07491). Two-dimensional rotary positions as in VisionLLaMA
(arXiv 2403.00522), positions interpolated as in NaViT (arXiv 2307.06304).

Shape suffixes: `P` patches of all images, `N` images, `T` tokens of all images, `D` head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from nrl_models.common.upstream import CACHE_NAMES, cache_input
from nrl_models.families.kimi_vl.configuration import KimiVLConfig, MoonViTConfig
from nrl_models.families.kimi_vl.moonvit import (
    MoonViTEncoder,
    MoonViTEncoderLayer,
    MoonViTPatchEmbed,
    MoonViTPositionEmbedding,
    rotary_angles,
)

# The vision tower


@dataclass
class KimiVLCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Output of a causal language model, with the embeddings of its images.

    Args:
        image_hidden_states: `(T, hidden)`, embeddings of all images; None without images.
    """

    image_hidden_states: torch.Tensor | None = None


class KimiVLPreTrainedModel(PreTrainedModel):
    """Base of all Kimi-VL models."""

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
    """MoonViT, with adjacent patches merged into tokens."""

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
    """Maps merged patches to embeddings of the language model."""

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
        """Map merged patches `(T, merged_patches, vision_hidden_size)` to embeddings `(T, hidden_size)`."""
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
        """Return the output embeddings of the language model."""
        return self.language_model.get_output_embeddings()

    def get_input_embeddings(self) -> nn.Module:
        """Return the input embeddings of the language model. Older versions of transformers do not find them."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the input embeddings of the language model."""
        self.language_model.set_input_embeddings(value)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Set the output embeddings of the language model."""
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
            attention_mask: This and all other arguments are those of a causal language model.

        Raises:
            ValueError: If `image_grid_hws` is missing, or the number of image tokens does not match `input_ids`.
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
        """Return a mask that is True at image tokens, `(batch, seq_len)`."""
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
        """Prepare inputs. Images are passed with the prompt only: the cache has their keys and values afterwards."""
        upstream: Any = super()
        inputs = upstream.prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration or not kwargs.get("use_cache", True):
            inputs |= {"pixel_values": pixel_values, "image_grid_hws": image_grid_hws}
        return inputs


AutoConfig.register(MoonViTConfig.model_type, MoonViTConfig, exist_ok=True)
AutoConfig.register(KimiVLConfig.model_type, KimiVLConfig, exist_ok=True)
for auto_class in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
    auto_class.register(KimiVLConfig, KimiVLForConditionalGeneration, exist_ok=True)
