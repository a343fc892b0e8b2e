"""Choosing the class for a checkpoint or a configuration."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import WEIGHTS, assert_same, assert_same_model, edit_config, edit_weights, new_model, problems, stored
from transformers import (
    CLIPConfig,
    Gemma3Config,
    LlamaConfig,
    MistralConfig,
    PersimmonConfig,
    PreTrainedModel,
    Qwen2AudioConfig,
    RagConfig,
    T5Config,
    VisionEncoderDecoderConfig,
    XLMConfig,
)
from versions import since

from nrl_models import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CheckpointError,
    FamilyImportError,
    RemoteCodeError,
    UnknownArchitectureError,
    register_architecture,
    registry,
)
from nrl_models.auto import AUTO_CLASSES, auto_class_for, auto_class_of
from nrl_models.common.backend import BackendConfig
from nrl_models.common.projections import report
from nrl_models.families.llama import model as llama_family
from nrl_models.family import FamilyModel
from nrl_models.testing.tiny import tiny_config

AUTO = {
    "ForCausalLM": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def fused_group_count(model: torch.nn.Module) -> int:
    return len(report(model))


# Families


@pytest.mark.parametrize("kind", AUTO)
def test_auto_class_loads_family_class_per_head(kind: str, tmp_path: Path) -> None:
    reference = new_model(tiny_config(LlamaConfig), kind)
    reference.save_pretrained(tmp_path)
    model = AUTO[kind].from_pretrained(tmp_path)
    assert type(model) is getattr(llama_family, f"Llama{kind}")
    assert_same_model(model, reference)
    assert not model.training
    assert auto_class_for(tmp_path) is AUTO[kind]


def test_vision_language_model(tmp_path: Path) -> None:
    config = tiny_config(Gemma3Config)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert isinstance(model, FamilyModel)
    # transformers also lists it among the language models.
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(model)
    assert auto_class_for(tmp_path) is AutoModelForImageTextToText


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("Gemma3ForConditionalGeneration", id="images"),
        pytest.param("Qwen2AudioForConditionalGeneration", id="audio"),
        pytest.param("Phi4MultimodalForCausalLM", id="both"),
    ],
)
def test_multimodal_model_loads_family_class(architecture: str, tmp_path: Path) -> None:
    upstream = getattr(transformers, architecture)
    reference = upstream._from_config(tiny_config(upstream.config_class, None, upstream)).eval()
    reference.save_pretrained(tmp_path)
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path)
    assert isinstance(model, FamilyModel)
    assert type(model).__name__ == architecture
    assert_same_model(model, reference)


def test_text_model_from_composite_config() -> None:
    config = tiny_config(Gemma3Config)
    config.architectures = ["Gemma3ForCausalLM"]
    model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert type(model.config) is type(config.text_config)


def test_model_type_selects_class_without_architectures(folder: Path, llama: PreTrainedModel) -> None:
    edit_config(folder, architectures=None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is llama_family.LlamaForCausalLM
    assert_same_model(model, llama)


def test_mistral_with_layer_types_loads_as_ministral(tmp_path: Path) -> None:
    # A Mistral with layer types is a Ministral: the architecture name is the same, but the attention differs.
    config = tiny_config(MistralConfig)
    new_model(config).save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=["sliding_attention", "full_attention"])
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(expected).__name__ in type(model).__name__
    input_ids = torch.arange(20, 44)[None]
    torch.testing.assert_close(model(input_ids).logits, expected(input_ids).logits)


# From a configuration


def test_from_config_does_not_modify_config(llama_config: LlamaConfig) -> None:
    before = llama_config.to_dict()
    model = AutoModelForCausalLM.from_config(
        llama_config, dtype=torch.bfloat16, backend=BackendConfig(attn="eager"), combine=False
    )
    assert llama_config.to_dict() == before
    assert llama_config._attn_implementation != "eager"
    assert model.config is not llama_config


def test_from_config_on_meta(llama_config: LlamaConfig, llama: PreTrainedModel) -> None:
    model = AutoModelForCausalLM.from_config(llama_config, device="meta", combine=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert fused_group_count(model) == 4
    adapter = model.state_dict_adapter
    expected = {name: tuple(tensor.shape) for name, tensor in llama.state_dict().items() if not name.endswith("bias")}
    assert {name: shape for name, shape, _ in adapter.export_plan()} == expected


def test_from_config_sets_train_mode_and_dtype(llama_config: LlamaConfig) -> None:
    model = AutoModelForCausalLM.from_config(llama_config, dtype=torch.bfloat16)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("combine", "backend", "expected"),
    [
        (True, None, 4),
        (False, None, 0),
        ("auto", None, 0),  # fusing was not measured to be faster on any device
        ("auto", BackendConfig(combine=True), 4),
        (True, BackendConfig(combine=False), 4),
        (True, BackendConfig(combine="auto"), 4),
        (False, BackendConfig(combine=True), 0),
    ],
)
def test_combine_option_overrides_backend(
    combine: Any, backend: BackendConfig | None, expected: int, llama_config: LlamaConfig, llama_checkpoint: Path
) -> None:
    for model in (
        AutoModelForCausalLM.from_config(llama_config, combine=combine, backend=backend),
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, combine=combine, backend=backend),
    ):
        assert fused_group_count(model) == expected
        assert model.combine is bool(expected)


def test_combine_option_is_not_saved(llama_checkpoint: Path, tmp_path: Path) -> None:
    for combine in (True, False):
        model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, combine=combine)
        model.save_pretrained(tmp_path / str(combine))
    for name in ("config.json", WEIGHTS):
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes()
    assert "combine" not in (tmp_path / "True" / "config.json").read_text()


def test_attn_implementation_is_applied(llama_checkpoint: Path, llama_config: LlamaConfig) -> None:
    for model in (
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, backend=BackendConfig(attn="eager")),
        AutoModelForCausalLM.from_pretrained(llama_checkpoint, attn_implementation="eager"),
        AutoModelForCausalLM.from_config(llama_config, backend=BackendConfig(attn="eager")),
    ):
        assert model.config._attn_implementation == "eager"


def test_auto_class_constructor_raises() -> None:
    with pytest.raises(
        TypeError, match=r"AutoModelForCausalLM is not instantiated: use from_pretrained\(path\) or from_config"
    ):
        AutoModelForCausalLM()


# Wrong kinds of models


@pytest.mark.parametrize(
    ("auto", "config", "advice"),
    [
        (
            AutoModelForImageTextToText,
            LlamaConfig,
            "is not a vision-language model. Use AutoModelForCausalLM or AutoModelFor",
        ),
        (
            AutoModelForTokenClassification,
            Gemma3Config,
            "is not a token classifier. Use AutoModelForCausalLM or AutoModelForImage",
        ),
        (AutoModelForCausalLM, T5Config, "Use AutoModelForSequenceClassification or AutoModelForTokenClassification."),
        (AutoModelForCausalLM, CLIPConfig, "Use AutoModel."),
        (AutoModelForMultimodalLM, LlamaConfig, "is not a multimodal language model. Use AutoModelForCausalLM or"),
        (AutoModelForSequenceClassification, Qwen2AudioConfig, "Use AutoModelForMultimodalLM."),
        pytest.param(
            AutoModel,
            VisionEncoderDecoderConfig,
            "is not a base model. Use AutoModelForImageTextToText.",
            marks=since("5.23"),
        ),
        pytest.param(AutoModelForCausalLM, RagConfig, "No auto class serves it; a family can", marks=since("5.23")),
    ],
)
def test_error_suggests_matching_auto_class(auto: Any, config: Any, advice: str) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        auto.from_config(config())
    assert advice in str(caught.value)
    assert config.model_type in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("named", [True, False])
def test_every_architecture_has_an_auto_class_or_a_typed_error(named: bool) -> None:
    registry.register_custom_configs()
    for name in registry.architectures(aliases=False):
        if registry.unmet_requirement(name):
            continue
        config = registry.model_class(name).config_class(architectures=[name] if named else None)
        served = []
        for auto_class in AUTO_CLASSES:
            try:
                served.append(auto_class.architecture(config))
            except UnknownArchitectureError:
                continue
        assert name in served or not named


@pytest.mark.parametrize("architectures", [["KimiVLForConditionalGeneration"], None])
def test_kimi_vl_loads_as_a_multimodal_model_and_as_nothing_else(architectures: list[str] | None) -> None:
    registry.register_custom_configs()
    config = registry.model_class("KimiVLForConditionalGeneration").config_class(architectures=architectures)
    assert AutoModelForMultimodalLM.architecture(config) == "KimiVLForConditionalGeneration"
    with pytest.raises(UnknownArchitectureError, match=r"is not a base model\. Use AutoModelForImageTextToText\."):
        AutoModel.from_config(config, device="meta")


def test_wrong_head_raises_missing_and_unexpected(tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig), "ForSequenceClassification").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert problems(caught.value) == {("missing", "lm_head.weight"), ("unexpected", "score.weight")}


def test_unknown_model_type_raises(folder: Path) -> None:
    edit_config(folder, model_type="lama")
    with pytest.raises(
        UnknownArchitectureError, match=r"model_type 'lama' \(did you mean llama.*, which neither"
    ) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_misspelled_architecture_raises(folder: Path) -> None:
    edit_config(folder, architectures=["LamaForCausalLM"])
    with pytest.raises(
        UnknownArchitectureError, match=r"names the architecture LamaForCausalLM.* mean LlamaForCausalLM"
    ):
        AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, architectures=["LlamaForCausalLM"])
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("named", [["ForeignLM"], ["ForeignLM", "AndAnotherOne"]])
def test_unknown_architecture_raises(named: list[str], folder: Path) -> None:
    edit_config(folder, architectures=named)
    with pytest.raises(UnknownArchitectureError, match=r"ForeignLM.*Correct `architectures` in its config.json"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "named", [None, [], ["LlamaModel"], ["LlamaForSequenceClassification"], ["Foreign", "LlamaModel"]]
)
def test_other_head_or_no_architecture_loads(named: list[str] | None, folder: Path) -> None:
    edit_config(folder, architectures=named)
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("architectures", "config", "expected"),
    [
        (["LlamaForTokenClassification"], LlamaConfig, AutoModelForTokenClassification),
        (["Gemma3ForConditionalGeneration"], Gemma3Config, AutoModelForImageTextToText),
        (["Qwen2AudioForConditionalGeneration"], Qwen2AudioConfig, AutoModelForMultimodalLM),
        (["LlamaModel"], LlamaConfig, AutoModel),
        (["XLMWithLMHeadModel"], XLMConfig, AutoModelForCausalLM),
        pytest.param(
            ["VisionEncoderDecoderModel"],
            VisionEncoderDecoderConfig,
            AutoModelForImageTextToText,
            marks=since("5.23"),
        ),
        (["Foreign"], CLIPConfig, AutoModel),
        (None, Gemma3Config, AutoModelForCausalLM),
        (None, Qwen2AudioConfig, AutoModelForMultimodalLM),
    ],
)
def test_auto_class_of_config(architectures: list[str] | None, config: Any, expected: Any) -> None:
    assert auto_class_of(config(architectures=architectures)) is expected


# Not registered


@pytest.mark.usefixtures("no_persimmon")
def test_unregistered_architecture_falls_back_to_transformers(tmp_path: Path, input_ids: torch.Tensor) -> None:
    folder = tmp_path / "checkpoint"
    reference = new_model(tiny_config(PersimmonConfig)).eval()
    reference.save_pretrained(folder)
    with pytest.warns(UserWarning, match="PersimmonForCausalLM is not registered") as warned:
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert "docs/onboarding-reach.md lists the reason" in str(warned[0].message)
    assert "Parity" not in str(warned[0].message)  # it does not work for every class
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_config(reference.config)  # warns only once
    assert type(model) is type(reference)
    assert_same(model.state_dict(), reference.state_dict())
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, reference(input_ids).logits)
    # The identity adapter.
    adapter = model.state_dict_adapter
    assert_same(adapter.to_hf(model.state_dict()), reference.state_dict())
    assert [name for name, _, _ in adapter.export_plan()] == list(reference.state_dict())
    # As strict as for other models.
    edit_weights(folder, lambda tensors: tensors.pop("model.final_layernorm.weight"))
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert problems(caught.value) == {("missing", "model.final_layernorm.weight")}


# Families that fail to import


@pytest.mark.usefixtures("sandbox")
def test_broken_family_does_not_fall_back(llama_checkpoint: Path, llama_config: LlamaConfig) -> None:
    register_architecture("LlamaForCausalLM", "outside.nowhere:LlamaForCausalLM", exist_ok=True)
    for attempt in (
        lambda: AutoModelForCausalLM.from_pretrained(llama_checkpoint),
        lambda: AutoModelForCausalLM.from_config(llama_config),
    ):
        with pytest.raises(FamilyImportError, match=r"LlamaForCausalLM is served by outside\.nowhere"):
            attempt()


@pytest.mark.usefixtures("sandbox")
def test_unmet_family_requirement_raises(llama_checkpoint: Path) -> None:
    register_architecture(
        "LlamaForCausalLM",
        "nrl_models.families.llama.model:LlamaForCausalLM",
        requires="transformers>=99",
        exist_ok=True,
    )
    with pytest.raises(FamilyImportError, match="which needs transformers>=99; "):
        AutoModelForCausalLM.from_pretrained(llama_checkpoint)


# External families


OUTSIDE = """
from transformers.models.mixtral import modeling_mixtral as hf
from nrl_models.common.projections import CombinedQKV
from nrl_models.family import FamilyModel

