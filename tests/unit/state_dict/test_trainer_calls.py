"""Adapter calls of NeMo RL and NeMo AutoModel, with the keywords they pass."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, problems
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from nrl_models import AutoModelForCausalLM, StateDictAdapter, StateDictError
from nrl_models.common.views.trainer_options import WITHOUT_EFFECT
from nrl_models.errors import ShardingError, UnknownArgumentError
from nrl_models.families.baichuan.model import BaichuanForCausalLM
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

EXPERTS = "model.layers.1.mlp.experts"
EXTRA_STATE = r".*_extra_state.*"  # both always pass it
MODULE_STATE = "model.layers.0.self_attn._extra_state"

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def moe() -> PreTrainedModel:
    """A model with experts, which the hub stores one by one. Do not change it."""
    return AutoModelForCausalLM.from_config(tiny_config(Qwen3MoeConfig), dtype=torch.float32)


@pytest.fixture(scope="module")
def adapter(moe: PreTrainedModel) -> StateDictAdapter:
    return moe.state_dict_adapter


@pytest.fixture
def calls(moe: PreTrainedModel, adapter: StateDictAdapter) -> list[Call]:
    """Conversion methods that accept the trainers' keywords. All return the same result for the complete model."""
    own = moe.state_dict()

    def one_by_one(**keywords: Any) -> dict[str, torch.Tensor]:
        return {
            hub: part
            for name, tensor in own.items()
            for hub, part in adapter.convert_single_tensor_to_hf(name, tensor, **keywords)
        }

    return [one_by_one, lambda **keywords: adapter.to_hf(own, **keywords)]


def test_nemo_rl_conversion_call(moe: PreTrainedModel, adapter: StateDictAdapter) -> None:
    exported = {
        hub: part
        for name, tensor in moe.state_dict().items()
        for hub, part in adapter.convert_single_tensor_to_hf(
            name, tensor, exclude_key_regex=EXTRA_STATE, quantization=False
        )
    }
    assert f"{EXPERTS}.0.gate_proj.weight" in exported
    assert_same(exported, adapter.to_hf(moe.state_dict()))


def test_nemo_automodel_conversion_calls(moe: PreTrainedModel, adapter: StateDictAdapter) -> None:
    own = moe.state_dict()
    saved = adapter.to_hf(
        own,
        exclude_key_regex=EXTRA_STATE,
        quantization=False,
        device_mesh=None,
        v4_compatible=True,
        legacy_paramwrapper_layout=True,
    )
    assert_same(saved, adapter.to_hf(own))
    loading = adapter.to_hf(own, exclude_key_regex=EXTRA_STATE, device_mesh=None, for_checkpoint_load=True)
    storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in loading.values()} <= storages  # files are read into these
    assert_same(adapter.from_hf(saved, device_mesh=None), own)
    adapter._paramwrapper_layout_hint = None  # set before each from_hf


def test_exclude_key_regex(calls: list[Call], adapter: StateDictAdapter) -> None:
    for call in calls:
        everything = call()
        left = call(exclude_key_regex=r".*\.experts\.0\.|lm_head")
        assert left.keys() == {key for key in everything if ".experts.0." not in key and key != "lm_head.weight"}
        # Patterns match from the start of a name, as in their code.
        assert call(exclude_key_regex="experts").keys() == everything.keys()


def test_extra_state_is_excluded_or_raises(moe: PreTrainedModel, adapter: StateDictAdapter) -> None:
    own, state = moe.state_dict(), torch.zeros(3)
    assert_same(adapter.to_hf(own | {MODULE_STATE: state}, exclude_key_regex=EXTRA_STATE), adapter.to_hf(own))
    assert adapter.convert_single_tensor_to_hf(MODULE_STATE, state, exclude_key_regex=EXTRA_STATE) == []
    for convert in (
        lambda: adapter.to_hf(own | {MODULE_STATE: state}),
        lambda: adapter.convert_single_tensor_to_hf(MODULE_STATE, state),
    ):
        with pytest.raises(StateDictError) as caught:
            convert()
        assert problems(caught.value) == {("unexpected", MODULE_STATE)}


def test_quantization_keyword_raises(calls: list[Call]) -> None:
    for call in calls:
        with pytest.raises(UnknownArgumentError, match="from_pretrained reads a quantized checkpoint"):
            call(quantization=True)


def test_unknown_keyword_raises(calls: list[Call]) -> None:
    for call in calls:
        with pytest.raises(
            UnknownArgumentError, match="unknown keyword other_layout: expected exclude_key_regex"
        ) as caught:
            call(other_layout=True)
        assert all(known in str(caught.value) for known in WITHOUT_EFFECT)


# Streaming


def test_iter_to_hf_matches_to_hf(moe: PreTrainedModel, adapter: StateDictAdapter) -> None:
    own = list(moe.state_dict().items())
    random.Random(0).shuffle(own)
    assert_same(dict(adapter.iter_to_hf(own)), adapter.to_hf(dict(own)))


