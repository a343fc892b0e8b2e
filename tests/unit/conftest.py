"""Checkpoints written by transformers, and models that load them. Do not modify fixtures of session scope."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import new_model
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel, dynamic_module_utils
from transformers.integrations import peft as transformers_peft
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from nrl_models import registry
from nrl_models.testing.tiny import tiny_config
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, read_records


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars() -> None:
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    """Reset the record of logged warnings, so that each test sees them. Tests reuse the folders of passed tests."""
    logging.warning_once.cache_clear()
    logging.info_once.cache_clear()


@pytest.fixture(autouse=True)
def _forget_remote_code() -> Iterator[None]:
    """Forget modules of checkpoints, and where they were, after the test. They would hide those of the next test."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def low_default_dtype(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Return a function that sets torch's default dtype to a low precision, until the end of the test."""
    yield partial(torch.set_default_dtype, request.param)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def accepts_installed_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' adapter methods accept an older PEFT than they require, because pip may install one."""
    monkeypatch.setattr(transformers_peft, "MIN_PEFT_VERSION", "0")


@pytest.fixture
def every_family() -> None:
    """Skip if a family with committed results, for which the test writes a page, needs a missing package."""
    tested = read_records(PAGES)[Kind.TESTS]
    if unmet := list(filter(None, map(registry.unmet_requirement, sorted(tested)))):
        pytest.skip(f"some families need {unmet[0]}")


@pytest.fixture
def llama_config() -> LlamaConfig:
    """A configuration with hidden size 256, 8 heads, 4 key-value heads and 2 layers."""
    return tiny_config(LlamaConfig)


@pytest.fixture
def mixtral_config() -> MixtralConfig:
    """A configuration of the same sizes with 4 experts."""
    return tiny_config(MixtralConfig)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """transformers' Llama in fp32 with random values in every tensor."""
    return new_model(tiny_config(LlamaConfig, {"attention_bias": True, "mlp_bias": True})).eval()


@pytest.fixture(scope="session")
def llama_checkpoint(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `llama` saved by transformers: one fp32 file."""
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_shards(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `llama` saved by transformers as fp32 shards with an index. Some layers span two shards."""
    folder = tmp_path_factory.mktemp("llama-shards")
    llama.save_pretrained(folder, max_shard_size="2MB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(llama_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of `llama_checkpoint` that tests may damage."""
    return shutil.copytree(llama_checkpoint, tmp_path / "checkpoint")


@pytest.fixture
def shards(llama_shards: Path, tmp_path: Path) -> Path:
    """A copy of `llama_shards` that tests may damage."""
    return shutil.copytree(llama_shards, tmp_path / "shards")


@pytest.fixture(scope="session")
def mixtral() -> PreTrainedModel:
    """transformers' Mixtral in fp32 with random values in every tensor."""
    return new_model(tiny_config(MixtralConfig)).eval()


@pytest.fixture(scope="session")
def mixtral_checkpoint(mixtral: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `mixtral` saved by transformers: one tensor per expert, as on the hub."""
    folder = tmp_path_factory.mktemp("mixtral")
    mixtral.save_pretrained(folder)
    return folder


@pytest.fixture
def input_ids() -> torch.Tensor:
    """Two sequences of twelve tokens."""
    return torch.randint(16, 480, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` for packages of families. Registrations and imports are undone after the test."""
    registry.architectures()
    for name in ("MODEL_ARCH_MAPPING", "_CUSTOM_CONFIG_REGISTRATIONS", "_REQUIREMENTS", "_shadowing"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())
    monkeypatch.setattr(registry, "_warned", set())  # forget earlier warnings
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "outside":
            del sys.modules[name]


@pytest.fixture
def no_persimmon(sandbox: Path) -> None:
    """Unregister Persimmon, so that no family serves it."""
    del registry.MODEL_ARCH_MAPPING["PersimmonForCausalLM"]
