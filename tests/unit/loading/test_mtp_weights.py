"""Weights of multi-token prediction (MTP): finding them, keeping all of them, and errors."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, edit_config, edit_weights, stored
from torch import nn
from versions import since

from nrl_models import AutoModel, AutoModelForCausalLM, registry
from nrl_models.common.state_dict import kept_tensors
from nrl_models.common.state_dict.kept_tensors import KeptTensor, kept_by
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import CheckpointError, StateDictError, UnknownArgumentError
from nrl_models.onboarding.inspect import inspect
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.mtp_weights import mtp_tensors

NUMBERED, PREFIXED = "Glm4MoeForCausalLM", "Qwen3NextForCausalLM"


@pytest.fixture(params=[NUMBERED, PREFIXED])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with MTP weights, and these weights."""
    return with_mtp(request.param, tmp_path / "published")


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    return with_mtp(NUMBERED, tmp_path / "numbered")[0]


def with_mtp(architecture: str, folder: Path, **tiny: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    reference = FamilyCase(registry.model_class(architecture), tiny=tiny).reference(torch.bfloat16)
    reference.save_pretrained(folder)
    mtp = mtp_tensors(reference)
    edit_weights(folder, lambda tensors: tensors.update(mtp))
    return folder, mtp


def export(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict_adapter.iter_export(model, **options))


# Kept weights


def test_mtp_weights_are_not_parameters(published: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, mtp = published
    model, without = (AutoModelForCausalLM.from_pretrained(folder, mtp=choice) for choice in ("keep", "drop"))
    assert_same(model.state_dict(), without.state_dict())
    assert not mtp.keys() & dict(model.named_parameters()).keys()
    assert kept_by(model).keys() == mtp.keys()
    assert not kept_by(without)


def test_save_options_do_not_change_mtp_weights(
    published: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, mtp = published
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, options in enumerate([{}, {"save_original_format": False}, {"max_shard_size": "100KB"}]):
        model.save_pretrained(tmp_path / str(number), **options)
        saved = stored(tmp_path / str(number))
        assert_same({name: saved[name] for name in mtp}, mtp)


@pytest.mark.parametrize("max_bytes", [None, 2**12])
def test_mtp_weights_are_exported_last_with_hub_names(
    published: tuple[Path, dict[str, torch.Tensor]], max_bytes: int | None
) -> None:
    folder, mtp = published
    model = AutoModelForCausalLM.from_pretrained(folder)
    exported = export(model, max_bytes=max_bytes)
    names = [name for name, _, _ in model.state_dict_adapter.export_plan()]
    assert list(exported) == names
    assert set(names[-len(mtp) :]) == set(mtp)
    assert_same({name: exported[name] for name in mtp}, mtp)
    in_memory = [name for name, _, _ in model.state_dict_adapter.export_plan(layout="transformers")]
    assert in_memory == list(export(model, layout="transformers", max_bytes=max_bytes))
    assert not mtp.keys() & set(in_memory)


def deep_copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def merged(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).merge_and_unload()


@pytest.mark.parametrize("change", [deep_copied, pickled, merged])
def test_mtp_weights_survive_copies_and_merges(
    change: Callable[[nn.Module], Any], published: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, mtp = published
    model = change(AutoModelForCausalLM.from_pretrained(folder))
    exported = export(model)
    assert_same({name: exported[name] for name in mtp}, mtp)
    model.save_pretrained(tmp_path / "again")
    saved = stored(tmp_path / "again")
    assert_same({name: saved[name] for name in mtp}, mtp)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.bfloat16])
def test_kept_tensor_pickling(dtype: torch.dtype) -> None:
    """torch cannot unpickle a float8 tensor, which Ray and cloudpickle would send."""
    values = torch.tensor([[0.5, 2.0], [1.0, 4.0]]).to(dtype)
    spec = TensorSpec((2, 2), torch.bfloat16)
    kept = KeptTensor(spec, (values, torch.tensor(2.0)), torch.Tensor.add_, is_mtp=True)
    for copied in (
        pickle.loads(pickle.dumps(kept)),
        pickled(kept),
        pickle.loads(bytes(ForkingPickler.dumps(kept))),
    ):
        assert (copied.spec, copied.compute, copied.is_mtp) == (spec, torch.Tensor.add_, True)
        assert copied.stored[0].dtype == dtype
        assert torch.equal(copied.stored[0].float(), values.float())
        assert copied.stored[1] == 2.0


def test_refit_of_engine_without_mtp_weights(published: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, mtp = published
    model = AutoModelForCausalLM.from_pretrained(folder)
    report = HFEngine.start(folder).refit(model.state_dict_adapter.iter_export(model))
    assert not report.unwritten
    assert mtp.keys() <= report.digests.keys()


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["NemotronH_Omni_Reasoning_V3", "KimiVLForConditionalGeneration"])
def test_mtp_weights_of_nested_language_model_are_kept(architecture: str, tmp_path: Path) -> None:
    """The inner class, not the outer one, defines their names or has the output embeddings."""
    folder, mtp = with_mtp(architecture, tmp_path / "published")
    model = registry.model_class(architecture).from_pretrained(folder)
    assert_same({name: kept.read() for name, kept in kept_by(model).items()}, mtp)


def test_mtp_layers_of_nested_config_are_kept(tmp_path: Path) -> None:
    """The inner configuration contains the number of layers. Without a number there are no MTP layers."""
    folder, mtp = with_mtp("Step3p7ForConditionalGeneration", tmp_path / "step", text_config=STEP)
    assert {name.partition(".eh_proj")[0] for name in mtp if "eh_proj" in name} == {"layers.2", "layers.3"}
    published = {f"model.{name}": tensor for name, tensor in mtp.items()}
    edit_weights(folder, lambda tensors: [tensors.update({f"model.{name}": tensors.pop(name)}) for name in mtp])
    model = registry.model_class("Step3p7ForConditionalGeneration").from_pretrained(folder)
    assert_same({name: kept.read() for name, kept in kept_by(model).items()}, published)


STEP = {"num_nextn_predict_layers": 2}


# Other weights


def test_mtp_drop_logs_once(published: tuple[Path, dict[str, torch.Tensor]], caplog: Any, tmp_path: Path) -> None:
    folder, mtp = published
    model = AutoModelForCausalLM.from_pretrained(folder, mtp="drop")
    (message,) = [record.message for record in caplog.records if "multi-token" in record.message]
    assert f"{len(mtp)} tensors of multi-token prediction" in message
    assert "mtp='drop'" in message
    assert not mtp.keys() & export(model).keys()


def test_base_model_skips_mtp_weights(
    published: tuple[Path, dict[str, torch.Tensor]], caplog: Any, tmp_path: Path
) -> None:
    folder, mtp = published
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not kept_by(model)
    assert mtp.keys() <= info["unexpected_keys"]
    assert "has no output embeddings" in caplog.text
    model.save_pretrained(tmp_path / "base")
    assert not mtp.keys() & stored(tmp_path / "base").keys()


@since("5.14")
def test_missing_declared_mtp_weights_are_logged(numbered: Path, caplog: Any) -> None:
    edit_weights(numbered, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.2." in name])
    model = AutoModelForCausalLM.from_pretrained(numbered)
    assert "declares 1 layers of multi-token prediction (num_nextn_predict_layers), but has none" in caplog.text
    assert not any(".layers.2." in name for name in export(model))


@pytest.mark.parametrize("value", ["train", "", True])
def test_invalid_mtp_value_raises(numbered: Path, value: Any) -> None:
    with pytest.raises(UnknownArgumentError, match=r"mtp=.*expected one of 'keep', 'drop'"):
        AutoModelForCausalLM.from_pretrained(numbered, mtp=value)


def test_incomplete_mtp_layers_raise(numbered: Path) -> None:
    edit_config(numbered, num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match=r"declares 2 MTP layers, and the checkpoint has number 2 only"):
        AutoModelForCausalLM.from_pretrained(numbered)
    assert not kept_by(AutoModelForCausalLM.from_pretrained(numbered, mtp="drop"))


def test_mtp_layer_without_projection_raises(numbered: Path) -> None:
    """The layer has the index of an MTP layer, but no projection that combines hidden states and embeddings."""
    edit_weights(numbered, lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.2\.enorm\.weight"):
        AutoModelForCausalLM.from_pretrained(numbered)


def test_undeclared_mtp_layers_raise(numbered: Path) -> None:
    edit_weights(numbered, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(numbered)


def test_unrelated_layer_number_raises(numbered: Path) -> None:
    """transformers ignores `model.layers.92` and `model.layers.46` of any GLM-4.5 checkpoint."""
    edit_weights(numbered, lambda tensors: tensors.update({"model.layers.92.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.92"):
        AutoModelForCausalLM.from_pretrained(numbered)


def test_export_after_losing_mtp_weights_raises(published: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, mtp = published
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapter = model.state_dict_adapter
    del model._kept_tensors
    with pytest.raises(StateDictError, match=f"{next(iter(mtp))}: is no longer kept"):
        dict(adapter.iter_export(model))
    assert not mtp.keys() & {name for name, _, _ in model.state_dict_adapter.export_plan()}


def test_load_state_dict_replaces_mtp_weights(published: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, mtp = published
    model = AutoModelForCausalLM.from_pretrained(folder)
    name = next(iter(mtp))
    before = {key: kept.read().clone() for key, kept in kept_by(model).items()}
    tensors = stored(folder)
    loaded = tensors | {name: torch.full_like(mtp[name], 3.0)}
    for wrong in ({name: torch.zeros(7)}, {name: mtp[name].to("meta")}, {"model.norm.weight": torch.zeros(3)}):
        with pytest.raises(StateDictError, match=f"{next(iter(wrong))}: "):
            model.load_state_dict(loaded | wrong)
        assert_same({key: kept.read() for key, kept in kept_by(model).items()}, before)
    with pytest.raises(StateDictError, match=r"\(2 problems\)"):
        model.load_state_dict(tensors | {name: torch.zeros(7), "model.norm.weight": torch.zeros(3)})
    model.load_state_dict(loaded)
    loaded[name].fill_(9.0)
    assert torch.equal(kept_by(model)[name].read(), torch.full_like(mtp[name], 3.0))


# Bugs that the generated test must detect


def kept_from_without_first(files: Any, keys: Any, *rest: Any, **options: Any) -> Any:
    return kept_tensors.kept_from(files, list(keys)[1:], *rest, **options)


def read_as_noise(kept: KeptTensor) -> torch.Tensor:
    return torch.randn(kept.spec.shape).to(kept.spec.dtype)


@pytest.mark.parametrize("bug", ["dropped", "random"])
def test_generated_test_detects_bug(bug: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nrl_models.testing.suite.test_files import test_mtp_weights_are_kept as generated

    if bug == "dropped":
        monkeypatch.setattr("nrl_models.loading.weights.kept_from", kept_from_without_first)
    else:
        monkeypatch.setattr(KeptTensor, "read", read_as_noise)
    with pytest.raises(AssertionError):
        generated(FamilyCase(registry.model_class(NUMBERED)), tmp_path)


# Saving a changed model


def test_saving_stale_embedding_copies_raises(numbered: Path, tmp_path: Path) -> None:
    norm = next(name for name in stored(numbered) if name.endswith("shared_head.norm.weight"))
    copy_name = norm.replace("shared_head.norm", "embed_tokens")
    edit_weights(numbered, lambda tensors: tensors.update({copy_name: torch.zeros(512, 256, dtype=torch.bfloat16)}))
    model = AutoModelForCausalLM.from_pretrained(numbered)
    model.save_pretrained(tmp_path / "same")
    model.resize_token_embeddings(520)
    with pytest.raises(CheckpointError) as caught:
        model.save_pretrained(tmp_path / "resized")
    assert [problem.subject for problem in caught.value.problems] == [copy_name]


def test_saving_stale_mtp_layer_numbers_raises(numbered: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(numbered)
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers -= 1
    with pytest.raises(CheckpointError) as caught:
        model.save_pretrained(tmp_path / "saved")
    assert {problem.subject for problem in caught.value.problems} >= set(kept_by(model))


# Names


def test_mtp_families_are_known() -> None:
    """Families that vLLM 0.32 uses for drafting (its `*_mtp` models), if transformers has them."""
    families = [
        *("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Ernie4_5_MoeForCausalLM"),
        *("ExaoneMoeForCausalLM", "Exaone4_5_ForConditionalGeneration", "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"),
        *("Glm4MoeLiteForCausalLM", "GlmOcrForConditionalGeneration", "HYV3ForCausalLM", "LongcatFlashForCausalLM"),
        *("MiMoV2FlashForCausalLM", "NemotronHForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Qwen3NextForCausalLM", "BailingHybridForCausalLM"),
    ]
    for architecture in families:
        model_class = registry.model_class(architecture)
        model = model_class.from_config(FamilyCase(model_class).config, device="meta")
        assert MTPNames(model).known, architecture


def test_inspect_reports_mtp_weights(published: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, mtp = published
    inspection = inspect(folder)
    assert inspection.mtp_tensors == len(mtp)
    assert inspection.mtp_bytes == sum(tensor.nbytes for tensor in mtp.values())
    declared = json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers", 0)
    assert inspection.mtp_announced == declared
