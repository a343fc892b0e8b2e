"""Tiny transformers models and ours with the same weights, identical on every call."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nrl_models import registry

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}

# Llama has no biases. Qwen2 has biases in q, k and v. Mixtral's experts are three-dimensional parameters.
CONFIGS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    # q, k and v have one shape, so that they are interchangeable.
    "square": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 4})),
    "tied": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "tie_word_embeddings": True})),
}


@cache
def weights(which: str) -> dict[str, torch.Tensor]:
    """Return random weights of `CONFIGS[which]` by transformers' names. Norms and biases are also random."""
    torch.manual_seed(0)
    transformers_class, config = CONFIGS[which]
    model = transformers_class(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def filled(model: PreTrainedModel, which: str) -> PreTrainedModel:
    """Load `weights(which)` into the model, in evaluation mode."""
    model.load_state_dict(weights(which))
    return model.eval()


def theirs(which: str) -> PreTrainedModel:
    """Create transformers' model."""
    transformers_class, config = CONFIGS[which]
    return filled(transformers_class(type(config)(**config.to_dict(), attn_implementation="eager")), which)


def ours(which: str) -> PreTrainedModel:
    """Create our model with the same weights."""
    transformers_class, config = CONFIGS[which]
    our_class = registry.model_class(transformers_class.__name__)
    return filled(our_class(type(config)(**config.to_dict(), attn_implementation="eager"), combine=True), which)


BUILDERS = {"transformers": theirs, "ours": ours}
