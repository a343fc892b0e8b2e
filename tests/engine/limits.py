"""Architectures that disagree with vLLM for a known reason."""

from __future__ import annotations

from dataclasses import dataclass

from nrl_models.consistency.capsule.decision import NO_MODULE_DIVERGES
from nrl_models.quirks import Pattern
from tests.engine.facts import Facts
from tests.engine.families import AS_LOADED, DISAGREES


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A known disagreement, and the facts by which it is recognized.

    Args:
        status: The outcome.
        reason: Explanation for the page.
        module: Name of the first module that diverges, if the verdict names no cause.
        after: The last module before it that is right, if `module` starts with a wrong input.
        pattern: Relation of the module's tensor to the expected one.
        key: Key of the configuration that the engine misreads.
        unwritten: Part of the names of parameters that the refit does not write.
        no_module: Whether the verdict found no module that diverges. With `module`: on some processors.
    """

    status: str
    reason: str
    module: str = ""
    after: str = ""
    pattern: Pattern = Pattern.UNKNOWN
    key: str = ""
    unwritten: str = ""
    no_module: bool = False

    def explains(self, facts: Facts) -> bool:
        """Return True if an outcome has the facts of this limit."""
        difference = facts.difference
        is_unlocated = self.no_module and facts.note == NO_MODULE_DIVERGES
        return (
            (
                not self.module
                or is_unlocated
                or (difference is not None and difference.module == self.module and difference.pattern is self.pattern)
            )
            and (not self.after or (difference is not None and difference.after == self.after))
            and (not self.key or (facts.cause is not None and facts.cause.key == self.key))
            and (not self.unwritten or any(self.unwritten in name for name in facts.unwritten))
            and (not self.no_module or bool(self.module) or is_unlocated)
        )


COHERE_WINDOW = Limit(
    status=DISAGREES,
    key="sliding_window",
    reason="vLLM's window has one token more than `sliding_window`; according to vLLM, the published model was "
    "trained with it. "
    "transformers' window has `sliding_window` tokens",
)

LIMITS: dict[str, Limit] = {
    "ApertusForCausalLM": Limit(
        status=DISAGREES,
        module="model.layers.0.mlp.act_fn",
        reason="vLLM keeps the two parameters of xIELU in bf16, regardless of the model's dtype",
    ),
    "BloomForCausalLM": Limit(
        status=DISAGREES,
        no_module=True,
        reason="vLLM computes the exact GELU, transformers the approximation with tanh, as in Bloom's training",
    ),
    "Cohere2ForCausalLM": COHERE_WINDOW,
    "Cohere2MoeForCausalLM": COHERE_WINDOW,
    "Ernie4_5_MoeForCausalLM": Limit(
        status=DISAGREES,
        no_module=True,
        module="model.layers.1.mlp.experts",
        reason="vLLM's router on a CPU omits `e_score_correction_bias` for softmax scores",
    ),
    "Gemma3nForCausalLM": Limit(
        status=DISAGREES,
        module="model.per_layer_projection_norm",
        pattern=Pattern.SCALED,
        reason="vLLM does not multiply the result of `per_layer_model_projection` by `hidden_size**-0.5`",
    ),
    "HrmTextForCausalLM": Limit(
        status=DISAGREES,
        module="model.L_module.layers.0.input_layernorm",
        after="model.embed_tokens",
        reason="vLLM's attention is bidirectional on every prompt. transformers' attention is bidirectional only on "
        "tokens that `token_type_ids` marks",
    ),
    "Mamba2ForCausalLM": Limit(
        status=DISAGREES,
        module="backbone.layers.0.mixer.norm",
        reason="vLLM normalizes each of `n_groups` groups of channels, as mamba_ssm does. transformers normalizes all "
        "channels together",
    ),
    "MiMoV2FlashForCausalLM": Limit(
        status=AS_LOADED,
        unwritten="attention_sink_bias",
        reason="vLLM loads sinks outside of its weight reload, so the old values remain",
    ),
    "GptOssForCausalLM": Limit(
        status=AS_LOADED,
        unwritten="experts",
        reason="vLLM loads experts and sinks outside of its weight reload, so the old values remain",
    ),
    "Zamba2ForCausalLM": Limit(
        status=DISAGREES,
        module="model.layers.0.mamba.norm",
        after="model.layers.0.mamba.in_proj",
        reason="transformers clamps step sizes of the mixer to at least `time_step_min`. vLLM does not",
    ),
}
"""Architectures that disagree with this engine."""
