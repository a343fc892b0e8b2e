"""The weights that unmodified TRL sends after `send_hub_tensors` was called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved import Receiver, assert_same_bytes, case_of, each_architecture, hook_of, saved_by_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

vllm_generation = pytest.importorskip("trl.generation.vllm_generation", reason="needs TRL: make test-trainers")

from accelerate import Accelerator  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from trl.distributed import DistributedBackend  # noqa: E402
from trl.experimental.async_distillation.async_distillation_trainer import AsyncDistillationTrainer  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, _iter_vllm_named_params  # noqa: E402
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient  # noqa: E402

from nrl_models.adapters import trl  # noqa: E402
from nrl_models.errors import TrainerError, UnknownArgumentError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")

EXPERTS, DENSE = "Qwen3MoeForCausalLM", "LlamaForCausalLM"
IMAGES, CORRECTED = "Gemma3ForConditionalGeneration", "DeepseekV3ForCausalLM"


class Server:
    """The client of a vLLM server. Stores the received tensors, and compares them with the announced metadata."""

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named: Iterator[Any]) -> None:
        self.receiver = Receiver()
        for (name, dtype, shape), (sent, tensor) in zip(metadata, named, strict=True):
            assert (name, dtype, shape) == (sent, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            assert tensor.is_contiguous()
            self.receiver.load_weights([(sent, tensor)])

    def reset_prefix_cache(self) -> None:
        """Do nothing, because nothing is cached."""


class Transfer(WeightTransferClient):
    """TRL's asynchronous client, connected to `Server`. TRL's attribute contains the metadata."""

    def __init__(self, model: nn.Module) -> None:
        metadata: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
        for name, parameter in _iter_vllm_named_params(model):  # as in the trainer's `__init__`
            metadata["names"].append(name)
            metadata["dtype_names"].append(str(parameter.dtype).removeprefix("torch."))
            metadata["shapes"].append(list(parameter.shape))
        self._weight_update_info = metadata
        self.server = Server()

    def send_weights(self, iterator: Iterator[Any]) -> None:
        info = self._weight_update_info
        metadata = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        self.server.update_named_params(metadata, iterator)

    def pause(self) -> None:
        """Do nothing, because there is no engine."""

    def resume(self) -> None:
        """Do nothing, because there is no engine."""


def synchronous(model: nn.Module, mode: str, receiver: Any) -> Any:
    """Create a trainer with TRL's generation, but without vLLM: `sync_weights` and everything it calls are TRL's."""
    generation = vllm_generation.VLLMGeneration.__new__(vllm_generation.VLLMGeneration)
    generation.model, generation.mode, generation.accelerator = model, mode, Accelerator(cpu=True)
    generation._dist = DistributedBackend(generation.accelerator)
    generation._weight_metadata, generation.enable_sleep_mode = None, False
    generation.vllm_client = receiver
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=receiver))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
    generation.llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)
    return SimpleNamespace(vllm_generation=generation)


def asynchronous(model: nn.Module, kind: type[Any]) -> Any:
    """Create an asynchronous trainer that only syncs weights."""
    trainer = kind.__new__(kind)
    trainer.model, trainer.accelerator, trainer.weight_transfer = model, Accelerator(cpu=True), Transfer(model)
    trainer._lora_sync, trainer.model_version, trainer.rollout_worker = False, 0, None
    return trainer


def colocated_sync(model: nn.Module, hook: Callable[[Any], None] = trl.send_hub_tensors) -> dict[str, torch.Tensor]:
    receiver = Receiver()
    trainer = synchronous(model, "colocate", receiver)
    hook(trainer)
    trainer.vllm_generation.sync_weights()
    return receiver.tensors


def server_sync(model: nn.Module, hook: Callable[[Any], None] = trl.send_hub_tensors) -> dict[str, torch.Tensor]:
    trainer = synchronous(model, "server", server := Server())
    hook(trainer)
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.sync_weights()  # the second call uses the metadata of the first
    return server.receiver.tensors


def asynchronous_sync(model: nn.Module, hook: Callable[[Any], None] = trl.send_hub_tensors) -> dict[str, torch.Tensor]:
    for kind in (AsyncDistillationTrainer, AsyncGRPOTrainer):
        trainer = asynchronous(model, kind)
        hook(trainer)
        trainer._sync_weight_merged(0.0)
    return trainer.weight_transfer.server.receiver.tensors


PATHS = {"colocated": colocated_sync, "server": server_sync, "asynchronous": asynchronous_sync}
each_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


@each_architecture
def test_sent_weights_match_transformers_files(name: str) -> None:
    case = case_of(name)
    saved = saved_by_transformers(case.reference())
    model = case.model()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for path in PATHS.values():
        for parameter in frozen:  # asynchronous trainers do not send these
            parameter.requires_grad_(path is asynchronous_sync and parameter.is_floating_point())
        assert_same_bytes(path(model), saved)


@each_path
def test_naming_error_is_detected(path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(EXPERTS)
    saved = saved_by_transformers(case.reference())
    original = trl.HubStream.__call__

    def wrong(self: Any, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for name, tensor in original(self, *args):
            part = next((part for part in swapped if f".experts.1.{part}." in name), "-")
            yield name.replace(part, swapped.get(part, part)), tensor

    monkeypatch.setattr(trl.HubStream, "__call__", wrong)
    with pytest.raises(AssertionError, match=r"experts\.1\.(gate|up)_proj"):
        assert_same_bytes(path(case.model()), saved)


@each_path
@pytest.mark.parametrize("name", [EXPERTS, IMAGES, CORRECTED])
def test_names_without_hook_differ_from_hub(path: Any, name: str) -> None:
    case = case_of(name)
    sent = path(case.model(), lambda trainer: None)
    assert sent.keys() != saved_by_transformers(case.reference()).keys()


@each_path
def test_current_weights_are_sent(path: Any) -> None:
    """The model is trained between two updates, so the hook must not store tensors."""
    model = copy.deepcopy(case_of(EXPERTS).model())
    before = path(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    after = path(model)
    assert all(torch.equal(after[name], 2 * tensor) for name, tensor in before.items())


@each_path
def test_adapters_are_merged_and_unmerged(path: Any) -> None:
    model = copy.deepcopy(case_of(EXPERTS).model())
    before = model.state_dict_adapter.to_hf(copy.deepcopy(model.state_dict()))
    target = "model.layers.0.self_attn.q_proj"
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    layer = tuned.get_submodule(f"base_model.model.{target}")
    merged = layer.base_layer.weight + layer.get_delta_weight("default")
    sent = path(tuned)
    assert sent.keys() == before.keys()
    assert torch.equal(sent[f"{target}.weight"], merged)
    unchanged = {name for name, tensor in before.items() if torch.equal(sent[name], tensor)}
    assert before.keys() - unchanged == {name for name in before if name.endswith("q_proj.weight")}
    assert not layer.merged


@pytest.mark.parametrize("path", [colocated_sync, asynchronous_sync])
@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_sharded_parameters_are_gathered(path: Any, name: str, one_process: None, monkeypatch: Any) -> None:
    case = case_of(name)
    model: Any = copy.deepcopy(case.model())
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    monkeypatch.setattr(DistributedBackend, "fsdp_version", property(lambda self: 2, lambda *_: None), raising=False)
    assert_same_bytes(path(model), saved_by_transformers(case.reference()))


@pytest.mark.parametrize("path", [colocated_sync, server_sync])
def test_frozen_parameters_are_sent(path: Any) -> None:
    case = case_of(IMAGES)
    model = copy.deepcopy(case.model())
    model.requires_grad_(False)
    assert_same_bytes(path(model), saved_by_transformers(case.reference()))


def test_asynchronous_trainers_send_trainable_weights() -> None:
    model = copy.deepcopy(case_of(IMAGES).model())
    model.model.vision_tower.requires_grad_(False)
    sent = asynchronous_sync(model)
    saved = saved_by_transformers(case_of(IMAGES).reference())
    assert sent.keys() == {name for name in saved if "vision_tower" not in name} != saved.keys()


def test_transformers_model() -> None:
    case = case_of(EXPERTS)
    reference: PreTrainedModel = case.reference()
    assert_same_bytes(colocated_sync(reference), saved_by_transformers(reference))


def test_documented_hook() -> None:
    case = case_of(EXPERTS)
    sent = colocated_sync(case.model(), lambda trainer: exec(hook_of("trl"), {"trainer": trainer}))
    assert_same_bytes(sent, saved_by_transformers(case.reference()))


def test_trainer_without_vllm_raises() -> None:
    lora_only = SimpleNamespace(_streaming_iter=None, _lora_sync=True)
    for trainer in (SimpleNamespace(), SimpleNamespace(vllm_generation=None), lora_only):
        with pytest.raises(UnknownArgumentError, match="sends vLLM no weights: expected use_vllm=True"):
            trl.send_hub_tensors(trainer)


def test_unsupported_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.registry.version", lambda name: "1.17.0")
    with pytest.raises(TrainerError, match=r"needs trl<1\.17,>=1\.16; 1\.17\.0 is installed"):
        trl.send_hub_tensors(synchronous(case_of(DENSE).model(), "server", Server()))
