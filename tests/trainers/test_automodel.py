"""Unmodified NeMo AutoModel loads, saves and exports registered classes. Also tests NeMo RL's calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved import assert_same_bytes, case_of, each_architecture, hook_of, saved_by_transformers, tensors_in
from torch.distributed.tensor import DTensor

auto_model = pytest.importorskip(
    "nemo_automodel._transformers.auto_model", reason="needs Automodel: make test-trainers"
)

from nemo_automodel import NeMoAutoModelForCausalLM  # noqa: E402
from nemo_automodel._transformers.registry import ModelRegistry  # noqa: E402
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer  # noqa: E402
from nemo_automodel.components.checkpoint.config import CheckpointingConfig  # noqa: E402

from nrl_models import registry  # noqa: E402
from nrl_models.adapters import automodel  # noqa: E402
from nrl_models.common.state_dict.adapter import StateDictAdapter  # noqa: E402
from nrl_models.errors import StateDictError, TrainerError, UnknownArchitectureError  # noqa: E402
from nrl_models.testing.tiny import silent_transformers  # noqa: E402

EXPERTS = "Qwen3MoeForCausalLM"
TIED_ONLY_IN_CONFIG = ("BigBirdPegasusForCausalLM",)
"""Architectures whose head Automodel does not load: their configuration ties it, but transformers does not."""

CPU = torch.device("cpu")


class WithoutGPU:
    """A `torch` for `auto_model` that returns the CPU as the current CUDA device."""

    cuda = SimpleNamespace(current_device=lambda: CPU)

    @staticmethod
    def device(*_: object) -> torch.device:
        return CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(scope="module", autouse=True)
def registered() -> list[str]:
    return automodel.register()


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_model, "torch", WithoutGPU())


def load(reference: Any, folder: Path) -> Any:
    """Save with transformers, and load with Automodel."""
    with silent_transformers():
        reference.save_pretrained(folder)
        return NeMoAutoModelForCausalLM.from_pretrained(
            str(folder), torch_dtype=torch.float32, attn_implementation=reference.config._attn_implementation
        )


def save(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Save with Automodel in the consolidated format, and return the tensors."""
    config = CheckpointingConfig(checkpoint_dir=folder, save_consolidated="every", **options)
    Checkpointer(config, 0, 0, 0).save_model(model, str(folder))
    return tensors_in(folder / "model" / "consolidated")


