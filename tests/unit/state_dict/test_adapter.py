"""The state dict adapter: conversion from and to Hugging Face names, by dict, tensor, live view and stream."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import weakref
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from checkpoints import assert_same, new_model, problems, snapshot
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, revert_weight_conversion
from transformers.models.llama import modeling_llama
from versions import since

from nrl_models import AutoModelForCausalLM, StateDictAdapter, StateDictError, registry
from nrl_models.auto import auto_class_of
from nrl_models.common.state_dict.layouts import convert_layout
from nrl_models.common.upstream_conversions import describe_conversion
from nrl_models.common.views.traced_tensor import NotAViewError
from nrl_models.errors import UnknownArgumentError
from nrl_models.families.llama.model import LlamaFamily
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

Tensors = dict[str, torch.Tensor]

ATTENTION = "model.layers.0.self_attn"
PARTS = [f"{ATTENTION}.{part}_proj.weight" for part in "qkv"]
EXPERTS_GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"

LAYOUTS = ("hub", "transformers")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def nrl_model(reference: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Create our model with a transformers model's weights."""
    model = auto_class_of(reference.config).from_config(reference.config, dtype=reference.dtype, **options).eval()
    model.load_state_dict(model.state_dict_adapter.from_hf(reference.state_dict()))
    return model


@pytest.fixture(scope="module")
def model(llama: PreTrainedModel) -> PreTrainedModel:
    """Our model of `llama`: grouped-query attention, biases everywhere. Do not change it."""
    return nrl_model(llama)


@pytest.fixture(scope="module")
def adapter(model: PreTrainedModel) -> StateDictAdapter:
    return StateDictAdapter(model)


@pytest.fixture(scope="module")
def moe(mixtral: PreTrainedModel) -> PreTrainedModel:
    """Our model of `mixtral`. Do not change it."""
    return nrl_model(mixtral)


@pytest.fixture
def tensors(llama: PreTrainedModel) -> Tensors:
    """transformers' state dict of `llama`. Tests may change it."""
    return {name: tensor.clone() for name, tensor in llama.state_dict().items()}


def storages(tensors: Tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}


def shuffled(tensors: Tensors, seed: int = 0) -> Tensors:
    items = list(tensors.items())
    random.Random(seed).shuffle(items)
    return dict(items)


# A hub layout that packs q, k and v and permutes rows for rotary embeddings, unlike transformers' layout. The published
# models of this kind are large, new, or have no family here.


class PermuteRows(ConversionOps):
    """Reorder rows for rotary embeddings: each head's even and odd rows, or its halves, come first."""

    def __init__(self, shape: tuple[int, int] = (16, 2)) -> None:
        self.shape = shape

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        ((tensor,),) = ([tensors] if isinstance(tensors, torch.Tensor) else tensors for tensors in input_dict.values())
        heads = tensor.view(8, *self.shape, 256)
        return {target_patterns[0]: heads.transpose(1, 2).reshape(256, 256)}

    @property
    def reverse_op(self) -> ConversionOps:
        return PermuteRows(self.shape[::-1])


class Double(ConversionOps):
    """A conversion that computes values, so it is not a view."""

    def convert(
        self, input_dict: dict[str, list[torch.Tensor]], target_patterns: list[str], **_: Any
    ) -> dict[str, list[torch.Tensor]]:
        return {target_patterns[0]: [tensor * 2 for tensors in input_dict.values() for tensor in tensors]}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


PACKED = [
    WeightConverter(
        source_patterns="self_attn.packed.weight",
        target_patterns=[f"self_attn.{part}_proj.weight" for part in "qkv"],
        operations=[Chunk(dim=0)],
    ),
    WeightConverter(
        source_patterns="self_attn.out.weight",
        target_patterns="self_attn.o_proj.weight",
        operations=[PermuteRows()],
    ),
]
register_checkpoint_conversion_mapping("PackedForCausalLM", PACKED, overwrite=True)


class PackedForCausalLM(LlamaFamily, modeling_llama.LlamaForCausalLM):
    pass