class {config}(hf.MixtralConfig):
    model_type = "{model_type}"

class MixtralAttention(CombinedQKV, hf.MixtralAttention):
    pass

class OutsideForCausalLM(FamilyModel, hf.MixtralForCausalLM):
    {config_class}
    rewrites = {{hf.MixtralAttention: MixtralAttention}}
"""


def write_external_family(sandbox: Path, model_type: str) -> str:
    has_config_class = model_type != "mixtral"
    (sandbox / "outside").mkdir()
    (sandbox / "outside" / "model.py").write_text(
        OUTSIDE.format(
            config="OutsideConfig" if has_config_class else "Unused",
            model_type=model_type,
            config_class="config_class = OutsideConfig" if has_config_class else "",
        )
    )
    return "outside.model:OutsideForCausalLM"


def external_checkpoint(mixtral_checkpoint: Path, sandbox: Path, **values: Any) -> Path:
    folder = shutil.copytree(mixtral_checkpoint, sandbox / "checkpoint")
    edit_config(folder, architectures=["OutsideForCausalLM"], **values)
    return folder


def test_external_family_reads_hub_layout(
    sandbox: Path, mixtral_checkpoint: Path, mixtral: PreTrainedModel, tmp_path: Path
) -> None:
    register_architecture("OutsideForCausalLM", write_external_family(sandbox, "mixtral"))
    folder = external_checkpoint(mixtral_checkpoint, sandbox)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__module__ == "outside.model"
    assert_same_model(model, mixtral)
    model.save_pretrained(tmp_path / "saved")
    assert_same(stored(tmp_path / "saved"), stored(mixtral_checkpoint))


def test_external_family_raises_instead_of_random_weights(
    sandbox: Path, mixtral_checkpoint: Path, mixtral: PreTrainedModel
) -> None:
    # A custom model type has no conversions in transformers. transformers then initializes the experts randomly, and
    # prints a report.
    register_architecture(
        "OutsideForCausalLM",
        write_external_family(sandbox, "outside"),
        config={"outside": "outside.model:OutsideConfig"},
    )
    folder = external_checkpoint(mixtral_checkpoint, sandbox, model_type="outside")
    with pytest.raises(CheckpointError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert {kind for kind, _ in problems(caught.value)} == {"missing", "unexpected"}
    assert "experts.gate_up_proj" in str(caught.value)
    # It loads in the layout in memory.
    (folder / WEIGHTS).unlink()
    config = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model.load_state_dict(mixtral.state_dict())
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == config["model_type"] == "outside"
    assert_same_model(AutoModelForCausalLM.from_pretrained(folder), mixtral)


# Remote code


CONFIGURATION = """
from transformers import LlamaConfig