def refit(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Make the calls of NeMo RL's weight sync in order. NeMo RL itself is not on the package index."""
    for name, tensor in model.state_dict().items():
        full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parts = model.state_dict_adapter.convert_single_tensor_to_hf(
            name, full_tensor, exclude_key_regex=r".*_extra_state.*", quantization=False
        )
        for hub, part in parts:
            yield hub, part.to(tensor.dtype, non_blocking=True).contiguous()


@each_architecture
def test_loaded_and_synced_weights_match_transformers_files(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    saved = saved_by_transformers(case.reference())
    if name in TIED_ONLY_IN_CONFIG:
        with pytest.raises(StateDictError, match=r"missing: lm_head\.weight"):
            load(case.reference(), tmp_path)
        return
    model = load(case.reference(), tmp_path)
    assert isinstance(model, case.model_class)
    adapter = model.state_dict_adapter
    fused = [tensor.name for tensor in adapter.hub.values() if len(tensor.parameters) > 1]
    if fused:  # a single parameter is not a complete hub tensor
        with pytest.raises(ValueError, match="convert them together"):
            dict(refit(model))
        sent = adapter.to_hf(model.state_dict())
    else:
        sent = dict(refit(model))
    tied = {tensor.name for key in adapter.tied for tensor in adapter.tensors_in(key, "hub")}
    assert_same_bytes({hub: tensor for hub, tensor in sent.items() if hub not in tied - saved.keys()}, saved)
    for name, source in adapter.tied.items():  # NeMo RL sends both names of tied tensors, for any model
        assert torch.equal(model.state_dict()[name], model.state_dict()[source])


@pytest.mark.parametrize("name", ["LlamaForCausalLM", EXPERTS, "MixtralForCausalLM", "Gemma3ForConditionalGeneration"])
def test_saved_weights_match_transformers_files(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    saved = saved_by_transformers(case.reference())
    model = load(case.reference(), tmp_path / "base")
    for options in ({}, {"v4_compatible": True, "legacy_paramwrapper_layout": True}):
        assert_same_bytes(save(model, tmp_path / str(len(options)), **options), saved)


@pytest.mark.parametrize("path", ["load", "refit", "save"])
def test_naming_error_is_detected(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(EXPERTS)
    saved = saved_by_transformers(case.reference())
    method = {"load": "from_hf", "refit": "convert_single_tensor_to_hf", "save": "to_hf"}[path]
    original = getattr(StateDictAdapter, method)

    def wrong(self: StateDictAdapter, first: Any, *more: Any, **options: Any) -> Any:
        if path == "load":
            return original(self, swapped(first), *more, **options)
        converted = swapped(dict(original(self, first, *more, **options)))
        return converted if path == "save" else list(converted.items())

    with monkeypatch.context() as planted:
        if path == "load":
            planted.setattr(StateDictAdapter, method, wrong)
        model = load(case.reference(), tmp_path / "base")
    monkeypatch.setattr(StateDictAdapter, method, wrong)
    sent = save(model, tmp_path / "saved") if path == "save" else dict(refit(model))
    with pytest.raises(AssertionError, match=r"experts\.0"):
        assert_same_bytes(sent, saved)


def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Swap the gate and up projections of the first expert in each layer."""
    names = {"experts.0.gate_proj": "experts.0.up_proj", "experts.0.up_proj": "experts.0.gate_proj"}
    return {
        next((name.replace(part, names[part]) for part in names if part in name), name): tensor
        for name, tensor in tensors.items()
    }


def test_nemo_rl_finds_state_dict_adapter() -> None:
    """Before loading, NeMo RL looks for an adapter class in the module `state_dict_adapter` of the model's package."""
    for name in ("LlamaForCausalLM", EXPERTS, "CohereForCausalLM"):
        model_class = ModelRegistry.model_arch_name_to_cls[name]
        adapter_module = importlib.import_module(f"{model_class.__module__.rsplit('.', 1)[0]}.state_dict_adapter")
        adapter_classes = [
            kind
            for kind_name, kind in inspect.getmembers(adapter_module, inspect.isclass)
            if kind_name.endswith("StateDictAdapter")
        ]
        assert adapter_classes == [StateDictAdapter]
        assert callable(adapter_classes[0].convert_single_tensor_to_hf)


def test_registered_classes_replace_automodel_classes(registered: list[str]) -> None:
    assert {"LlamaForCausalLM", EXPERTS, "DeepseekV3ForCausalLM"} <= set(registered)
    for name in registered:
        assert issubclass(ModelRegistry.model_arch_name_to_cls[name], registry.model_class(name))


def test_documented_hook() -> None:
    ModelRegistry.model_arch_name_to_cls[EXPERTS] = object
    exec(hook_of("automodel"))
    assert issubclass(ModelRegistry.model_arch_name_to_cls[EXPERTS], registry.model_class(EXPERTS))


def test_unknown_architecture_raises() -> None:
    with pytest.raises(UnknownArchitectureError, match="not registered: NovaForCausalLM"):
        automodel.register("LlamaForCausalLM", "NovaForCausalLM")
    assert "NovaForCausalLM" not in ModelRegistry.model_arch_name_to_cls


def test_unsupported_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.registry.version", lambda name: "0.8.0")
    with pytest.raises(TrainerError, match=r"needs nemo_automodel<0\.8,>=0\.7; 0\.8\.0 is installed"):
        automodel.register()
