"""Device maps, dispatched as in transformers, and device contexts around a call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from checkpoints import assert_same_model, edit_weights
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.errors import DeviceError, NRLModelsError, UnknownArgumentError
from nrl_models.families.gemma3n.model import Gemma3nForCausalLM
from nrl_models.families.llama.model import LlamaForCausalLM
from nrl_models.loading import pretrained, source
from nrl_models.loading.fit import Fit
from nrl_models.loading.weights import load_weights
from nrl_models.testing.case import FamilyCase

# Device maps


def hooks_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of accelerate's hook on each module that transformers also has."""
    fields = ("execution_device", "offload", "io_same_device", "offload_buffers", "skip_keys", "place_submodules")
    hooks = {name: getattr(module, "_hf_hook", None) for name, module in model.named_modules()}
    return {
        name: {key: getattr(hook, key) for key in fields}
        for name, hook in hooks.items()
        if isinstance(hook, AlignDevicesHook)
    }


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> tuple[FamilyCase, Path, dict[str, str]]:
    """A model whose layers share keys and values through a dict, its folder, and a map with layers on disk."""
    case = FamilyCase(Gemma3nForCausalLM)
    folder = tmp_path_factory.mktemp("gemma3n")
    model = case.reference()
    model.save_pretrained(folder)
    devices = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    devices |= {f"model.layers.{index}": ("disk", "cpu")[index % 2] for index in range(len(model.model.layers))}
    return case, folder, devices | {"lm_head": "cpu"}


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_device_map_hooks_match_transformers(
    gemma3n: tuple[FamilyCase, Path, dict[str, str]], offload_buffers: bool, tmp_path: Path
) -> None:
    case, folder, devices = gemma3n
    dispatched = [
        model_class.from_pretrained(
            folder,
            device_map=devices,
            offload_folder=tmp_path / model_class.__module__,
            offload_buffers=offload_buffers,
        )
        for model_class in (case.model_class, case.reference_class)
    ]
    ours, theirs = map(hooks_of, dispatched)
    common = {name: hook for name, hook in ours.items() if name in theirs}
    assert len(common) > len(devices)
    assert common == {name: theirs[name] for name in common}
    with torch.no_grad():
        expected = case.model_class.from_pretrained(folder)(**case.inputs()).logits
        for model in dispatched:
            torch.testing.assert_close(model(**case.inputs()).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "device_map",
    [
        *("cpu", torch.device("cpu"), {"": "cpu"}, "auto", "balanced_low_0"),
        {"model": "cpu:0", "lm_head": "cpu"},
        {"model": torch.device("cpu"), "lm_head": "cpu"},
    ],
    ids=str,
)
def test_single_device_adds_no_hooks(llama_checkpoint: Path, llama: PreTrainedModel, device_map: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, device_map=device_map, max_memory={"cpu": "1GB"})
    assert not hooks_of(model)
    assert_same_model(model, llama)


def test_max_memory_offloads_to_disk(llama_checkpoint: Path, tmp_path: Path, input_ids: torch.Tensor) -> None:
    size = sum(parameter.nbytes for parameter in LlamaForCausalLM.from_pretrained(llama_checkpoint).parameters())
    model = AutoModelForCausalLM.from_pretrained(
        llama_checkpoint, device_map="sequential", max_memory={"cpu": int(size * 0.8)}, offload_folder=tmp_path
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(llama_checkpoint)(input_ids).logits
        torch.testing.assert_close(model(input_ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_offload_folder_expands_home_directory(
    llama_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    devices = {"model": "cpu", "lm_head": "disk"}
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, device_map=devices, offload_folder="~/off")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("devices", [{"model": "disk", "lm_head": "cpu"}, {"": "disk"}], ids=str)
def test_shared_offload_folder(
    devices: dict[str, str], llama_checkpoint: Path, folder: Path, tmp_path: Path, input_ids: torch.Tensor
) -> None:
    edit_weights(folder, lambda tensors: tensors.update({name: 2 * each for name, each in tensors.items()}))
    models = [
        AutoModelForCausalLM.from_pretrained(path, device_map=devices, offload_folder=tmp_path / "new" / "offloaded")
        for path in (llama_checkpoint, folder)
    ]
    with torch.no_grad():
        for path, model in zip((llama_checkpoint, folder), models, strict=True):
            expected = LlamaForCausalLM.from_pretrained(path)(input_ids).logits
            torch.testing.assert_close(model(input_ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_disk_offload_without_folder_raises(llama_checkpoint: Path) -> None:
    with pytest.raises(UnknownArgumentError, match="on 'disk': pass offload_folder"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, device_map="sequential", max_memory={"cpu": "100KB"})


# Device contexts


class default_device(AbstractContextManager[None]):  # noqa: N801
    """A context manager for `torch.set_default_device`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.set_default_device(self.device)

    def __exit__(self, *_: object) -> None:
        torch.set_default_device(None)


with_device_contexts = pytest.mark.parametrize("device_context", [torch.device, default_device])


@with_device_contexts
@pytest.mark.parametrize("model_class", [AutoModelForCausalLM, LlamaForCausalLM])
def test_meta_context_raises_before_reading(
    llama_checkpoint: Path, device_context: Any, model_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*_: object, **__: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(source, "resolve_folder", reads)
    # The error is also of transformers' type, and contains its message.
    message = "You are using `from_pretrained` with a meta device context manager"
    with device_context("meta"), pytest.raises(RuntimeError, match=message) as caught:
        model_class.from_pretrained(llama_checkpoint)
    assert isinstance(caught.value, DeviceError)
    assert isinstance(caught.value, NRLModelsError)


@pytest.mark.parametrize(
    "placement", [{"device": "meta"}, {"device_map": "meta"}, {"device_map": {"": "meta"}}], ids=str
)
def test_loading_to_meta_raises(llama_checkpoint: Path, placement: dict[str, Any]) -> None:
    with pytest.raises(DeviceError, match="from_config"):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, **placement)


@with_device_contexts
@pytest.mark.parametrize("placement", [{"device": "cpu"}, {"device_map": "cpu"}], ids=str)
def test_explicit_device_overrides_meta_context(
    llama_checkpoint: Path, llama: PreTrainedModel, device_context: Any, placement: dict[str, Any]
) -> None:
    with device_context("meta"):
        model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, **placement)
        assert torch.empty(1).is_meta  # the context is still active
    assert_same_model(model, llama)


@with_device_contexts
def test_from_config_in_meta_context(llama_config: LlamaConfig, device_context: Any) -> None:
    with device_context("meta"):
        model = AutoModelForCausalLM.from_config(llama_config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_device_context_is_the_load_device(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates the device context, and checks the device passed to the weight loader."""
    devices: list[torch.device] = []

    def load(model: PreTrainedModel, files: Any, *, device: torch.device, **options: Any) -> Fit:
        devices.append(device)
        return load_weights(model, files, **options)

    monkeypatch.setattr(pretrained, "load_weights", load)
    monkeypatch.setattr("nrl_models.loading.placement.device_in_context", lambda: torch.device("cuda:1"))
    AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    AutoModelForCausalLM.from_pretrained(llama_checkpoint, device="cpu")
    assert devices == [torch.device("cuda:1"), torch.device("cpu")]
