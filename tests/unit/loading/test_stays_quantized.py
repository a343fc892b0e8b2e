"""Models that stay quantized are saved with transformers' names, and with the tensors that transformers drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import assert_same, edit_weights, stored
from transformers import BitsAndBytesConfig, TorchAoConfig

from nrl_models import AutoModelForCausalLM, AutoModelForImageTextToText, ConfigurationError, StateDictError, registry
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.family import FamilyModel
from nrl_models.onboarding.convert import convert
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mtp_weights import mtp_tensors

pytestmark = pytest.mark.integrations

MTP = "Glm4MoeForCausalLM"


def quantization(method: str) -> Any:
    if method.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
        in_8bit = method == "bitsandbytes 8 bit"
        return BitsAndBytesConfig(load_in_8bit=in_8bit, load_in_4bit=not in_8bit, bnb_4bit_compute_dtype=torch.float32)
    return TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())


def load(auto: Any, folder: Path, method: str) -> Any:
    return auto.from_pretrained(folder, quantization_config=quantization(method), dtype=torch.float32)


def with_mtp(folder: Path) -> Path:
    reference = FamilyCase(registry.model_class(MTP)).reference()
    reference.save_pretrained(folder)
    edit_weights(folder, lambda tensors: tensors.update(mtp_tensors(reference)))
    return folder


def assert_saved(model: FamilyModel, hf_model: Any, folder: Path, **options: Any) -> None:
    """Check that a model saves the same tensors as transformers' model, plus its kept tensors."""
    for name, saved in (("ours", model), ("theirs", hf_model)):
        saved.save_pretrained(folder / name, **options)
    kept = {name: tensor.read() for name, tensor in kept_by(model).items()}
    assert_same(stored(folder / "ours"), stored(folder / "theirs") | kept)