def test_iter_to_hf_waits_for_all_parts() -> None:
    model = FamilyCase(BaichuanForCausalLM).model()
    adapter, own = model.state_dict_adapter, model.state_dict()
    assert any(len(tensor.parameters) == 3 for tensor in adapter.hub.values())
    assert_same(dict(adapter.iter_to_hf(own.items())), adapter.to_hf(own))
    part = "model.layers.0.self_attn.k_proj.weight"
    (packed,) = adapter.tensors_in(part, "hub")
    with pytest.raises(StateDictError, match="of which only") as caught:
        list(adapter.iter_to_hf((name, tensor) for name, tensor in own.items() if name != part))
    assert problems(caught.value) == {("partial", packed.name)}


# Sharded


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks. Only the first rank exists."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def shard(whole: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    local = whole.chunk(2, placement.dim)[0] if isinstance(placement, Shard) else whole
    return DTensor.from_local(local, mesh, [placement], shape=whole.shape, stride=whole.stride(), run_check=False)


@pytest.mark.parametrize(
    ("placement", "raises"),
    [(Replicate(), False), (Shard(2), False), (Shard(1), True), (Shard(0), True), (Partial(), True)],
    ids=str,
)
def test_sharded_tensor_conversion(
    adapter: StateDictAdapter, mesh: DeviceMesh, placement: Placement, raises: bool
) -> None:
    name = f"{EXPERTS}.gate_up_proj"  # dimensions: experts, then gate and up, then features
    whole = torch.randn(adapter.specs[name].shape)
    sharded = shard(whole, mesh, placement)
    for convert in (
        lambda: adapter.convert_single_tensor_to_hf(name, sharded),
        lambda: list(adapter.to_hf({name: sharded}).items()),
        lambda: list(adapter.iter_to_hf([(name, sharded)])),
    ):
        with CommDebugMode() as communication:
            if raises:
                with pytest.raises(ShardingError, match="full_tensor") as caught:
                    convert()
                assert {problem.subject for problem in caught.value.problems} == {name}
            else:
                expected = dict(adapter.convert_single_tensor_to_hf(name, whole))
                converted = dict(convert())
                assert converted.keys() == expected.keys()
                for hub, part in converted.items():
                    local = expected[hub].chunk(2, 1)[0] if placement == Shard(2) else expected[hub]
                    assert torch.equal(part.to_local(), local)
                    assert part.shape == expected[hub].shape
        assert communication.get_total_counts() == 0


def test_unsplit_sharded_tensors_are_returned_unchanged(adapter: StateDictAdapter, mesh: DeviceMesh) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    sharded = shard(torch.randn(adapter.specs[name].shape), mesh, Shard(0))
    assert adapter.to_hf({name: sharded})[name] is sharded
    assert adapter.from_hf({name: sharded}, strict=False)[name] is sharded


def test_from_hf_with_sharded_experts_raises(moe: PreTrainedModel, adapter: StateDictAdapter, mesh: DeviceMesh) -> None:
    state_dict = dict(adapter.to_hf(moe.state_dict()))
    expert = f"{EXPERTS}.1.up_proj.weight"
    state_dict[expert] = shard(state_dict[expert].clone(), mesh, Shard(0))
    with pytest.raises(ShardingError, match="cannot be joined") as caught:
        adapter.from_hf(state_dict)
    assert {problem.subject for problem in caught.value.problems} == {expert}


def test_from_hf_with_expert_mesh_raises(adapter: StateDictAdapter, mesh: DeviceMesh) -> None:
    whole = adapter.to_hf({name: torch.zeros(spec.shape) for name, spec in adapter.specs.items()})
    with pytest.raises(ShardingError, match="shards experts over 2 ranks"):
        adapter.from_hf(whole, device_mesh=mesh)
    unnamed = init_device_mesh("cpu", (2,))
    with pytest.raises(ShardingError, match="shards experts over 2 ranks"):
        adapter.from_hf(whole, device_mesh=unnamed)
    ep_shard_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep_shard", "ep"))
    assert adapter.from_hf(whole, device_mesh=ep_shard_mesh).keys() == adapter.specs.keys()


def test_dense_model_accepts_trainer_keywords() -> None:
    dense = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig), dtype=torch.float32)
    adapter, own = dense.state_dict_adapter, dense.state_dict()
    assert_same(adapter.to_hf(own, exclude_key_regex=EXTRA_STATE, quantization=False), own)


def test_invalid_argument_types_raise(adapter: StateDictAdapter) -> None:
    name = next(iter(adapter.specs))
    for value in (None, [name], {3: torch.ones(2)}):
        for call in (adapter.to_hf, adapter.from_hf):
            with pytest.raises(UnknownArgumentError, match="expected a mapping of names to tensors"):
                call(value)  # type: ignore[arg-type]
    for pairs in (None, [(name,)], ["ab"], [(3, torch.ones(2))], {name: torch.ones(2)}):
        with pytest.raises(UnknownArgumentError, match="expected pairs of name and tensor"):
            list(adapter.iter_to_hf(pairs))  # type: ignore[arg-type]
    for pattern in ("(", 3):
        for convert in (adapter.to_hf, partial(adapter.convert_single_tensor_to_hf, name)):
            with pytest.raises(UnknownArgumentError, match=rf"exclude_key_regex={re.escape(repr(pattern))}: exp"):
                convert({}, exclude_key_regex=pattern)  # type: ignore[operator]