def packed_model(**options: Any) -> PackedForCausalLM:
    torch.manual_seed(0)
    config = tiny_config(LlamaConfig, {"num_key_value_heads": 8, "num_hidden_layers": 1})
    return PackedForCausalLM.from_config(config, **options)


# Creation from a model or a configuration


CONFIGS = {
    "llama": lambda: tiny_config(LlamaConfig, {"attention_bias": True}),
    "tied": lambda: tiny_config(Gemma3TextConfig),
    "experts": lambda: tiny_config(MixtralConfig),
    "buffers": lambda: tiny_config(DeepseekV3Config),
    "vision": lambda: tiny_config(Gemma3Config),
}


def adapter_for(config: PreTrainedConfig) -> StateDictAdapter:
    """Return the adapter of the model that an auto class builds from a configuration."""
    return StateDictAdapter(auto_class_of(config).from_config(config, device="meta"))


@pytest.mark.parametrize("name", CONFIGS)
def test_meta_model_has_same_tables_in_same_order(name: str) -> None:
    config = CONFIGS[name]()
    real, on_meta = StateDictAdapter(auto_class_of(config).from_config(config)), adapter_for(config)
    assert_same_adapter(on_meta, real)
    for table in ("specs", *LAYOUTS):
        assert list(getattr(on_meta, table)) == list(getattr(real, table))