class ToyConfig(LlamaConfig):
    model_type = "toy"
"""

MODELING = """
from transformers import LlamaForCausalLM
from .configuration_toy import ToyConfig

class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig
"""

AUTO_MAP = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}


@pytest.fixture
def toy(folder: Path, sandbox: Path) -> Path:
    """A checkpoint with custom code."""
    (folder / "configuration_toy.py").write_text(CONFIGURATION)
    (folder / "modeling_toy.py").write_text(MODELING)
    edit_config(folder, model_type="toy", architectures=["ToyForCausalLM"], auto_map=AUTO_MAP)
    return folder


def test_remote_code_requires_trust(toy: Path) -> None:
    for name in ("configuration_toy.py", "modeling_toy.py"):
        (toy / name).write_text("raise AssertionError('was run')")
    with pytest.raises(RemoteCodeError) as caught:
        AutoModelForCausalLM.from_pretrained(toy)
    for text in (str(toy), "'toy'", "configuration_toy.ToyConfig", "trust_remote_code=True"):
        assert text in str(caught.value)


def test_remote_code_for_known_config_requires_trust(toy: Path, llama_config: LlamaConfig) -> None:
    config = T5Config(auto_map=AUTO_MAP)  # transformers has no causal language model for it
    with pytest.raises(RemoteCodeError, match=r"modeling_toy\.ToyForCausalLM"):
        AutoModelForCausalLM.from_pretrained(toy, config=config)
    with pytest.raises(RemoteCodeError, match=r"modeling_toy\.ToyForCausalLM"):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.filterwarnings("ignore:ToyForCausalLM is not registered")
@pytest.mark.parametrize("subfolder", [False, True])
def test_trusted_remote_code_runs(toy: Path, llama: PreTrainedModel, subfolder: bool) -> None:
    source = {"path_or_id": toy.parent, "subfolder": toy.name} if subfolder else {"path_or_id": toy}
    model = AutoModelForCausalLM.from_pretrained(**source, trust_remote_code=True)
    assert type(model).__name__ == "ToyForCausalLM"
    assert type(model).__module__.startswith("transformers_modules.")
    assert type(model.config).__name__ == "ToyConfig"
    assert_same(model.state_dict(), llama.state_dict())
    assert_same(model.state_dict_adapter.to_hf(model.state_dict()), llama.state_dict())


def test_registered_family_takes_precedence_over_remote_code(toy: Path, llama: PreTrainedModel) -> None:
    for name in ("configuration_toy.py", "modeling_toy.py"):
        (toy / name).write_text("raise AssertionError('was run')")
    edit_config(toy, model_type="llama", architectures=["LlamaForCausalLM"])
    for trust in (True, False):
        model = AutoModelForCausalLM.from_pretrained(toy, trust_remote_code=trust)
        assert type(model) is llama_family.LlamaForCausalLM
        assert_same_model(model, llama)
