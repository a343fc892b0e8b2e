"""Wrappers do not change names in plans, exports, files, adapters and sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, stored
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from nrl_models import StateDictError, export_adapter, registry
from nrl_models.adapters.hub_stream import HubStream, unwrapped
from nrl_models.common.modules import own_modules
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.testing.case import FamilyCase

Tensors = dict[str, torch.Tensor]

CASE = FamilyCase(registry.model_class("MixtralForCausalLM"), tiny={"tie_word_embeddings": True})
"""A model with tied embeddings, and with experts that are stacked in memory but not on the hub."""


@pytest.fixture(scope="module")
def exported() -> Tensors:
    """The export of the model without wrappers."""
    model = CASE.model()
    return {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """Initialize gloo with one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def checkpointed(model: Any, wrapper: Callable[[nn.Module], nn.Module] = checkpoint_wrapper) -> Any:
    apply_activation_checkpointing(model, wrapper, lambda module: isinstance(module, MixtralDecoderLayer))
    return model


def with_compiled_layers(model: Any) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = compiled(layer)
    return model


def with_compiled_parts(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn, layer.mlp.experts = compiled(layer.self_attn), checkpoint_wrapper(compiled(layer.mlp.experts))
    return model


def with_compiled_base(model: Any) -> Any:
    model.model = compiled(model.model)
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def with_wrapped_ties(model: Any) -> Any:
    model.model.embed_tokens, model.lm_head = checkpoint_wrapper(model.model.embed_tokens), compiled(model.lm_head)
    return model


def with_two_wrappers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp = offload_wrapper(checkpoint_wrapper(layer.mlp))
        layer.self_attn.o_proj = compiled(layer.self_attn.o_proj)
    return model


def fully_sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flattened(model: Any, use_orig_params: bool = False) -> Any:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({MixtralDecoderLayer}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


INNER_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "activation checkpointing": checkpointed,
    "offloading": lambda model: checkpointed(model, offload_wrapper),
    "compiled layers": with_compiled_layers,
    "compiled parts": with_compiled_parts,
    "compiled base model": with_compiled_base,
    "compiled checkpoints": lambda model: with_compiled_layers(checkpointed(model)),
    "wrapped tied weights": with_wrapped_ties,
    "two wrappers": with_two_wrappers,
}
"""Wrappers inside a model."""

OUTER_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "checkpointed": checkpoint_wrapper,
    "DDP": DistributedDataParallel,
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "fully_shard": fully_sharded,
    "fully_shard of checkpoints": lambda model: fully_sharded(checkpointed(model)),
    "FSDP1": flattened,
    "FSDP1 of original parameters": lambda model: flattened(model, use_orig_params=True),
}
"""Wrappers around a model, or around all of its parameters."""


@pytest.mark.long
@pytest.mark.parametrize("name", [*INNER_WRAPPERS, *OUTER_WRAPPERS])
@pytest.mark.parametrize("is_early", [True, False], ids=["adapter before", "adapter after"])
@pytest.mark.usefixtures("world")
def test_wrapped_model_exports_unwrapped_names(name: str, is_early: bool, exported: Tensors) -> None:
    model = copy.deepcopy(CASE.model())
    adapter = model.state_dict_adapter if is_early else None
    wrapped = (INNER_WRAPPERS | OUTER_WRAPPERS)[name](model)
    adapter = adapter or model.state_dict_adapter
    assert [plan for plan, *_ in adapter.export_plan()] == list(exported)
    for options in ({}, {"max_bytes": 2**14}):
        exported_tensors = {key: tensor.clone() for key, tensor in adapter.iter_export(wrapped, **options)}
        assert list(exported_tensors) == list(exported)
        assert_same(exported_tensors, exported)
    assert_same(dict(export_adapter(wrapped).iter_export(wrapped)), exported)
    assert unwrapped(wrapped) is model