def test_meta_model_has_same_adapter(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    on_meta = AutoModelForCausalLM.from_config(model.config, device="meta")
    assert_same_adapter(StateDictAdapter(on_meta), adapter)


def assert_same_adapter(some: StateDictAdapter, other: StateDictAdapter) -> None:
    """Check that two adapters are equal, except for transformers' conversions, which only equal themselves."""
    facts, expected = dict(vars(some)), dict(vars(other))
    conversions = [list(adapter.pop("_conversions")) for adapter in (facts, expected)]
    assert facts == expected
    assert list(map(describe_conversion, conversions[0])) == list(map(describe_conversion, conversions[1]))


def test_own_tensors_match_transformers(adapter: StateDictAdapter, tensors: Tensors) -> None:
    assert list(adapter.specs) == list(adapter.transformers) == list(tensors)
    assert all(adapter.from_hf(tensors)[name] is tensor for name, tensor in tensors.items())


def test_adapter_of_transformers_model(mixtral: PreTrainedModel) -> None:
    assert_same(StateDictAdapter(mixtral).to_hf(mixtral.state_dict(), layout="transformers"), mixtral.state_dict())
    expected = revert_weight_conversion(mixtral, dict(mixtral.state_dict()))
    assert_same(StateDictAdapter(mixtral).to_hf(mixtral.state_dict()), expected)


def test_adapter_keeps_no_reference_to_model(llama_config: LlamaConfig) -> None:
    model = AutoModelForCausalLM.from_config(llama_config)
    adapter = model.state_dict_adapter
    adapter.to_hf(model.state_dict())
    list(adapter.iter_export(model, 100_000))
    gone = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
    del model
    gc.collect()
    assert not [reference for reference in gone if reference() is not None]


def test_adapter_copy_and_pickle(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    pickled = pickle.dumps(adapter)
    assert len(pickled) < 100_000  # contains no weight
    for load in (copy.deepcopy(adapter), copy.copy(adapter), pickle.loads(pickled)):
        assert vars(load) == vars(adapter)
        assert_same(load.to_hf(model.state_dict()), adapter.to_hf(model.state_dict()))


def test_adapter_is_rebuilt_after_dtype_change(llama_config: LlamaConfig) -> None:
    model = AutoModelForCausalLM.from_config(llama_config)
    assert model.to(torch.bfloat16).state_dict_adapter.specs[PARTS[0]].dtype == torch.bfloat16


def test_unknown_layout_raises(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda layout: adapter.to_hf({}, layout=layout),
        lambda layout: adapter.convert_single_tensor_to_hf(PARTS[0], model.state_dict()[PARTS[0]], layout=layout),
        lambda layout: adapter.hf_views(model, layout=layout),
        lambda layout: adapter.export_plan(layout=layout),
        lambda layout: list(adapter.iter_export(model, layout=layout)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="unknown layout 'vllm': expected 'hub' or 'transformers'"):
            call("vllm")


# Complete state dicts


@layouts
@pytest.mark.parametrize("name", CONFIGS)
def test_to_hf_and_from_hf_round_trip(name: str, layout: Any) -> None:
    config = CONFIGS[name]()
    torch.manual_seed(0)
    adapter = adapter_for(config)
    own = {key: torch.randn(spec.shape) for key, spec in adapter.specs.items()}
    own |= {tied: own[kept] for tied, kept in adapter.tied.items()}
    converted = adapter.to_hf(own, layout=layout)
    assert list(converted) == list(adapter.layout(layout))
    assert_same(adapter.from_hf(shuffled(converted)), own)


def test_tensor_order_does_not_matter(adapter: StateDictAdapter, model: PreTrainedModel, tensors: Tensors) -> None:
    expected, own = adapter.from_hf(tensors), adapter.to_hf(model.state_dict())
    for seed in range(3):
        converted = adapter.from_hf(shuffled(tensors, seed))
        assert list(converted) == list(expected)
        assert_same(converted, expected)
        exported = adapter.to_hf(shuffled(model.state_dict(), seed))
        assert list(exported) == list(own)
        assert_same(exported, own)


def test_passed_dicts_are_not_modified(adapter: StateDictAdapter, model: PreTrainedModel, tensors: Tensors) -> None:
    for call, given in ((adapter.from_hf, tensors), (adapter.to_hf, dict(model.state_dict()))):
        names, before = list(given), {name: tensor.clone() for name, tensor in given.items()}
        call(given)
        assert list(given) == names
        assert_same(given, before)


def test_to_hf_returns_views(adapter: StateDictAdapter, model: PreTrainedModel, moe: PreTrainedModel) -> None:
    for converter, of in ((adapter, model), (moe.state_dict_adapter, moe)):
        own = of.state_dict()
        for layout in LAYOUTS:
            assert storages(converter.to_hf(own, layout=layout)) <= storages(own)


def test_exclude_key_regex_matches_from_start_of_name(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    everything = adapter.to_hf(model.state_dict())
    left = adapter.to_hf(model.state_dict(), exclude_key_regex=r".*k_proj|lm_head|norm")
    assert_same(
        left, {name: tensor for name, tensor in everything.items() if "k_proj" not in name and name != "lm_head.weight"}
    )
    assert len(left) == len(everything) - 5
    assert_same(adapter.to_hf(model.state_dict(), exclude_key_regex=""), everything)


def test_to_hf_with_partial_state_dict(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    given = {name: model.state_dict()[name] for name in (PARTS[1], "lm_head.weight")}
    assert list(adapter.to_hf(given)) == list(given)
    assert adapter.to_hf({}) == {}


def test_from_hf_with_partial_state_dict(adapter: StateDictAdapter, tensors: Tensors) -> None:
    given = {name: tensors[name] for name in (*PARTS, "model.norm.weight")}
    assert_same(adapter.from_hf(given, strict=False), given)
    assert adapter.from_hf({}, strict=False) == {}


def test_tied_tensors_share_one_tensor() -> None:
    config = tiny_config(LlamaConfig, {"tie_word_embeddings": True, "num_hidden_layers": 1})
    tied, reference = adapter_for(config), new_model(config)
    embedding = "model.embed_tokens.weight"
    assert tied.tied == {"lm_head.weight": embedding}
    for gone in ("lm_head.weight", embedding):
        given = {name: tensor for name, tensor in reference.state_dict().items() if name != gone}
        own = tied.from_hf(given)
        assert own["lm_head.weight"] is own[embedding]
        assert_same(tied.to_hf(own), reference.state_dict())
    assert not tied.from_hf({"model.norm.weight": torch.ones(256)}, strict=False).keys() & {"lm_head.weight", embedding}


def test_experts_with_mixed_dtypes_use_widest_dtype(moe: PreTrainedModel) -> None:
    adapter = moe.state_dict_adapter
    experts = dict(adapter.convert_single_tensor_to_hf(EXPERTS_GATE_UP, moe.get_parameter(EXPERTS_GATE_UP).detach()))
    for wide in (0, -1):
        given = {name: tensor.bfloat16() for name, tensor in experts.items()}
        name = list(given)[wide]
        given[name] = experts[name]
        (own,) = adapter.from_hf(given, strict=False).values()
        assert own.dtype == torch.float32
        back = dict(adapter.convert_single_tensor_to_hf(EXPERTS_GATE_UP, own))
        assert_same(back, {name: tensor.float() for name, tensor in given.items()})


def test_meta_tensors(adapter: StateDictAdapter, tensors: Tensors) -> None:
    own = adapter.from_hf({name: tensor.to("meta") for name, tensor in tensors.items()})
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in adapter.specs.items()
    }
    assert all(tensor.is_meta for tensor in adapter.to_hf(own).values())


# Gradients and optimizer states


def trained(model: PreTrainedModel, input_ids: torch.Tensor, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        step(model, optimizer, input_ids)
    return optimizer


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, input_ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
    optimizer.step()


def states(model: PreTrainedModel, optimizer: torch.optim.Optimizer, key: str) -> Tensors:
    return {name: optimizer.state[parameter][key] for name, parameter in model.named_parameters()}


@pytest.fixture
def pair(llama_config: LlamaConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return transformers' model and ours in fp64, because Adam divides by its second moment and amplifies rounding."""
    llama_config.num_hidden_layers = 1
    reference = new_model(llama_config, dtype=torch.float64)
    return reference, nrl_model(reference)


def test_optimizer_state_conversion(pair: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor) -> None:
    reference, model = pair
    optimizers = [trained(model, input_ids) for model in pair]
    for key in ("exp_avg", "exp_avg_sq"):
        expected, own = states(reference, optimizers[0], key), states(model, optimizers[1], key)
        back = model.state_dict_adapter.from_hf(expected, strict=False)
        torch.testing.assert_close(back, own, atol=1e-9, rtol=1e-6)
        for layout in LAYOUTS:
            mapped = model.state_dict_adapter.to_hf(own, layout=layout)
            torch.testing.assert_close(mapped, expected, atol=1e-9, rtol=1e-6)
            assert storages(mapped) <= storages(own)


def test_training_continues_from_converted_optimizer_state(
    pair: tuple[PreTrainedModel, PreTrainedModel], input_ids: torch.Tensor
) -> None:
    reference, model = pair
    optimizer = trained(reference, input_ids)
    adapter = model.state_dict_adapter
    model.load_state_dict(reference.state_dict())
    continued = trained(model, input_ids, steps=0)
    mapped = {key: adapter.from_hf(states(reference, optimizer, key)) for key in ("exp_avg", "exp_avg_sq")}
    for name, parameter in model.named_parameters():
        continued.state[parameter] = {key: value[name].clone() for key, value in mapped.items()}
        continued.state[parameter]["step"] = torch.tensor(2.0)
    for trained_model, model_optimizer in ((reference, optimizer), (model, continued)):
        step(trained_model, model_optimizer, input_ids)
    exported = adapter.to_hf(model.state_dict(), layout="transformers")
    torch.testing.assert_close(exported, dict(reference.state_dict()), atol=1e-9, rtol=1e-6)


# Errors


def from_hf_problems(adapter: StateDictAdapter, tensors: Tensors, **options: Any) -> set[tuple[str, str]]:
    with pytest.raises(StateDictError, match="state dict does not fit the model") as caught:
        adapter.from_hf(tensors, **options)
    return problems(caught.value)


def test_from_hf_error_lists_all_problems(adapter: StateDictAdapter, tensors: Tensors) -> None:
    up = "model.layers.0.mlp.up_proj.weight"
    missing = {PARTS[1], "model.norm.weight", "model.layers.1.mlp.up_proj.bias"}
    for name in missing:
        del tensors[name]
    tensors[up] = tensors[up][:, :-1]
    unexpected = {"model.layers.2.mlp.up_proj.weight", f"{ATTENTION}.qkv_proj.weight"}
    tensors |= {name: torch.ones(1) for name in unexpected}
    assert from_hf_problems(adapter, tensors) == {
        ("shape", up),
        *(("missing", name) for name in missing),
        *(("unexpected", name) for name in unexpected),
    }


def test_unexpected_name_raises_without_strict(adapter: StateDictAdapter) -> None:
    assert from_hf_problems(adapter, {"rotary": torch.ones(1)}, strict=False) == {("unexpected", "rotary")}


def test_missing_experts_are_listed(moe: PreTrainedModel) -> None:
    tensors = moe.state_dict_adapter.to_hf(moe.state_dict())
    gone = [
        "model.layers.0.block_sparse_moe.experts.1.w3.weight",
        "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    ]
    for name in gone:
        del tensors[name]
    for strict in (True, False):
        with pytest.raises(StateDictError) as caught:
            moe.state_dict_adapter.from_hf(tensors, strict=strict)
        (problem,) = caught.value.problems
        assert problem.kind == "partial"
        assert set(re.findall(r"\S+experts\.\d\.w\d\.weight", problem.detail)) == set(gone)


def test_mixed_layouts_load_and_duplicates_raise(moe: PreTrainedModel) -> None:
    adapter, own = moe.state_dict_adapter, moe.state_dict()
    hub, stacked = adapter.to_hf(own), adapter.to_hf(own, layout="transformers")
    first = {name: tensor for name, tensor in hub.items() if "layers.0" in name}
    mixed = first | {name: tensor for name, tensor in stacked.items() if "layers.0" not in name}
    assert_same(adapter.from_hf(mixed), own)
    twice = mixed | {"model.layers.0.mlp.experts.down_proj": stacked["model.layers.0.mlp.experts.down_proj"]}
    ((kind, subject),) = from_hf_problems(adapter, twice)
    assert kind == "duplicated"
    assert subject.endswith("model.layers.0.mlp.experts.down_proj")


def test_to_hf_with_tensors_of_another_model_raises(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    own = dict(model.state_dict())
    own |= {"other": torch.ones(1), PARTS[0]: own[PARTS[0]][1:], "model.norm.weight": torch.ones(())}
    with pytest.raises(StateDictError, match="state dict is not this model's") as caught:
        adapter.to_hf(own)
    assert problems(caught.value) == {
        ("unexpected", "other"),
        ("shape", PARTS[0]),
        ("shape", "model.norm.weight"),
    }


# One tensor


def test_convert_single_tensor_splits_experts(moe: PreTrainedModel) -> None:
    # NeMo RL's refit and LoRA sync call this method. Without it they fall back to the Hugging Face model.
    tensor = torch.randn(moe.get_parameter(EXPERTS_GATE_UP).shape, dtype=torch.float64)
    width = tensor.shape[1] // 2
    converted = moe.state_dict_adapter.convert_single_tensor_to_hf(EXPERTS_GATE_UP, tensor)
    expected = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": tensor[expert, rows]
        for expert in range(4)
        for name, rows in (("w1", slice(0, width)), ("w3", slice(width, None)))
    }
    assert_same(dict(converted), expected)
    assert all(part.data_ptr() == expected[name].data_ptr() for name, part in converted)


@layouts
@pytest.mark.parametrize("name", CONFIGS)
def test_convert_single_tensor_matches_to_hf(name: str, layout: Any) -> None:
    adapter = adapter_for(CONFIGS[name]())
    own = {key: torch.randn(spec.shape) for key, spec in adapter.specs.items()}
    one_by_one = [pair for key in own for pair in adapter.convert_single_tensor_to_hf(key, own[key], layout=layout)]
    assert len(dict(one_by_one)) == len(one_by_one)
    assert_same(dict(one_by_one), adapter.to_hf(own, layout=layout))


def test_convert_single_tensor_of_another_model_raises(adapter: StateDictAdapter) -> None:
    for name, kind in (("other", "unexpected"), (PARTS[1], "shape")):
        with pytest.raises(StateDictError) as caught:
            adapter.convert_single_tensor_to_hf(name, torch.ones(256, 256))
        assert problems(caught.value) == {(kind, name)}


# Layouts that are not views


@since("5.9")
def test_packed_hub_tensors_round_trip() -> None:
    model = packed_model()
    adapter, own = model.state_dict_adapter, model.state_dict()
    exported, stacked = adapter.to_hf(own), adapter.to_hf(own, layout="transformers")
    packed = exported[f"{ATTENTION}.packed.weight"]
    assert torch.equal(packed, torch.cat([stacked[name] for name in PARTS]))
    assert not set(PARTS) & set(exported)
    assert_same(adapter.from_hf(exported), own)
    assert_same(adapter.from_hf(stacked), own)
    assert_same(dict(adapter.iter_export(model)), exported)
    assert_same(dict(adapter.iter_export(model, 300_000)), exported)
    assert f"{ATTENTION}.packed.weight" not in adapter.hf_views(model)  # combines three parameters, so it is not a view


@since("5.9")
def test_convert_single_part_of_packed_tensor_raises() -> None:
    model = packed_model()
    adapter, own = model.state_dict_adapter, model.state_dict()
    with pytest.raises(ValueError, match=r"packed\.weight is made of .*q_proj.*k_proj.*v_proj.*convert them together"):
        adapter.convert_single_tensor_to_hf(PARTS[1], own[PARTS[1]])
    assert [
        name for name, _ in adapter.convert_single_tensor_to_hf(PARTS[1], own[PARTS[1]], layout="transformers")
    ] == [PARTS[1]]
    some = {name: own[name] for name in PARTS[:2]}
    assert adapter.to_hf(some) == {}


@since("5.9")
def test_permuted_rows_round_trip_as_copies() -> None:
    model = packed_model()
    adapter, own = model.state_dict_adapter, model.state_dict()
    exported = adapter.to_hf(own)
    given = own[f"{ATTENTION}.o_proj.weight"]
    out = exported[f"{ATTENTION}.out.weight"]
    assert torch.equal(out, given.view(8, 2, 16, 256).transpose(1, 2).reshape(256, 256))
    assert not torch.equal(out, given)
    assert out.untyped_storage().data_ptr() not in storages(own)
    assert f"{ATTENTION}.out.weight" not in adapter.hf_views(model)  # writing to the tensor would not change the model
    assert_same(adapter.from_hf(exported), own)


def test_conversion_with_arithmetic_raises() -> None:
    model = packed_model(device="meta")
    adapter = model.state_dict_adapter
    conversions = [WeightConverter("self_attn.out.weight", "self_attn.o_proj.weight", operations=[Double()])]
    with pytest.raises(NotAViewError, match="`mul` is not a view operation"):
        convert_layout(model, adapter.transformers, adapter.specs, conversions)


# A live model


def test_writes_to_hf_views_change_model(llama_config: LlamaConfig, input_ids: torch.Tensor) -> None:
    reference = new_model(llama_config).eval()
    model = AutoModelForCausalLM.from_config(llama_config).eval()
    views = model.state_dict_adapter.hf_views(model)
    assert views.keys() == reference.state_dict().keys()
    for name, view in views.items():
        assert not view.requires_grad
        view.copy_(reference.state_dict()[name])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, reference(input_ids).logits, atol=1e-5, rtol=1e-5)


def test_writes_to_expert_views_change_model(mixtral: PreTrainedModel) -> None:
    model = nrl_model(mixtral)
    for layout in LAYOUTS:
        for view in model.state_dict_adapter.hf_views(model, layout=layout).values():
            view.add_(1)
    expected = {name: tensor + 2 for name, tensor in mixtral.state_dict().items()}
    torch.testing.assert_close(model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers"), expected)


@pytest.mark.parametrize("max_bytes", [None, 1, 100_000, 1_000_000, 10**12])
@layouts
def test_export_plan_matches_iter_export(moe: PreTrainedModel, layout: Any, max_bytes: int | None) -> None:
    adapter = moe.state_dict_adapter
    stream = list(adapter.iter_export(moe, max_bytes, layout=layout))
    plan = adapter.export_plan(layout=layout)
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stream] == plan
    assert plan == adapter_for(moe.config).export_plan(layout=layout)  # known before weights exist
    assert_same(dict(stream), adapter.to_hf(moe.state_dict(), layout=layout))


def test_iter_export_without_buckets_returns_views(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    exported = dict(adapter.iter_export(model))
    assert storages(exported) <= storages(model.state_dict())
    assert not any(tensor.requires_grad for tensor in exported.values())


@pytest.fixture(scope="module")
def uneven() -> PreTrainedModel:
    """A bf16 model with tensor sizes that are not multiples of 16 bytes, and one fp32 tensor."""
    sizes = {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 101, "head_dim": 18}
    config = tiny_config(LlamaConfig, sizes | {"num_attention_heads": 2, "num_key_value_heads": 2})
    model = nrl_model(new_model(config, dtype=torch.bfloat16))
    model.model.norm.float()
    return model


@pytest.mark.parametrize("max_bytes", [1, 2_000, 7_777, 10**9])
def test_buckets_are_bounded_aligned_and_full(uneven: PreTrainedModel, max_bytes: int) -> None:
    adapter = uneven.state_dict_adapter
    stream = list(adapter.iter_export(uneven, max_bytes))
    assert_same(dict(stream), adapter.to_hf(uneven.state_dict()))
    assert {tensor.dtype for _, tensor in stream} == {torch.bfloat16, torch.float32}
    assert any(tensor.nbytes % 16 for _, tensor in stream)
    buckets = [
        [tensor for _, tensor in bucket]
        for _, bucket in groupby(stream, lambda item: item[1].untyped_storage().data_ptr())
    ]
    assert len({bucket[0].untyped_storage().data_ptr() for bucket in buckets}) == len(buckets)
    for bucket in buckets:
        size, end = bucket[0].untyped_storage().nbytes(), 0
        assert size <= max_bytes or len(bucket) == 1
        for tensor in bucket:
            start = tensor.storage_offset() * tensor.itemsize
            assert start % 16 == 0
            assert start >= end
            assert tensor.is_contiguous()
            end = start + tensor.nbytes
        assert end <= size < end + 16
    for bucket, following in pairwise(buckets):  # the next tensor would not have fit
        assert bucket[0].untyped_storage().nbytes() + following[0].nbytes > max_bytes


def test_bucket_can_be_filled_exactly(uneven: PreTrainedModel) -> None:
    adapter = uneven.state_dict_adapter
    sizes = [-(-tensor.nbytes // 16) * 16 for _, tensor in adapter.iter_export(uneven)]
    for max_bytes, count in ((sum(sizes[:3]), 3), (sum(sizes[:3]) - 1, 2)):
        stream = [tensor.untyped_storage() for _, tensor in adapter.iter_export(uneven, max_bytes)]
        assert sum(storage.data_ptr() == stream[0].data_ptr() for storage in stream) == count
        assert stream[0].nbytes() == sum(sizes[:count])


def test_bucket_is_a_copy(llama_config: LlamaConfig) -> None:
    model = AutoModelForCausalLM.from_config(llama_config)
    before = snapshot(model)
    for _, tensor in model.state_dict_adapter.iter_export(model, 100_000):
        tensor.zero_()
    assert_same(model.state_dict(), before)


def test_exported_tensor_outlives_iterator(adapter: StateDictAdapter, model: PreTrainedModel) -> None:
    (name, tensor), *_ = adapter.iter_export(model, 1_000_000)
    gc.collect()
    assert torch.equal(tensor, adapter.to_hf(model.state_dict())[name])


def test_second_export_has_updated_weights(llama_config: LlamaConfig, input_ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config)
    adapter = model.state_dict_adapter
    for max_bytes in (None, 200_000):
        before = {name: tensor.clone() for name, tensor in adapter.iter_export(model, max_bytes)}
        trained(model, input_ids, steps=1)
        after = dict(adapter.iter_export(model, max_bytes))
        assert not [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
        assert_same(after, adapter.to_hf(model.state_dict()))


EXPERTS = {
    "mixtral": (MixtralConfig, {}, 0, "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": (Qwen3MoeConfig, {"mlp_only_layers": [0]}, 1, "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_exported_as_separate_matrices(name: str) -> None:
    config_class, overrides, layer, where, (gate, up, down) = EXPERTS[name]
    reference = new_model(tiny_config(config_class, overrides))
    model = nrl_model(reference)
    exported = dict(model.state_dict_adapter.iter_export(model))
    stack = f"model.layers.{layer}.mlp.experts"
    gate_up = reference.state_dict()[f"{stack}.gate_up_proj"]
    downs = reference.state_dict()[f"{stack}.down_proj"]
    width = gate_up.shape[1] // 2
    expected = {}
    for expert in range(4):
        prefix = f"model.layers.{layer}.{where}.{expert}"
        expected[f"{prefix}.{gate}.weight"] = gate_up[expert, :width]
        expected[f"{prefix}.{up}.weight"] = gate_up[expert, width:]
        expected[f"{prefix}.{down}.weight"] = downs[expert]
    found = {key: tensor for key, tensor in exported.items() if f"layers.{layer}.{where}." in key}
    assert_same(found, expected)
    assert all(tensor.ndim == 2 for tensor in found.values())
    assert storages(found) <= storages(model.state_dict())
    assert not [key for key, tensor in exported.items() if tensor.ndim > 2]


def test_only_persistent_buffers_are_exported() -> None:
    reference = new_model(tiny_config(DeepseekV3Config))
    model = nrl_model(reference)
    persistent = {name for name in reference.state_dict() if name not in dict(reference.named_parameters())}
    assert persistent == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    exported = dict(model.state_dict_adapter.iter_export(model))
    assert persistent <= exported.keys()
    assert_same(exported, revert_weight_conversion(reference, dict(reference.state_dict())))
    assert not [name for name in exported if "inv_freq" in name]
    (name,) = persistent
    model.state_dict_adapter.hf_views(model)[name].fill_(7)
    assert model.get_buffer(name).eq(7).all()


def test_tied_weight_is_exported_once() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(Gemma3TextConfig))
    adapter = model.state_dict_adapter
    for names in (
        [name for name, *_ in adapter.export_plan()],
        list(dict(adapter.iter_export(model))),
        list(adapter.hf_views(model)),
    ):
        assert "model.embed_tokens.weight" in names
        assert "lm_head.weight" not in names
    assert "lm_head.weight" in adapter.to_hf(model.state_dict())  # as in transformers' state dict


@pytest.mark.usefixtures("sandbox")
def test_adapter_of_unregistered_architecture() -> None:
    config = RwkvConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=128)
    with pytest.warns(UserWarning, match="RwkvForCausalLM is not registered"):
        adapter = adapter_for(config)
    reference = RwkvForCausalLM(config)
    assert list(adapter.specs) == list(adapter.transformers) == list(reference.state_dict())
    assert_same(adapter.to_hf(reference.state_dict()), reference.state_dict())


@pytest.mark.parametrize("value", [3, None, [1.0]], ids=repr)
def test_non_tensor_values_raise(value: object) -> None:
    model = FamilyCase(registry.model_class("Qwen3MoeForCausalLM")).model()
    adapter, state_dict = model.state_dict_adapter, dict(model.state_dict())
    state_dict["model.norm.weight"] = value  # type: ignore[assignment]
    for call in (adapter.to_hf, adapter.from_hf):
        with pytest.raises(StateDictError, match=rf"model\.norm\.weight: is a {type(value).__name__}, expected"):
            call(state_dict)
    with pytest.raises(UnknownArgumentError, match="max_bytes='1GB': expected a whole number of bytes"):
        next(adapter.iter_export(model, max_bytes="1GB"))
    tensors = list(model.state_dict().items())
    for again in (tensors[0], next(pair for pair in tensors if "experts" in pair[0])):
        with pytest.raises(StateDictError, match=rf"duplicated: {again[0]}: came before"):
            list(adapter.iter_to_hf([again, *tensors]))
