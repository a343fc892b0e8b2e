"""Deriving the layout of all layers from two layers of each kind gives the same result as converting all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter, WeightRenaming
from versions import since

from nrl_models import registry
from nrl_models.common.state_dict import layer_patterns, layouts
from nrl_models.common.state_dict.layer_patterns import convert_by_layer, ignore_indices
from nrl_models.common.state_dict.layouts import convert_layout, hub_conversions, own_tensors, transformers_views
from nrl_models.common.upstream_conversions import PrefixChange
from nrl_models.common.views.view import HFTensor, Piece, View

SHAPE = (6, 4)


def table(*names: str, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, HFTensor]:
    """Return tensors that are complete parameters of the same names."""
    return {name: HFTensor(name, (shapes or {}).get(name, SHAPE), (Piece(View(name)),)) for name in names}


def layers(count: int, *names: str) -> list[str]:
    return [f"model.layers.{index}.{name}" for index in range(count) for name in names]


def float32(name: str) -> torch.dtype:
    return torch.float32


class Recorded:
    """A conversion of tables that records the number of tensors in each call."""

    def __init__(self, change: Callable[[dict[str, HFTensor]], dict[str, HFTensor]]) -> None:
        self.change, self.counts = change, []

    def __call__(self, tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
        self.counts.append(len(tensors))
        return self.change(tensors)


def renamed(tensors: dict[str, HFTensor], new_name: Callable[[str], str]) -> dict[str, HFTensor]:
    return {new_name(name): HFTensor(new_name(name), tensor.shape, tensor.pieces) for name, tensor in tensors.items()}


def test_convert_by_layer_converts_few_layers_of_each_kind() -> None:
    names = ["model.embed.weight", *layers(120, "q.weight", "k.weight"), "model.norm.weight"]
    convert = Recorded(
        lambda tensors: renamed(tensors, lambda name: name.replace("model.layers", "h").replace("q", "w1"))
    )
    result = convert_by_layer(table(*names), float32, convert)
    assert convert.counts == [2 + 2 * 6]  # 0 and 9, 10 and 99, 100 and 119
    assert list(result.items()) == list(convert.change(table(*names)).items())


def test_layers_with_other_shapes_or_dtypes_are_converted() -> None:
    names = layers(8, "q.weight", "k.weight")
    shapes = {"model.layers.4.q.weight": (3, 4)}
    dtypes = {"model.layers.5.k.weight": torch.float16}
    convert = Recorded(lambda tensors: tensors)
    result = convert_by_layer(table(*names, shapes=shapes), lambda name: dtypes.get(name, torch.float32), convert)
    assert convert.counts == [2 * (2 + 1 + 1)]
    assert result == table(*names, shapes=shapes)


def _rename_even_layers(tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """A conversion that depends on the layer's index."""
    return renamed(tensors, lambda name: name.replace("q", "w") if int(name.split(".")[2]) % 2 == 0 else name)


def _shift_layer_index(tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """A conversion that renames the first layer to the second."""
    return renamed(tensors, lambda name: ".".join([*name.split(".")[:2], str(int(name.split(".")[2]) + 1), "q"]))


def _merge_layers(tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """A conversion that combines all layers in one tensor."""
    pieces = tuple(Piece(tensor.pieces[0].view, (("select", (0, at)),)) for at, tensor in enumerate(tensors.values()))
    return {"all": HFTensor("all", (len(tensors), *SHAPE), pieces)}


def _rename_all_to_same_name(tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """A conversion with one name for tensors of several layers. The last one wins."""
    return renamed(tensors, lambda name: "same")


def _reorder(tensors: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """A conversion that reorders tensors, so that layers are no longer contiguous."""
    items = list(tensors.items())
    return dict(items[::2] + items[1::2])


@pytest.mark.parametrize(
    "change", [_rename_even_layers, _shift_layer_index, _merge_layers, _rename_all_to_same_name, _reorder]
)
def test_layer_dependent_conversions_convert_all_layers(change: Any) -> None:
    tensors = table(*layers(10, "q.weight", "k.weight"))
    convert = Recorded(change)
    result = convert_by_layer(tensors, float32, convert)
    assert convert.counts == [4, 20]
    assert list(result.items()) == list(change(tensors).items())


class ThirdPartyOperation(ConversionOps):
    """A third-party operation, which may depend on a layer's index."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return input_dict


@since("5.9")
def test_ignore_indices() -> None:
    prefixes = [] if PrefixChange.__module__.startswith("nrl") else [PrefixChange(prefix_to_remove="language_model")]
    merged = [MergeModulelist(dim=0), Concatenate(dim=1)]
    assert ignore_indices(
        [
            WeightConverter([r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"], r"\.experts.gate_up_proj", merged),
            WeightRenaming(r"norm1\.", "norm2."),
            WeightRenaming(r"layers\.(\d+)\.mixer", r"layers.\1.attention"),
            *prefixes,
        ]
    )
    assert not ignore_indices([WeightRenaming(r"layers\.0\.", "first.")])
    assert not ignore_indices([WeightRenaming("proj.2", "out_proj")])
    assert not ignore_indices([WeightRenaming("layers.[12].", "early.")])
    assert not ignore_indices([WeightRenaming("first.", "layers.0.")])
    assert not ignore_indices([WeightConverter("a", "b", [ThirdPartyOperation()])])
    scoped = WeightRenaming("a", "b")
    scoped.scope_prefix = "towers.1"
    assert not ignore_indices([scoped])


def _upstream(architecture: str) -> PreTrainedModel:
    """Build the model of a class's default configuration on meta, at full size except for a limit on layers."""
    reference: Any = registry.model_class(architecture)
    upstream = reference.reference_class()
    with torch.device("meta"):
        return upstream._from_config(upstream.config_class())


def _in_memory_layout(model: PreTrainedModel) -> dict[str, HFTensor]:
    own = own_tensors(model)
    return {name: HFTensor(name, own[name].shape, (Piece(view),)) for name, view in transformers_views(model)}


def _derived_and_full_layouts(model: PreTrainedModel) -> tuple[dict[str, HFTensor], dict[str, HFTensor]]:
    """Return the hub's layout, derived from two layers of each kind and converted from all of them."""
    own, tensors = own_tensors(model), _in_memory_layout(model)
    shared = convert_layout(model, tensors, own, hub_conversions(model))
    return shared, layouts._traced(model, tensors, lambda name: own[name].dtype, hub_conversions(model))


# The largest model for each kind of conversion. tests/full has all architectures.
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "JambaForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
    ],
)
def test_derived_layout_matches_full_conversion(architecture: str) -> None:
    shared, full = _derived_and_full_layouts(_upstream(architecture))
    assert list(shared.items()) == list(full.items())


def small_deepseek() -> PreTrainedModel:
    config = DeepseekV3Config(
        hidden_size=8, moe_intermediate_size=2, n_routed_experts=4, n_group=1, topk_group=1, num_hidden_layers=12
    )
    with torch.device("meta"):
        return DeepseekV3ForCausalLM._from_config(config)


def test_comparison_detects_wrong_derivation(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, full = _derived_and_full_layouts(small_deepseek())
    assert list(shared.items()) == list(full.items())
    moved = layer_patterns._moved

    def wrong(tensor: HFTensor, first: Any, layer: Any) -> HFTensor:
        right = moved(tensor, first, layer)
        return replace(right, pieces=moved(tensor, first, (layer[0], "5")).pieces) if layer[1] == "6" else right

    monkeypatch.setattr(layer_patterns, "_moved", wrong)
    shared, full = _derived_and_full_layouts(small_deepseek())
    assert list(shared.items()) != list(full.items())
