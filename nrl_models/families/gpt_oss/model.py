"""gpt-oss: attention with learned sinks over a mixture of stacked, biased experts."""

from typing import Any

from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss import modeling_gpt_oss as hf

from nrl_models.common.config.keys import declared_keys
from nrl_models.common.projections import CombinedQKV
from nrl_models.common.switches import is_off
from nrl_models.common.upstream import cache_in, cache_input, named_arguments
from nrl_models.families.published import decoder_sizes
from nrl_models.family import FamilyModel


class GptOssModel(hf.GptOssModel):
    """The decoder, with masks that keep packed documents apart; upstream builds its masks without positions."""

    handles_quirks = ("masks-without-positions",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder with masks built from `position_ids`. Arguments and results are those of transformers."""
        inputs = named_arguments(super().forward, args, kwargs)
        position_ids, is_off_here = inputs.get("position_ids"), is_off("masks-without-positions")
        has_mask = inputs.get("attention_mask") is not None or cache_in(inputs) is not None
        if position_ids is not None and not has_mask and not is_off_here:
            if inputs.get("inputs_embeds") is None:
                inputs["inputs_embeds"] = self.embed_tokens(inputs.pop("input_ids"))
            mask_inputs: dict[str, Any] = {
                "config": self.config,
                "inputs_embeds": inputs["inputs_embeds"],
                "attention_mask": None,
                "position_ids": position_ids,
                **cache_input(create_causal_mask, None),
            }
            inputs["attention_mask"] = {
                "full_attention": create_causal_mask(**mask_inputs),
                "sliding_attention": create_sliding_window_causal_mask(**mask_inputs),
            }
        return super().forward(**inputs)


class GptOssFamily(FamilyModel):
    """Declarations shared by all GptOss models."""

    rewrites = {hf.GptOssAttention: CombinedQKV, hf.GptOssModel: GptOssModel}
    # Only OpenAI's reference implementation reads these; other keys have the same values.
    ignored_config_keys = ("experts_per_token", "initial_context_length")
    # Older configuration classes lack the key, and the older code uses this value.
    config_values = {} if "swiglu_limit" in declared_keys(hf.GptOssConfig) else {"swiglu_limit": (7.0,)}
    tensor_parallel = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.sinks": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }


GptOssForCausalLM = ModelClass = GptOssFamily.head(
    hf.GptOssForCausalLM,
    published={"gpt-oss-20b": decoder_sizes(201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32)},
)
GptOssForSequenceClassification = GptOssFamily.head(hf.GptOssForSequenceClassification)
GptOssForTokenClassification = GptOssFamily.head(hf.GptOssForTokenClassification)