@pytest.mark.long
@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MixtralForCausalLM", "Qwen2_5_VLForConditionalGeneration"]
)
def test_saved_names_match_transformers(architecture: str, method: str, tmp_path: Path) -> None:
    name = "AutoModelForCausalLM" if architecture.endswith("CausalLM") else "AutoModelForImageTextToText"
    auto_class = AutoModelForCausalLM if architecture.endswith("CausalLM") else AutoModelForImageTextToText
    FamilyCase(registry.model_class(architecture)).reference().save_pretrained(tmp_path / "source")
    models = [load(auto, tmp_path / "source", method) for auto in (auto_class, getattr(transformers, name))]
    assert_saved(*models, tmp_path)
    assert_saved(*models, tmp_path / "memory", save_original_format=False)


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
def test_mtp_weights_are_saved(method: str, tmp_path: Path) -> None:
    folder = with_mtp(tmp_path / "source")
    autos = (AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    model, hf_model = (load(auto, folder, method) for auto in autos)
    assert kept_by(model)
    assert_saved(model, hf_model, tmp_path)
    convert(tmp_path / "ours", tmp_path / "converted")
    assert_same(stored(tmp_path / "converted"), stored(tmp_path / "ours"))


@pytest.mark.long
@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
@pytest.mark.parametrize("key_mapping", [None, {r"^wrapped\.": ""}])
def test_kept_tensors_are_saved(method: str, key_mapping: Any, tmp_path: Path) -> None:
    """Published Gemma 3n checkpoints have unused keys and values for layers that share earlier ones."""
    folder = tmp_path / "source"
    FamilyCase(registry.model_class("Gemma3nForCausalLM")).reference().save_pretrained(folder)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        queries = [name for name in tensors if name.endswith("self_attn.q_proj.weight")]
        keys = {name.replace("q_proj", "k_proj") for name in queries} - tensors.keys()
        tensors |= {key: torch.randn(64, 256) for key in keys}
        for name in list(tensors):
            tensors[f"wrapped.{name}" if key_mapping and "self_attn" in name else name] = tensors.pop(name)

    edit_weights(folder, edit)
    options: dict[str, Any] = {"key_mapping": key_mapping, "dtype": torch.float32}
    expected = {
        name: kept.read() for name, kept in kept_by(AutoModelForCausalLM.from_pretrained(folder, **options)).items()
    }
    assert expected
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization(method), **options)
    assert_same({name: kept.read() for name, kept in kept_by(model).items()}, expected)
    model.save_pretrained(tmp_path / "saved")
    saved = stored(tmp_path / "saved")
    assert_same({name: saved[name] for name in expected}, expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert kept_by(again).keys() == expected.keys()


@pytest.mark.parametrize("method", ["bitsandbytes", "bitsandbytes 8 bit", "torchao"])
def test_partial_key_mapping(method: str, tmp_path: Path) -> None:
    """Reverting the regular expression would also rename other tensors."""
    folder = tmp_path / "source"
    FamilyCase(registry.model_class("LlamaForCausalLM")).reference().save_pretrained(folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.0." in name]:
            tensors[name.replace("model.", "decoder.")] = tensors.pop(name)

    edit_weights(folder, rename)
    options: dict[str, Any] = {"quantization_config": quantization(method), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, key_mapping={r"^decoder\.": "model."}, **options)
    model.save_pretrained(tmp_path / "saved")
    names = stored(tmp_path / "saved").keys()
    modules = {name.removesuffix(".weight") for name in stored(folder)}
    # Parts of quantized weights are next to `weight`, or below it (bitsandbytes in 4 bit).
    saved = {name.partition(".weight.")[0].removesuffix(".weight") for name in names}
    assert {name if name in modules else name.rpartition(".")[0] for name in saved} == modules


def test_saving_state_dict_of_quantized_model_raises(llama_checkpoint: Path, tmp_path: Path) -> None:
    model = load(AutoModelForCausalLM, llama_checkpoint, "bitsandbytes")
    with pytest.raises(StateDictError, match="stays quantized and saves its own tensors"):
        model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict())
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("package", ["torch", "torchao"])
@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
def test_saving_weights_quantized_in_place_raises(package: str, llama_checkpoint: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    complete = model.state_dict()
    if package == "torch":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    else:
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with pytest.raises(StateDictError, match="quantized weights cannot be saved") as caught:
        model.save_pretrained(tmp_path / "saved")
    assert "model.layers.0.self_attn.q_proj.weight" in {problem.subject for problem in caught.value.problems}
    assert "quantization_config" in str(caught.value)
    assert not (tmp_path / "saved").exists()
    if package == "torchao":  # other values may be saved
        model.save_pretrained(tmp_path / "complete", state_dict=complete)
        assert_same(stored(tmp_path / "complete"), stored(llama_checkpoint))


@pytest.mark.usefixtures("accepts_installed_peft")
def test_saving_adapter_from_state_dict(llama_checkpoint: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = load(AutoModelForCausalLM, llama_checkpoint, "bitsandbytes")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    changed = {
        name: torch.ones_like(tensor) if "lora_" in name else tensor for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(tmp_path, state_dict=changed)
    saved = stored(tmp_path)
    assert saved
    assert all((tensor == 1).all() for tensor in saved.values())


@pytest.mark.parametrize("in_8bit", [True, False])
def test_tied_head_must_be_skipped_by_bitsandbytes(in_8bit: bool, tmp_path: Path) -> None:
    """A list of skipped modules replaces transformers' default, which skips the head. Its forward would then fail."""
    pytest.importorskip("bitsandbytes")
    case = FamilyCase(registry.model_class("LlamaForCausalLM"), tiny={"tie_word_embeddings": True})
    case.reference().save_pretrained(tmp_path)
    skipped = ["vision_tower"]
    config = BitsAndBytesConfig(load_in_8bit=in_8bit, load_in_4bit=not in_8bit, llm_int8_skip_modules=skipped)
    with pytest.raises(ConfigurationError, match="lm_head: is tied to model") as raised:
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert "add 'lm_head' to llm_int8_skip_modules" in str(raised.value)
    config.llm_int8_skip_modules = [*skipped, "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    assert model(torch.arange(8)[None]).logits.isfinite().all()
