"""Create the classes that replace Hugging Face layers, and assign them to a model's modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.documents.layers import ByDocument, DecoderByDocument
from nrl_models.common.forward.mrope import FreshPositions, PackedTextPositions
from nrl_models.common.projections import CombinedProjections
from nrl_models.common.upstream import record_as

MIXINS = (CombinedProjections, FreshPositions, PackedTextPositions, ByDocument, DecoderByDocument)
"""Mixins for `rewrites`. A subclass of the Hugging Face class is created with them."""


def rewritten(original: type[nn.Module], by: type[nn.Module], module: str, *, within: str = "") -> type[nn.Module]:
    """Return the class that replaces `original`: `by` if it is a subclass, else a new class from both.

    Args:
        original: A Hugging Face layer class.
        by: A subclass of it, or one of `MIXINS`.
        module: Name of the module that gets the new class, under the Hugging Face name.
        within: Attribute of that module to store the class in; empty stores it in the module itself.

    Raises:
        TypeError: If `by` is neither a subclass nor one of `MIXINS`, because transformers finds layers by `isinstance`.
    """
    if issubclass(by, original):
        return by
    if not issubclass(by, MIXINS):
        mixins = ", ".join(mixin.__name__ for mixin in MIXINS)
        raise TypeError(
            f"{by.__name__} rewrites {original.__name__}, so it must be a subclass of it, or of one of {mixins}"
        )
    attributes: dict[str, Any] = {"__module__": module, "__doc__": original.__doc__} | _answers_of(original)
    if issubclass(by, (CombinedProjections, ByDocument)):
        attributes["forward"] = _forward_like(original.forward, by)
    made = type(original.__name__, (by, original), attributes)
    if within:
        made.__qualname__ = f"{within}.{original.__name__}"
    else:
        setattr(sys.modules[module], original.__name__, made)  # for pickle
    return made


def _answers_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return class attributes that transformers derives from source code: a rewritten decoder is not custom code."""
    asked = ("is_custom_code", "_can_set_attn_implementation", "_can_set_experts_implementation")
    return {name: staticmethod(getattr(original, name)) for name in asked if hasattr(original, name)}


def _forward_like(upstream: Callable[..., Any], mixin: Any) -> Callable[..., Any]:
    """Return the mixin's forward with the signature of `upstream`, which transformers inspects."""

    @functools.wraps(upstream)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    return forward


def adopt_rewrites(
    model: nn.Module, rewrite_of: Callable[[type[nn.Module]], type[nn.Module] | None], combine: bool
) -> None:
    """Change the class of each module of `model` to its rewritten class, in place."""
    for name, module in list(model.named_modules()):
        rewritten_class = rewrite_of(type(module))
        if rewritten_class is None:
            continue
        module.__class__ = rewritten_class
        if isinstance(module, PreTrainedModel):
            record_as(rewritten_class, module)
        if combine and isinstance(module, CombinedProjections):
            module.combine_projections(name)