@pytest.mark.parametrize("name", INNER_WRAPPERS)
def test_wrapped_model_saves_and_loads_unwrapped_names(name: str, exported: Tensors, tmp_path: Path) -> None:
    model = INNER_WRAPPERS[name](copy.deepcopy(CASE.model()))
    for number, state_dict in enumerate((None, model.state_dict(), CASE.model().state_dict())):
        model.save_pretrained(tmp_path / str(number), state_dict=state_dict)
        assert_same(stored(tmp_path / str(number)), exported)
    assert_same({key: model.state_dict_adapter.to_hf(model.state_dict())[key] for key in exported}, exported)
    assert_same(dict(model.state_dict_adapter.hf_views(model)), exported)
    for state_dict in (exported, CASE.model().state_dict()):
        for parameter in model.parameters():
            parameter.data.zero_()
        assert not model.load_state_dict(state_dict, strict=False).unexpected_keys
        assert_same(dict(model.state_dict_adapter.iter_export(model)), exported)
    unwrapped_names = [key for key, _ in CASE.model().named_modules()]
    assert [key for key, _ in own_modules(model)] == unwrapped_names


@pytest.mark.parametrize("name", INNER_WRAPPERS)
@pytest.mark.usefixtures("world")
def test_sharding_of_wrapped_model(name: str, exported: Tensors, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    model = INNER_WRAPPERS[name](copy.deepcopy(CASE.model()))
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    assert_same(dict(model.state_dict_adapter.iter_export(model)), exported)
    model.save_pretrained(tmp_path / "saved")
    assert_same(stored(tmp_path / "saved"), exported)
    save_checkpoint(tmp_path / "resume", model, optimizer)
    for parameter in model.parameters():
        parameter.data.zero_()
    load_checkpoint(tmp_path / "resume", model, optimizer)
    assert_same(dict(model.state_dict_adapter.iter_export(model)), exported)


@pytest.mark.parametrize("name", ["activation checkpointing", "compiled layers", "compiled base model", "compiled"])
@pytest.mark.parametrize("is_first", [True, False], ids=["PEFT first", "PEFT last"])
def test_wrapped_model_with_adapters_exports_merged_weights(name: str, is_first: bool, exported: Tensors) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = copy.deepcopy(CASE.model())
    torch.manual_seed(0)
    if is_first:
        outer = get_peft_model(model, config)
        wrapped = (INNER_WRAPPERS | OUTER_WRAPPERS)[name](model)
        outer = outer if wrapped is model else compiled(outer)
    else:
        outer = get_peft_model((INNER_WRAPPERS | OUTER_WRAPPERS)[name](model), config)
    exported_tensors = {key: tensor.clone() for key, tensor in export_adapter(outer).iter_export(outer)}
    assert list(exported_tensors) == list(exported)
    changed = {key for key in exported_tensors if not torch.equal(exported_tensors[key], exported[key])}
    assert changed == {key for key in exported if "q_proj" in key}


def with_checkpointed_lora(model: Any) -> Any:
    for module in list(model.modules()):
        if hasattr(module, "q_proj"):
            module.q_proj = checkpoint_wrapper(module.q_proj)
    return model


def test_checkpointed_lora_linear_exports_merged_weights(exported: Tensors) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(CASE.model()), config)
    expected = {name: tensor.clone() for name, tensor in export_adapter(model).iter_export(model)}
    assert not torch.equal(*(each["model.layers.0.self_attn.q_proj.weight"] for each in (expected, exported)))
    assert_same(dict(export_adapter(with_checkpointed_lora(model)).iter_export(model)), expected)


@pytest.mark.parametrize(
    "wrap", [compiled, nn.DataParallel, nn.Sequential, lambda model: nn.Sequential(compiled(model))],
    ids=["compiled", "DataParallel", "module", "module of compiled"],
)  # fmt: skip
def test_wrapper_of_model_loads_prefixed_hub_names(wrap: Callable[[Any], Any], exported: Tensors) -> None:
    """Hub names below the wrapper's prefix load. Names without it are reported, as torch does, and change nothing."""
    model = copy.deepcopy(CASE.model())
    wrapper = wrap(model)
    prefix = next(name for name in wrapper.state_dict() if name.endswith("model.embed_tokens.weight"))
    prefix = prefix.removesuffix("model.embed_tokens.weight")
    for parameter in model.parameters():
        parameter.data.zero_()
    result = wrapper.load_state_dict(exported, strict=False)
    assert set(result.unexpected_keys) == set(exported)
    assert not any(parameter.any() for parameter in model.parameters())
    result = wrapper.load_state_dict({f"{prefix}{name}": tensor for name, tensor in exported.items()}, strict=False)
    assert not result.unexpected_keys
    assert_same(dict(model.state_dict_adapter.iter_export(model)), exported)


