"""Bugs in layers: a family rewrites a norm, an attention, a router or an embedding incorrectly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS

from nrl_models.common.recording import record_calls
from nrl_models.common.upstream import CACHE_NAMES
from nrl_models.testing.case import FamilyCase
from tools.mutants.groups import TRAINING
from tools.mutants.planting import (
    Bug,
    Mutant,
    around,
    called_with,
    in_modules,
    own_attribute,
    parameters_of,
    reads,
)

ATTENTION = ("test_layer_equivalence", "test_logits_equivalence")

QK_NORM = re.compile(r"(^|\.)(q|k|qk|kv|query|key)_?(a_|b_)?(layer_?)?norm$")
SHARED_EXPERT = re.compile(r"(^|\.)(shared_experts?|shared_mlp|shared_expert_mlp)$")
EPSILONS = ("variance_epsilon", "eps", "epsilon", "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")
SCALES = ("scaling", "scale", "softmax_scale", "norm_factor", "inv_norm_factor", "attention_scale")
CORRECTIONS = ("e_score_correction_bias", "expert_bias", "expert_biases")
OTHER_TYPE = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
ACTIVATIONS: Any = tuple({entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()})


def _has(*names: str, kind: str = "") -> Callable[[str, nn.Module], bool]:
    """Match modules that hold one of these attributes themselves and have `kind` in their class name."""
    return lambda name, module: kind in type(module).__name__ and any(_held(module, held) is not None for held in names)


def _held(module: nn.Module, name: str) -> Any:
    try:
        return own_attribute(module, name)
    except AttributeError:
        return None


def _reads(names: tuple[str, ...], change: Callable[[Any], Any]) -> Callable[[nn.Module], Mapping[str, Any]]:
    """Override the attributes in `names` that the module has, so that reading them returns a changed value."""
    return lambda module: {name: reads(name, change) for name in names if _held(module, name) is not None}


def _is_norm(name: str, module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and isinstance(_held(module, "weight"), nn.Parameter)


def _returns(change: Callable[[nn.Module, Any, Any], Any]) -> Callable[[nn.Module], Mapping[str, Any]]:
    """Return a forward whose result is `change(module, first input, correct result)`."""

    def forward(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return change(self, args[0] if args else next(iter(kwargs.values())), result)

    return lambda module: {"forward": around(type(module).forward, forward)}


def _attends(*arguments: str) -> Callable[[str, nn.Module], bool]:
    """Match attention modules whose forward takes these arguments."""
    return lambda name, module: (
        "Attention" in type(module).__name__ and set(arguments) <= set(parameters_of(type(module)))
    )


def _uses_cache(name: str, module: nn.Module) -> bool:
    """Match attention modules whose forward takes a key-value cache."""
    return any(_attends(argument)(name, module) for argument in CACHE_NAMES)


def _without(*arguments: str) -> Callable[[nn.Module], Mapping[str, Any]]:
    """Return a forward that passes None for some of its arguments."""
    forward = called_with(lambda layer, given: given | {name: None for name in arguments if name in given})
    return lambda module: {"forward": around(type(module).forward, forward)}


def _other_activation(module: nn.Module) -> Mapping[str, Any]:
    other = F.gelu if "SiLU" in type(module).__name__ else F.silu
    return {"forward": lambda self, x: other(x)}


def _is_expert_stack(name: str, module: nn.Module) -> bool:
    weight = _held(module, "gate_up_proj")
    return isinstance(weight, nn.Parameter) and weight.ndim == 3


def _halves_exchanged(module: Any) -> Mapping[str, Any]:
    gate_up, down = module.gate_up_proj, module.down_proj
    dim = next(at for at in (1, 2) if gate_up.shape[at] in (2 * down.shape[1], 2 * down.shape[2]))
    half = gate_up.shape[dim] // 2
    changed = {"gate_up_proj": reads("gate_up_proj", lambda weight: weight.roll(half, dim))}
    if isinstance(_held(module, "gate_up_proj_bias"), torch.Tensor):
        changed["gate_up_proj_bias"] = reads("gate_up_proj_bias", lambda bias: bias.roll(half, -1))
    return changed


def _is_router(name: str, module: nn.Module) -> bool:
    if any(isinstance(_held(module, held), torch.Tensor) for held in CORRECTIONS):
        return True
    routes = any(word in type(module).__name__ for word in ("Router", "TopK"))
    return routes and isinstance(_held(module, "bias"), torch.Tensor)


def _scale_of_embedding(case: FamilyCase) -> float | None:
    """Return the ratio of the first layer's input to the embedding weights, if it is one number other than 1."""
    model = case.model()
    embeddings = model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    ids = case.inputs(images=False).get("input_ids")
    if ids is None or not isinstance(weight, torch.Tensor) or weight.ndim != 2 or ids.max() >= len(weight):
        return None
    stacks = (
        (name, list(module.named_children())) for name, module in model.named_modules() if name.endswith("layers")
    )
    stack, layers = next(((name, layers) for name, layers in stacks if layers), ("", []))
    names = [f"{stack}.{layer}" for layer, _ in layers]
    rows = weight[ids].detach()
    try:
        with torch.no_grad(), record_calls(model, names, copy=True) as calls:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except Exception:  # any exception, for example without an image or without decoder tokens
        return None
    seen = [call.inputs[0] for call in calls.values() if call.inputs and call.inputs[0].shape == rows.shape]
    if not seen:
        return None
    ratio = (seen[0] / rows).flatten().median()
    matches = torch.allclose(rows * ratio, seen[0], rtol=1e-4, atol=1e-6)
    return float(ratio) if matches and abs(float(ratio) - 1) > 1e-3 else None


