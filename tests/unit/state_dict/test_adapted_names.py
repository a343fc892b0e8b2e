"""`load_state_dict` of a model with PEFT adapters loads the base model's weights under the base model's names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from nrl_models import StateDictError, registry
from nrl_models.distributed import parallelize
from nrl_models.testing.case import FamilyCase

Tensors = dict[str, torch.Tensor]

MIXTRAL = FamilyCase(cast(Any, registry.model_class("MixtralForCausalLM")))

ADAPTER_PARTS = ("lora_", "modules_to_save", "trainable_tokens_")


def linears_of(model: nn.Module) -> list[str]:
    """Return the names of all linears that LoRA adapts.

    PEFT leaves out `out_proj` of Mamba models. In some mixtures, it uses the last part of each name as a suffix. The
    number of a linear in a sequence is also that of a layer.
    """
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return [name for name in linears if "out_proj" not in name and not name.rpartition(".")[2].isdigit()]


def with_lora(case: FamilyCase, **options: Any) -> PeftModel:
    """Return a model with random adapters, whose base weights are zero."""
    torch.manual_seed(0)
    # PEFT takes names in a list as suffixes, which other modules may have.
    targets = "|".join(map(re.escape, linears_of(case.model())))
    values: dict[str, Any] = {"r": 2, "target_modules": targets, "init_lora_weights": False} | options
    model: Any = get_peft_model(copy.deepcopy(case.model()), LoraConfig(**values))
    for name, tensor in model.state_dict().items():
        if not any(part in name for part in ADAPTER_PARTS):
            tensor.zero_()
    return model


def adapters_of(model: nn.Module) -> Tensors:
    state_dict = model.state_dict().items()
    return {name: tensor.clone() for name, tensor in state_dict if any(part in name for part in ADAPTER_PARTS)}


def hub_tensors(case: FamilyCase) -> Tensors:
    model = case.model()
    return model.state_dict_adapter.to_hf(model.state_dict())


def assert_loads(model: PeftModel, case: FamilyCase, prefix: str = "") -> None:
    """Load hub names in two parts. Check base weights and adapters."""
    before, hub = adapters_of(model), hub_tensors(case)
    target = model if prefix else model.get_base_model()
    for part in (sorted(hub)[::2], sorted(hub)[1::2]):
        result = target.load_state_dict({f"{prefix}{name}": hub[name] for name in part}, strict=False)
        assert not result.unexpected_keys
    assert_same(adapters_of(model), before)
    assert_same(model.unload().state_dict(), case.model().state_dict())


def test_hub_names_load_under_adapters(family_case: FamilyCase) -> None:
    if linears_of(family_case.model()):
        assert_loads(with_lora(family_case), family_case)


@pytest.mark.parametrize("prefix", ["", "base_model.model."], ids=["base model", "PeftModel"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_modules": ["lm_head"], "modules_to_save": ["self_attn"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "use_dora": True},
    ],
    ids=str,
)
def test_hub_names_load_under_adapters_of_experts_and_copies(options: dict[str, Any], prefix: str) -> None:
    assert_loads(with_lora(MIXTRAL, **options), MIXTRAL, prefix)


def compiled_layers(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")


def checkpointed_linears(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = checkpoint_wrapper(layer.self_attn.q_proj)


def compiled_base_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.base_layer = torch.compile(layer.self_attn.q_proj.base_layer, backend="eager")


@pytest.mark.parametrize("wrap", [compiled_layers, checkpointed_linears, compiled_base_layers])
def test_hub_names_load_into_wrapped_adapters(wrap: Callable[[Any], None]) -> None:
    model = with_lora(MIXTRAL)
    base = model.get_base_model()
    wrap(base)
    assert not base.load_state_dict(hub_tensors(MIXTRAL), strict=False).unexpected_keys
    expected = MIXTRAL.model().state_dict()
    actual = {name.replace("_orig_mod.", ""): tensor for name, tensor in base.state_dict().items()}
    actual = {name.replace(".base_layer", ""): tensor for name, tensor in actual.items() if "lora_" not in name}
    assert_same(actual, expected)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """Initialize gloo with one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: Any) -> Any:
    return parallelize(model, init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))


def flattened(model: Any) -> Any:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.parametrize("shard", [sharded, flattened])
@pytest.mark.parametrize("target_parameters", [None, ["experts.gate_up_proj"]], ids=["linears", "experts"])
@pytest.mark.usefixtures("world")
def test_hub_names_load_into_sharded_adapters(shard: Callable[[Any], Any], target_parameters: list[str] | None) -> None:
    model = with_lora(MIXTRAL, target_modules=["q_proj"], target_parameters=target_parameters).get_base_model()
    before, target = adapters_of(model), shard(model)
    assert not target.load_state_dict(hub_tensors(MIXTRAL), strict=False).unexpected_keys
    loaded = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in target.state_dict().items()
    }
    assert_same({name: loaded.pop(name) for name in before}, before)
    assert_same(
        {name.replace(".base_layer", ""): tensor for name, tensor in loaded.items()}, MIXTRAL.model().state_dict()
    )
    assert not any(target.load_state_dict(target.state_dict()))


def test_hub_names_load_under_two_adapters() -> None:
    model = with_lora(MIXTRAL, target_modules=["q_proj"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj", "q_proj"]))
    model.set_adapter("second")
    assert_loads(model, MIXTRAL)


def test_names_of_model_with_adapters_still_load() -> None:
    model = with_lora(MIXTRAL)
    state_dict = {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items()}
    assert not any(model.load_state_dict(state_dict))
    assert_same(model.state_dict(), state_dict)


def test_mismatched_weight_under_adapter_raises_without_changes() -> None:
    model = with_lora(MIXTRAL)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hub = hub_tensors(MIXTRAL)
    name = next(name for name in hub if "q_proj" in name)
    with pytest.raises(StateDictError, match=rf"{name}.*shape"):
        model.get_base_model().load_state_dict(hub | {name: hub[name].t()[:8]}, strict=False)
    assert_same(model.state_dict(), before)


def test_weights_under_merged_adapters_raise_without_changes() -> None:
    """PEFT subtracts the adapters from the weights when it unmerges them."""
    model = with_lora(MIXTRAL, target_modules=["q_proj"])
    model.merge_adapter()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateDictError, match=r"(?s)q_proj.*unmerge_adapter"):
        model.get_base_model().load_state_dict(hub_tensors(MIXTRAL), strict=False)
    assert_same(model.state_dict(), before)
    model.unmerge_adapter()
    assert_loads(model, MIXTRAL)