@pytest.mark.parametrize("name", ["activation checkpointing", "compiled layers", "DDP of compiled"])
@pytest.mark.usefixtures("world")
def test_hub_stream_accepts_wrapped_parameter_names(name: str, exported: Tensors) -> None:
    model = copy.deepcopy(CASE.model())
    stream = HubStream(model)
    wrapped = (INNER_WRAPPERS | OUTER_WRAPPERS)[name](model)
    state_dict = {key.removeprefix("module."): tensor for key, tensor in wrapped.state_dict().items()}
    assert_same(dict(stream(state_dict.items(), wrapped)), exported)


def merged_in_place(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge adapters and yield the base model's parameters, as TRL's `VLLMGeneration` does."""
    model.merge_adapter()
    for name, parameter in model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if not any(part in name for part in (model.prefix, "original_module", "trainable_tokens_")):
            yield name.replace("modules_to_save.default.", "").replace("token_adapter.", ""), parameter.data
    model.unmerge_adapter()


def with_changed_adapters(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = get_peft_model(copy.deepcopy(CASE.model()), LoraConfig(r=2, init_lora_weights=False, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ],
    ids=str,
)
def test_adapters_on_tied_weights_merged_in_place_raise(options: dict[str, Any]) -> None:
    model = with_changed_adapters(**options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateDictError, match=r"lm_head\.weight: is tied to model\.embed_tokens\.weight, and trainers"):
        next(HubStream(CASE.model())(merged_in_place(model), model))
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [1, 5]},
    ],
    ids=str,
)
def test_adapters_merged_in_place_equal_export(options: dict[str, Any]) -> None:
    model = with_changed_adapters(target_modules=["q_proj"], **options)
    expected = {name: tensor.clone() for name, tensor in export_adapter(model).iter_export(model)}
    streamed = {name: tensor.clone() for name, tensor in HubStream(CASE.model())(merged_in_place(model), model)}
    assert_same(streamed, expected)


@pytest.mark.usefixtures("world")
def test_saving_flattened_model_raises(tmp_path: Path) -> None:
    model = copy.deepcopy(CASE.model())
    wrapped = flattened(model)
    for call in (lambda: dict(model.state_dict_adapter.iter_export(model)), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(StateDictError, match="pass the FullyShardedDataParallel module"):
            call()
    model.save_pretrained(tmp_path / "saved", state_dict=wrapped.state_dict())
    assert stored(tmp_path / "saved").keys() == {name for name, *_ in model.state_dict_adapter.export_plan()}


@pytest.mark.parametrize("name", ["FSDP1", "FSDP1 of original parameters"])
@pytest.mark.usefixtures("world")
def test_flattened_model_loads_hub_names(name: str, exported: Tensors) -> None:
    model = copy.deepcopy(CASE.model())
    wrapped = OUTER_WRAPPERS[name](model)
    new = {key: tensor * 2 for key, tensor in exported.items()}
    assert not wrapped.load_state_dict(new, strict=False).unexpected_keys
    assert_same(dict(model.state_dict_adapter.iter_export(wrapped)), new)
    part = next(key for key in new if ".experts.1." in key)
    with pytest.raises(RuntimeError, match="fill only a part of"):
        wrapped.load_state_dict({part: new[part]}, strict=False)
    assert_same(dict(model.state_dict_adapter.iter_export(wrapped)), new)
    wrapped.load_state_dict(wrapped.state_dict())


@pytest.mark.usefixtures("world")
def test_weights_untied_by_fully_shard_are_exported_and_saved(tmp_path: Path) -> None:
    """It replaces the parameter in the module that it shards, but not in the tied module."""
    model = copy.deepcopy(CASE.model())
    fully_shard(model.model.embed_tokens, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert "lm_head.weight" in dict(model.state_dict_adapter.iter_export(model))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "saved")
    assert "lm_head.weight" in stored(tmp_path / "saved")
