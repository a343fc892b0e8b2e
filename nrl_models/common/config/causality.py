"""Models that do not predict each token from the tokens before it."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from nrl_models.common.config.positions import has_encoder
from nrl_models.common.modules import innermost


def why_not_causal(model: nn.Module) -> str | None:
    """Return why the logits of a token are not a prediction of the next token from the tokens up to it.

    None if they are, or if neither the configuration nor the class nor its family shows that they are not.
    """
    inner = innermost(model)
    config = getattr(inner, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return None
    if declared := getattr(inner, "limits", {}).get("log-probabilities"):
        return str(declared)
    if has_encoder(config):
        return "has an encoder, which reads complete sequences"
    if type(inner).__name__.endswith("ForMaskedLM"):
        return "is a masked language model, which predicts a token from the tokens around it"
    text = config.get_text_config()
    # Some configurations have the key without an effect (GPT-NeoX): then no layer has it. Encoders of images and
    # proteins have it as well, with another configuration.
    if getattr(text, "is_decoder", None) is False and any(
        getattr(module, "is_decoder", None) is False and getattr(module, "config", None) is text
        for module in inner.modules()
    ):
        return "attends in both directions, because its configuration has is_decoder=false (expected true)"
    # Composite models (PaliGemma) set this key for prefixes, and build the mask themselves. Values for a part of the
    # tokens ("vision") leave text causal.
    bidirectional = text is config and getattr(text, "use_bidirectional_attention", None)
    if bidirectional and any(
        getattr(module, "is_causal", None) is False and getattr(module, "config", None) is text
        for module in inner.modules()
    ):
        key = f"use_bidirectional_attention={bidirectional!r}"
        return f"attends in both directions, because its configuration has {key} (expected False)"
    if getattr(text, "causal", None) is False:
        return "attends in both directions, because its configuration has causal=false (expected true)"
    return None
