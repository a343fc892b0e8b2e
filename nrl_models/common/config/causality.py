"""Models that do not predict each token from the tokens before it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from nrl_models.common.config.positions import has_encoder
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.forward.routing import own_routing
from nrl_models.common.modules import innermost, reads_complete_rows
from nrl_models.errors import HeadError

PREFIX_TYPES = "token_type_ids"
"""Argument of models with a bidirectional prefix (PaliGemma): 0 for the prefix, 1 for the tokens after it."""


def marks_prefix(model: nn.Module) -> bool:
    """Return True if tokens with `PREFIX_TYPES` 0 attend to each other in both directions.

    Composite models (PaliGemma) set the key of the text configuration for prefixes, and build the mask themselves.
    """
    inner = innermost(model)
    config = getattr(inner, "config", None)
    if not isinstance(config, PreTrainedConfig) or (text := config.get_text_config()) is config:
        return False
    bidirectional = getattr(text, "use_bidirectional_attention", None) is True
    return bidirectional and PREFIX_TYPES in inspect.signature(inner.forward).parameters


def why_not_causal(model: nn.Module, inputs: Collection[str] = ()) -> str | None:
    """Return why the logits of a token are not a prediction of the next token from the tokens up to it.

    None if they are, or if neither the configuration nor the class nor its family shows that they are not.

    Args:
        model: The model; it may be wrapped.
        inputs: Names of the further arguments of its forward.
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
    # Values for a part of the tokens ("vision") leave text causal.
    bidirectional = getattr(text, "use_bidirectional_attention", None)
    if text is not config:
        if PREFIX_TYPES not in inputs and marks_prefix(inner):
            return f"attends in both directions without {PREFIX_TYPES} (0 for the prompt, 1 for the completion)"
    elif bidirectional and any(
        getattr(module, "is_causal", None) is False and getattr(module, "config", None) is text
        for module in inner.modules()
    ):
        key = f"use_bidirectional_attention={bidirectional!r}"
        return f"attends in both directions, because its configuration has {key} (expected False)"
    if getattr(text, "causal", None) is False:
        return "attends in both directions, because its configuration has causal=false (expected true)"
    return None


def require_causal(models: Iterable[nn.Module], input_ids: torch.Tensor, inputs: Collection[str] = ()) -> None:
    """Check by measurement that logits of models without a family do not depend on later tokens.

    Families declare it in `limits`, and generated tests compare their classes. Each model is measured once.

    Args:
        models: The models; they may be wrapped.
        input_ids: Token IDs that the models have, of any shape.
        inputs: Names of the further arguments of their forwards.

    Raises:
        HeadError: If they do.
    """
    for model in models:
        inner = innermost(model)
        if hasattr(inner, "limits") or PREFIX_TYPES in inputs or reads_complete_rows(model):
            continue
        if model not in _sees_later_tokens:
            _sees_later_tokens[model] = _logits_change(model, input_ids)
        if _sees_later_tokens[model]:
            raise HeadError(
                f"{type(inner).__name__} attends in both directions: its logits of a token depend on later tokens; "
                "expected a model that predicts each token from the tokens before it"
            )


_sees_later_tokens: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether logits of a model without a family depend on later tokens."""

_MEASURED_TOKENS = 4

_TOLERANCE = 1e-4
"""Difference from rounding, relative to the largest logit: kernels may sum differently in another row of the batch."""


@torch.no_grad()
def _logits_change(model: nn.Module, input_ids: torch.Tensor) -> bool:
    """Return True if logits of tokens change when the token after them changes; False without logits of text alone.

    One forward has both rows, so that dynamic scales of quantization are the same.
    """
    row = input_ids.reshape(-1).repeat(_MEASURED_TOKENS)[:_MEASURED_TOKENS]
    rows = row.repeat(2, 1)
    rows[1, -1] = torch.where(row[-1] == 0, 1, 0)
    try:
        with evaluating(model), own_routing(model), torch.compiler.set_stance("force_eager"):
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    except Exception:  # of any type: the text may need images, and classes report that differently
        return False
    tolerance = max(_TOLERANCE, 8 * torch.finfo(logits.dtype).eps)
    tolerance *= max(1.0, logits.abs().nan_to_num(posinf=0.0).max().item())
    return not torch.allclose(logits[0].float(), logits[1].float(), rtol=0.0, atol=tolerance, equal_nan=True)
