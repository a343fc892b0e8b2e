"""Unmodified verl loads our classes with our module as `external_lib`, and rollouts receive hub tensors."""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved import Receiver, assert_same_bytes, case_of, each_architecture, hook_of, saved_by_transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import_utils = pytest.importorskip("verl.utils.import_utils", reason="needs verl: make test-trainers")

from peft import LoraConfig, get_peft_model  # noqa: E402
from verl.checkpoint_engine.base import ColocatedCheckpointEngine  # noqa: E402
from verl.utils.model import get_hf_auto_model_class  # noqa: E402
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

from nrl_models.adapters.hub_stream import HubStream  # noqa: E402
from nrl_models.errors import NRLModelsError, UnknownArgumentError  # noqa: E402
from nrl_models.testing.tiny import silent_transformers  # noqa: E402

(EXTERNAL_LIB,) = re.findall(r"model\.external_lib=(\S+)", hook_of("verl"))
import_utils.import_external_libs(EXTERNAL_LIB)  # as verl's model configuration does

EXPERTS, DENSE = "Qwen3MoeForCausalLM", "LlamaForCausalLM"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tensors on the CPU, because verl moves them to an accelerator."""
    monkeypatch.setattr("nrl_models.adapters.verl.get_device_id", lambda: CPU)
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: CPU)
    monkeypatch.setattr(transformer_impl, "log_gpu_memory_usage", lambda *_, **__: None)
    monkeypatch.setattr(transformer_impl, "load_fsdp_model_to_gpu", lambda module: None)


def load(reference: PreTrainedModel, folder: Path) -> Any:
    """Save with transformers, and load as verl's FSDP engine does."""
    with silent_transformers():
        reference.save_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        auto_class = get_hf_auto_model_class(config)
        classes = auto_class._model_mapping.get(type(config), ())
        if type(reference).__name__ not in [
            c.__name__ for c in (classes if isinstance(classes, tuple) else (classes,))
        ]:
            pytest.skip(f"verl uses {auto_class.__name__}, which has no such class for this configuration")
        return auto_class.from_pretrained(
            pretrained_model_name_or_path=str(folder), torch_dtype=torch.float32, config=config, trust_remote_code=False
        )


def engine_of(module: Any, kind: type[Any] | None = None, lora: dict[str, Any] | None = None) -> Any:
    """Create verl's language model engine for a loaded module, without an optimizer."""
    kind = kind or EngineRegistry.get_engine_cls("language_model", "fsdp2")
    engine = kind.__new__(kind)
    engine.hub_stream, engine.module, engine._qat_enabled = HubStream(module), module, False
    engine._uses_fsdp2_cpu_offload_policy = engine._is_offload_param = False
    engine.model_config = SimpleNamespace(lora=lora or {}, hf_config=module.config)
    return engine


def update_rollouts(engine: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that rollouts receive through verl's checkpoint engine for one device."""
    channel, receiver = ColocatedCheckpointEngine(bucket_size=1 << 20), Receiver()
    tensors, peft_config = engine.get_per_tensor_param(**options)
    assert peft_config is None
    sent = channel.send_weights(tensors)
    if inspect.isawaitable(sent):
        asyncio.run(sent)
    receiver.load_weights(channel.receive_weights())
    return receiver.tensors


def test_registered_engine_classes() -> None:
    for backend in ("fsdp", "fsdp2"):
        kind = EngineRegistry.get_engine_cls("language_model", backend)
        assert kind.__module__ == "nrl_models.adapters.verl"
        assert issubclass(kind, FSDPEngineWithLMHead)
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2").__module__.startswith("verl.")


@each_architecture
def test_rollout_weights_match_transformers_files(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    model = load(case.reference(), tmp_path)
    assert type(model) is case.model_class
    assert_same_bytes(update_rollouts(engine_of(model)), saved_by_transformers(case.reference()))


def test_naming_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(EXPERTS)
    original = HubStream.__call__

    def wrong(self: Any, *args: Any) -> Any:
        return ((name.replace(".experts.1.", ".experts.9."), tensor) for name, tensor in original(self, *args))

    monkeypatch.setattr(HubStream, "__call__", wrong)
    with pytest.raises(AssertionError, match=r"experts\.9\."):
        assert_same_bytes(update_rollouts(engine_of(case.model())), saved_by_transformers(case.reference()))


def test_names_of_verl_engine_differ_from_hub() -> None:
    """These models need the hook: verl does not convert the names of their experts, or their prefixes."""
    for name in ("MixtralForCausalLM", "Gemma3ForConditionalGeneration"):
        case = case_of(name)
        sent = update_rollouts(engine_of(case.model(), FSDPEngineWithLMHead))
        assert sent.keys() != saved_by_transformers(case.reference()).keys()


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_sharded_parameters_are_gathered(name: str, one_process: None) -> None:
    case = case_of(name)
    model: Any = copy.deepcopy(case.model())
    engine = engine_of(model)  # verl wraps the model after loading
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_same_bytes(update_rollouts(engine), saved_by_transformers(case.reference()))


def with_adapters(name: str) -> tuple[Any, Any]:
    base = copy.deepcopy(case_of(name).model())
    engine = engine_of(base)
    engine.module = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return engine, engine.module.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")


def test_adapters_are_merged(one_process: None) -> None:
    engine, layer = with_adapters(EXPERTS)
    mesh = init_device_mesh("cpu", (1,))
    for wrapped in engine.module.base_model.model.model.layers:
        fully_shard(wrapped, mesh=mesh)
    fully_shard(engine.module, mesh=mesh)
    engine.model_config.lora = {"merge": True}
    before = saved_by_transformers(case_of(EXPERTS).reference())
    query = "model.layers.0.self_attn.q_proj.weight"
    merged = before[query] + layer.get_delta_weight("default").full_tensor()
    sent = update_rollouts(engine)
    assert sent.keys() == before.keys()
    assert torch.equal(sent[query], merged.bfloat16())  # verl sends merged weights in this dtype
    assert torch.equal(layer.base_layer.weight.full_tensor(), before[query])


def test_unsupported_weight_sync_raises() -> None:
    engine, _ = with_adapters(EXPERTS)
    with pytest.raises(UnknownArgumentError, match=r"lora\.merge=False: expected True"):
        engine.get_per_tensor_param()
    with pytest.raises(UnknownArgumentError, match=r"experts\.0\.down_proj\.weight and \d+ more are not parameters"):
        engine_of(case_of(EXPERTS).model()).get_per_tensor_param_shard()
    (name, _, _), *_ = engine_of(case_of(DENSE).model()).get_per_tensor_param_shard()[0]
    assert name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("strategy", "qat", "message"),
    [("fsdp", False, "strategy=fsdp: expected fsdp2"), ("fsdp2", True, "qat: expected none")],
)
def test_unsupported_settings_raise_before_loading(strategy: str, qat: bool, message: str) -> None:
    engine = engine_of(case_of(DENSE).model())
    engine.engine_config, engine._qat_enabled = SimpleNamespace(strategy=strategy), qat
    with pytest.raises(UnknownArgumentError, match=message):
        engine._build_module()


def test_adapter_directory_raises(tmp_path: Path) -> None:
    """transformers' auto classes would load the base model, and pass the adapter to it."""
    model = copy.deepcopy(case_of(DENSE).reference())
    with silent_transformers():
        model.save_pretrained(tmp_path / "base")
        tuned = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=4, target_modules=["q_proj"])
        )
        tuned.save_pretrained(tmp_path / "adapter")
        with pytest.raises(NRLModelsError, match=r"is an adapter\. Load its base model"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
