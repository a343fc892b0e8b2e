"""Baichuan in transformers' style: Llama's block, rotary positions or ALiBi, and a head that may be normalized.

transformers has no Baichuan. This is the reference model with separate linears that the family's tests compare with.
The hub packs queries, keys and values (`W_pack`), and a conversion registered here declares that to transformers.
Follows Baichuan 2 (arXiv 2309.10305), RoPE (arXiv 2104.09864) and ALiBi (arXiv 2108.12409).

Shape suffixes: `B` batch, `H` heads, `Q` queries, `K` keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral.modeling_mistral import MistralMLP

from nrl_models.common.upstream import cache_name, with_additive_masks
from nrl_models.common.upstream_conversions import Chunk, WeightConverter, register_checkpoint_conversion_mapping
from nrl_models.families.baichuan.configuration import BaichuanConfig


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each of `heads` heads: a geometric sequence if `heads` is a power of two.

    Otherwise: the sequence of the next lower power, followed by every second slope of the next higher one.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]


_CACHE = cache_name(create_causal_mask)
"""Name of the cache in upstream's functions."""


class BaichuanAttention(llama.LlamaAttention):
    """Multi-head attention. ALiBi biases are part of the mask."""


class BaichuanNoRotation(nn.Module):
    """Replaces rotary positions in models with ALiBi: tables of a rotation by zero."""

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `(B, Q, 1)` each."""
        cosines = hidden_states.new_ones(*position_ids.shape, 1)
        return cosines, torch.zeros_like(cosines)


class BaichuanDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each behind a norm and with a residual."""

    forward = llama.LlamaDecoderLayer.forward

    def __init__(self, config: BaichuanConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = BaichuanAttention(config, layer_idx)  # type: ignore[arg-type]  # has its keys
        self.mlp = MistralMLP(config)  # Llama's without biases
        self.input_layernorm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class BaichuanNormHead(nn.Linear):
    """Output embeddings with normalized rows.

    The remote code overwrites the weight with its normalized rows at the first evaluation. Here, the weight stays as
    trained, and logits are the same.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map hidden states `(..., hidden_size)` to logits `(..., vocab_size)`."""
        return F.linear(input, F.normalize(self.weight), self.bias)


class BaichuanPreTrainedModel(llama.LlamaPreTrainedModel):
    """Base of all Baichuan models."""

    config_class = BaichuanConfig
    _no_split_modules = ["BaichuanDecoderLayer"]
    _can_record_outputs = {"hidden_states": BaichuanDecoderLayer, "attentions": BaichuanAttention}
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq$"]


class BaichuanModel(BaichuanPreTrainedModel):
    """The decoder without a head.

    Raises:
        ValueError: If ALiBi is used with an attention implementation that does not support biases.
    """

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(BaichuanDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        has_alibi = config.position_embedding_type == "alibi"
        self.rotary_emb = BaichuanNoRotation() if has_alibi else llama.LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states `(B, Q, hidden_size)`. Arguments are those of decoders in transformers.

        transformers before 5.24 passes the cache as `past_key_values`.
        """
        cache = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        arguments: dict[str, Any] = {"inputs_embeds": inputs_embeds, "position_ids": position_ids, _CACHE: cache}
        if self.config.position_embedding_type == "alibi":
            seen = cache.get_seq_length() if cache is not None else 0
            attention_mask = self._alibi_mask(seen, {"attention_mask": attention_mask, **arguments})
        decode: Any = llama.LlamaModel.forward
        output: BaseModelOutputWithPast = decode(
            self, attention_mask=attention_mask, use_cache=use_cache, **arguments, **kwargs
        )
        return output

    def _alibi_mask(self, seen: int | torch.Tensor, mask_inputs: dict[str, Any]) -> torch.Tensor:
        """Return the causal mask plus each head's distance penalty, `(B, H, Q, K)`, to be added to the scores.

        Distances are differences of indices, so they are right for packed documents, padding on either side, and
        caches.
        """
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            raise ValueError(
                f"attn_implementation={implementation!r} cannot add ALiBi's biases: "
                "load the model with 'sdpa' or 'eager'"
            )
        mask: Any = create_causal_mask(with_additive_masks(self.config), **mask_inputs)
        queries = torch.arange(mask.shape[-2], device=mask.device) + seen
        distance = torch.arange(mask.shape[-1], device=mask.device) - queries[:, None]
        slopes = torch.tensor(alibi_slopes(self.config.num_attention_heads), device=mask.device)
        # Masked entries keep the dtype's lowest value, because adding a penalty would make them infinite.
        return mask + (slopes[:, None, None] * distance).to(mask.dtype).masked_fill(mask < 0, 0)


class BaichuanForCausalLM(BaichuanPreTrainedModel, GenerationMixin):
    """Baichuan with a language-model head: `BaichuanForCausalLM` on the hub."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        head = BaichuanNormHead if config.normalize_head else nn.Linear
        self.lm_head = head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = llama.LlamaForCausalLM.forward

    @PreTrainedModel.loss_function.getter  # type: ignore[attr-defined]
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """Loss of a causal language model, plus a z-loss.

        The z-loss is `z_loss_weight` times the mean square of each token's largest logit.
        """
        plain: Callable[..., torch.Tensor] = PreTrainedModel.loss_function.fget(self)  # type: ignore[attr-defined]

        def with_z_loss(logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            loss = plain(logits=logits, **kwargs)
            return loss + self.config.z_loss_weight * logits[..., :-1, :].amax(-1).float().square().mean()

        return with_z_loss if self.config.z_loss_weight else plain


class BaiChuanForCausalLM(BaichuanForCausalLM):
    """Same class under the name in Baichuan-7B's configuration."""


class BaichuanForSequenceClassification(GenericForSequenceClassification, BaichuanPreTrainedModel):
    """Baichuan with one or several scores per sequence."""


class BaichuanForTokenClassification(GenericForTokenClassification, BaichuanPreTrainedModel):
    """Baichuan with scores for each token."""


AutoConfig.register(BaichuanConfig.model_type, BaichuanConfig, exist_ok=True)
AutoModel.register(BaichuanConfig, BaichuanModel, exist_ok=True)  # the generic heads get their decoder from it
AutoModelForCausalLM.register(BaichuanConfig, BaichuanForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping(
    BaichuanConfig.model_type,
    [
        WeightConverter(
            source_patterns="self_attn.W_pack.weight",
            target_patterns=[f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")],
            operations=[Chunk(dim=0)],
        )
    ],
    overwrite=True,
)
