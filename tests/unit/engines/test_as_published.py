"""Tensors that transformers saves under other names or shapes reach vLLM in the published layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nrl_models.engines.transfer.as_published import as_published
from nrl_models.errors import EngineError

EXPERTS, HIDDEN, INNER = 4, 32, 12


def nested(*path: str) -> nn.Module:
    """Build a model with one module at the end of a path."""
    root = module = nn.Module()
    for part in path:
        module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return root


def names(model: nn.Module, *saved_names: str) -> list[str]:
    return [name for name, _ in as_published(model, [(name, torch.zeros(2)) for name in saved_names])]


def test_duplicated_name_component_is_removed() -> None:
    model = nested("language_model", "model", "layers")
    assert names(model, "language_model.model.model.norm.weight", "language_model.lm_head.weight") == [
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ]


@pytest.mark.parametrize(
    "model", [nested("language_model", "model", "model"), nested("thinker", "model")], ids=["has both", "has neither"]
)
def test_name_unchanged_without_matching_engine_module(model: nn.Module) -> None:
    assert names(model, "language_model.model.model.norm.weight") == ["language_model.model.model.norm.weight"]


def test_wrapped_vision_tower_name() -> None:
    model = nested("vision_tower", "vision_model", "encoder")
    saved = (
        "model.vision_tower.encoder.norm.weight",
        "model.vision_tower.vision_model.encoder.norm.bias",
        "lm_head.weight",
    )
    assert names(model, *saved) == [
        "model.vision_tower.vision_model.encoder.norm.weight",
        "model.vision_tower.vision_model.encoder.norm.bias",
        "lm_head.weight",
    ]
    bare = nested("vision_tower", "encoder")
    assert names(bare, *saved) == list(saved)


def stacks(hidden: int = HIDDEN, inner: int = INNER) -> dict[str, torch.Tensor]:
    """The published layout: `(experts, in, out)`."""
    return {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(EXPERTS, hidden, 2 * inner),
        "model.layers.0.mlp.experts.down_proj": torch.randn(EXPERTS, inner, hidden),
        "model.norm.weight": torch.randn(hidden),
    }


def with_experts(*, transposed: bool) -> nn.Module:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.is_fused_checkpoint_transposed = transposed
    model.experts.moe_config = SimpleNamespace(hidden_dim_unpadded=HIDDEN)
    return model


def test_transposed_experts_match_published_layout() -> None:
    published = stacks()
    saved = {name: tensor.transpose(1, 2) if tensor.ndim == 3 else tensor for name, tensor in published.items()}
    for tensors in (published, saved):
        converted = dict(as_published(with_experts(transposed=True), tensors.items()))
        assert converted.keys() == published.keys()
        assert all(torch.equal(converted[name], tensor) for name, tensor in published.items())


def test_experts_unchanged_without_transposition() -> None:
    saved = stacks()
    converted = dict(as_published(with_experts(transposed=False), saved.items()))
    assert all(converted[name] is tensor for name, tensor in saved.items())


def test_square_experts_raise() -> None:
    with pytest.raises(EngineError, match=r"gate_up_proj of shape \(4, 32, 32\) may be"):
        list(as_published(with_experts(transposed=True), stacks(inner=HIDDEN // 2).items()))
