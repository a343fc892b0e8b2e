"""Model classes outside transformers, registered with the auto classes by user code or remote code."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import assert_same_model, edit_config
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import nrl_models
from nrl_models.onboarding.inspect import inspect
from nrl_models.testing.tiny import tiny_config

AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")

CODE = """
    from transformers import LlamaConfig, LlamaForCausalLM
    class RemoteConfig(LlamaConfig):
        model_type = "remote_llama"
    class RemoteForCausalLM(LlamaForCausalLM):
        config_class = RemoteConfig
"""


class MyConfig(LlamaConfig):
    model_type = "my_llama"


class MyModel(LlamaModel):
    config_class = MyConfig  # type: ignore[assignment]


class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig


class MyForSequenceClassification(LlamaForSequenceClassification):
    config_class = MyConfig


@pytest.fixture(autouse=True)
def undo_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    for name in (*AUTO_CLASSES, "AutoModelForImageTextToText"):
        mapping = getattr(transformers, name)._model_mapping
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))


@pytest.fixture
def registered() -> dict[str, Any]:
    transformers.AutoConfig.register("my_llama", MyConfig)
    classes = dict(zip(AUTO_CLASSES, (MyModel, MyForCausalLM, MyForSequenceClassification), strict=True))
    for name, model_class in classes.items():
        getattr(transformers, name).register(MyConfig, model_class)
    return classes


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
def test_registered_class_loads(auto_class: str, registered: dict[str, Any], tmp_path: Path) -> None:
    reference = registered[auto_class](tiny_config(MyConfig)).eval()
    reference.save_pretrained(tmp_path)
    model = getattr(nrl_models, auto_class).from_pretrained(tmp_path)
    assert type(model) is registered[auto_class]
    assert_same_model(model, reference)
    new = getattr(nrl_models, auto_class).from_config(reference.config, dtype=torch.float32)
    assert type(new) is registered[auto_class]


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["FormerName"], ["LlamaModel", "MyModel"], None])
def test_registered_class_loads_under_any_name(
    architectures: list[str] | None, registered: dict[str, Any], tmp_path: Path
) -> None:
    """transformers' auto class reads `architectures` only if several classes are registered."""
    MyForCausalLM(tiny_config(MyConfig)).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=architectures)
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is MyForCausalLM
    assert type(nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path)) is MyForCausalLM


def test_registered_class_with_name_of_family_loads(tmp_path: Path) -> None:
    own = type("LlamaForCausalLM", (MyForCausalLM,), {})
    transformers.AutoConfig.register("my_llama", MyConfig)
    transformers.AutoModelForCausalLM.register(MyConfig, own)
    own(tiny_config(MyConfig)).save_pretrained(tmp_path)
    assert type(nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path)) is own


def test_registered_class_loads_without_architectures(registered: dict[str, Any], tmp_path: Path) -> None:
    MyForCausalLM(tiny_config(MyConfig)).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=None)
    assert type(nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path)) is MyForCausalLM


def test_registered_class_is_used_by_engine_and_checks(registered: dict[str, Any], tmp_path: Path) -> None:
    transformers.AutoModelForImageTextToText.register(MyConfig, MyForCausalLM)
    reference = MyForCausalLM(tiny_config(MyConfig)).eval()
    reference.save_pretrained(tmp_path)
    model = nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path)
    with nrl_models.start_engine("hf-generate", tmp_path) as engine:
        assert type(engine.model) is MyForCausalLM
    assert nrl_models.check_parity(tmp_path).passed
    ids = torch.arange(5, 15)[None]
    expected = reference(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(nrl_models.token_logprobs(model, ids).logprobs[:, 1:], expected)
    assert inspect(tmp_path).parameters == reference.num_parameters()
    assert type(nrl_models.AutoModelForImageTextToText.from_pretrained(tmp_path)) is MyForCausalLM


def test_class_that_replaces_transformers_own_loads(tmp_path: Path) -> None:
    class Replacing(LlamaForCausalLM):
        pass

    transformers.AutoModelForCausalLM.register(LlamaConfig, Replacing, exist_ok=True)
    if transformers.AutoModelForCausalLM._model_mapping[LlamaConfig] is not Replacing:
        pytest.skip("this transformers ignores classes that replace its own")
    reference = Replacing(tiny_config(LlamaConfig)).eval()
    reference.save_pretrained(tmp_path)
    model = nrl_models.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is Replacing
    assert_same_model(model, reference)


def test_remote_code_already_loaded_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "checkpoint"
    reference = LlamaForCausalLM(tiny_config(LlamaConfig)).eval()
    reference.save_pretrained(folder)
    (folder / "modeling_remote.py").write_text(textwrap.dedent(CODE))
    code = {"AutoConfig": "modeling_remote.RemoteConfig", "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM"}
    edit_config(folder, model_type="remote_llama", architectures=["RemoteForCausalLM"], auto_map=code)
    upstream = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model = nrl_models.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == type(upstream).__name__ == "RemoteForCausalLM"
    assert_same_model(model, reference)