def _plant_unscaled(case: FamilyCase, patch: pytest.MonkeyPatch) -> FamilyCase:
    scale, embeddings = _scale_of_embedding(case), case.model().get_input_embeddings()
    (place,) = (name for name, module in case.model().named_modules() if module is embeddings)
    unscaled = _returns(lambda self, given, result: result / scale)
    return in_modules(lambda name, module: name == place, unscaled).plant(case, patch)


def _type_of_the_anchor(self: nn.Module) -> str:
    kind = own_attribute(self, "layer_type")
    return OTHER_TYPE.get(kind, kind) if self.is_kv_shared_layer else kind


def _dropped(self: nn.Module, given: Any, result: Any) -> Any:
    return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result


MUTANTS = (
    Mutant(
        "a norm's epsilon ten times as large",
        "1e-6 where the configuration says 1e-5, a default that a family never reads",
        in_modules(_has(*EPSILONS, kind="Norm"), _reads(EPSILONS, lambda eps: eps * 10)),
    ),
    Mutant(
        "a norm's weight off by one",
        "a weight w that means 1 + w taken as it is, or the reverse",
        in_modules(_is_norm, _reads(("weight",), lambda weight: weight + 1)),
    ),
    Mutant(
        "a norm's weight gets no gradient",
        "a fused norm with a backward for its input alone",
        in_modules(_is_norm, _reads(("weight",), lambda weight: weight.detach()), probed=False),
        TRAINING,
    ),
    Mutant(
        "norms of queries and keys skipped",
        "an attention written for a model without them",
        in_modules(lambda name, module: bool(QK_NORM.search(name)), _returns(lambda self, given, result: given)),
    ),
    Mutant(
        "another activation",
        "SiLU for GELU: hidden_act not read, or read under another key",
        in_modules(lambda name, module: isinstance(module, ACTIVATIONS), _other_activation),
    ),
    Mutant(
        "attention scale dropped",
        "scores that are not divided by the root of the head's size, or by the model's own number",
        in_modules(_has(*SCALES, kind="Attention"), _reads(SCALES, lambda scale: 1.0)),
        ATTENTION,
    ),
    Mutant(
        "biases of single linears dropped",
        "an output projection whose bias a rewritten layer forgets",
        in_modules(
            lambda name, module: isinstance(module, nn.Linear) and module.bias is not None,
            _reads(("bias",), lambda bias: None),
        ),
    ),
    Mutant(
        "attention sinks dropped",
        "a kernel that has no argument for them",
        in_modules(_has("sinks"), _reads(("sinks",), lambda sinks: torch.full_like(sinks, -1e4))),
        ATTENTION,
    ),
    Mutant(
        "embedding unscaled",
        "sqrt(hidden_size), or another multiplier of embeddings, left out",
        Bug(lambda case: _scale_of_embedding(case) is not None, _plant_unscaled),
    ),
    Mutant(
        "router's bias dropped",
        "a correction of the scores that is loaded and not added",
        in_modules(_is_router, _reads((*CORRECTIONS, "bias"), torch.zeros_like)),
        ("test_logits_equivalence", "test_layer_equivalence"),
    ),
    Mutant(
        "shared expert dropped",
        "a mixture that adds up what it routed to, and no more",
        in_modules(lambda name, module: bool(SHARED_EXPERT.search(name)), _returns(_dropped)),
    ),
    Mutant(
        "gate and up of stacked experts exchanged",
        "w1 and w3 stacked in the other order",
        in_modules(_is_expert_stack, _halves_exchanged),
    ),
    Mutant(
        "experts' biases dropped",
        "a grouped matmul without an epilogue",
        in_modules(
            _has("gate_up_proj_bias", "down_proj_bias"),
            _reads(("gate_up_proj_bias", "down_proj_bias"), torch.zeros_like),
        ),
    ),
    Mutant(
        "attention mask ignored",
        "a causal kernel that is given no mask: padding, and other documents, are seen",
        in_modules(_attends("attention_mask"), _without("attention_mask")),
        ("test_left_padding", "test_packing", "test_padded_batch", "test_logits_equivalence"),
    ),
    Mutant(
        "cache not used",
        "an attention that attends to the new word alone",
        in_modules(_uses_cache, _without(*CACHE_NAMES)),
        ("test_cached_decode", "test_decoded_steps"),
    ),
    Mutant(
        "keys and values of another layer",
        "KV sharing with the anchor of another kind of layers",
        in_modules(
            lambda name, module: _held(module, "is_kv_shared_layer") is True,
            lambda module: {"layer_type": property(_type_of_the_anchor)},
        ),
    ),
)
