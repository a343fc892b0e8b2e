"""PEFT: adapters match those of the Hugging Face model in memory, in training and on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from checkpoints import assert_same, new_model, stored
from peft import AutoPeftModelForCausalLM, IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import peft as transformers_peft
from transformers.utils.peft_utils import check_peft_version

from nrl_models import AutoModelForCausalLM
from nrl_models.common.projections import report
from nrl_models.errors import CheckpointError, PackageVersionError, StateDictError

TARGETS = ["q_proj", "v_proj", "up_proj"]

# Each is trained on one model and loaded into the other. PiSSA and OLoRA rewrite the base weights at the start, and
# DoRA reads them in each step. IA3 scales a linear's input, so the linear no longer shares the group's input.
# `modules_to_save` trains a copy of a complete module, which may be in a group.
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    "rsLoRA, all linears": lambda: LoraConfig(r=4, target_modules="all-linear", use_rslora=True),
    "DoRA": lambda: LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "PiSSA": lambda: LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="pissa"),
    "OLoRA": lambda: LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="olora"),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=TARGETS),
    "IA3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "up_proj"], feedforward_modules=["up_proj"]),
    "modules_to_save head": lambda: LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "modules_to_save linear": lambda: LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["q_proj"]),
    "modules_to_save layer": lambda: LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["mlp"]),
    "bias all": lambda: LoraConfig(r=4, target_modules=TARGETS, bias="all"),
    "bias lora_only": lambda: LoraConfig(r=4, target_modules=TARGETS, bias="lora_only"),
    "target_parameters": lambda: LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["self_attn.k_proj.weight"]
    ),
}

Load = Callable[[Path], PreTrainedModel]


def theirs(folder: Path) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def ours(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, combine=True)


def logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def trained(model: nn.Module, input_ids: torch.Tensor) -> nn.Module:
    """Return the model after a few training steps."""
    model.train()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(3):
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def random_lora(**options: Any) -> LoraConfig:
    """Return a LoRA configuration with nonzero `B`, so that it changes the model from the start."""
    return LoraConfig(
        r=4, **{"target_modules": TARGETS, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    )


@pytest.fixture(params=["q, v, up", "all-linear"])
def adapter(request: pytest.FixtureRequest, llama_checkpoint: Path, tmp_path: Path) -> Path:
    """A random adapter of the Hugging Face model, saved by PEFT."""
    targets = TARGETS if request.param == "q, v, up" else request.param
    torch.manual_seed(0)
    get_peft_model(theirs(llama_checkpoint), random_lora(target_modules=targets)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


# Files


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(("train", "load"), [(theirs, ours), (ours, theirs)], ids=["theirs to ours", "ours to theirs"])
def test_trained_adapter_loads_in_other_library(
    name: str, train: Load, load: Load, llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = trained(get_peft_model(train(llama_checkpoint), ADAPTERS[name]()), input_ids)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(load(llama_checkpoint), tmp_path)
    expected = logits(model, input_ids)
    assert (expected - logits(train(llama_checkpoint), input_ids)).abs().max() > 0.01  # the training changed the model
    assert_close(logits(loaded, input_ids), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTERS)
def test_saved_adapter_files_match_transformers(
    name: str, llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    folders = []
    for load in (theirs, ours):
        torch.manual_seed(0)
        folders.append(tmp_path / load.__name__)
        trained(get_peft_model(load(llama_checkpoint), ADAPTERS[name]()), input_ids).save_pretrained(folders[-1])
    expected, actual = folders
    assert sorted(path.name for path in actual.iterdir()) == sorted(path.name for path in expected.iterdir())
    assert_close(stored(actual), stored(expected))
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    assert configs[1] == configs[0]


def test_adapter_without_task_type_names_transformers_class(
    llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    model = get_peft_model(ours(llama_checkpoint), random_lora(task_type=None))
    model.save_pretrained(tmp_path)
    mapping = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    assert mapping["base_model_class"] == "LlamaForCausalLM"
    assert mapping["parent_library"] == transformers.LlamaForCausalLM.__module__
    loaded = peft.AutoPeftModel.from_pretrained(tmp_path)
    assert type(loaded.get_base_model()) is transformers.LlamaForCausalLM
    assert_close(logits(loaded, input_ids), logits(model, input_ids))


def test_adapter_with_task_type_loads_with_auto_peft_model(
    llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    model = get_peft_model(ours(llama_checkpoint), random_lora())
    model.save_pretrained(tmp_path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.get_base_model()) is transformers.LlamaForCausalLM
    assert_close(logits(loaded, input_ids), logits(model, input_ids))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_modules": ["q_proj", "w1", "w2", "w3"]},  # the names of experts before they were stacked
    ],
    ids=["stacks", "old names"],
)
def test_adapter_on_experts_matches_transformers(
    options: dict[str, Any], mixtral_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    reference = get_peft_model(theirs(mixtral_checkpoint), random_lora(**options))
    reference.save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(ours(mixtral_checkpoint), tmp_path / "adapter")
    expected = logits(reference, input_ids)
    assert not torch.allclose(expected, logits(theirs(mixtral_checkpoint), input_ids), atol=0.1)
    assert_close(logits(model, input_ids), expected)
    for name, tuned in (("theirs", reference), ("ours", model)):
        tuned.merge_and_unload().save_pretrained(tmp_path / name)
    assert_close(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))


def test_loading_adapter_folder_raises(adapter: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)belongs to a PEFT adapter; the directory has no model.*PeftModel"):
        ours(adapter)


def test_adapter_in_model_folder_raises(adapter: Path, folder: Path) -> None:
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)adapter_config\.json: .*same directory as the model's files, .*move the adapter",
    ):
        ours(folder)


# In memory


def test_all_linear_targets_match_transformers(llama_checkpoint: Path) -> None:
    config = LoraConfig(target_modules="all-linear")
    expected, actual = (get_peft_model(load(llama_checkpoint), config) for load in (theirs, ours))
    assert actual.base_model.targeted_module_names == expected.base_model.targeted_module_names
    assert len(set(actual.base_model.targeted_module_names)) == 2 * 7
    assert [name for name, parameter in actual.named_parameters() if parameter.requires_grad] == [
        name for name, parameter in expected.named_parameters() if parameter.requires_grad
    ]


def test_group_name_as_target_raises(llama_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="not found in the base model"):
        get_peft_model(ours(llama_checkpoint), LoraConfig(target_modules=["qkv_proj"]))


UNMERGED_LAZILY: dict[str, Callable[[], Any]] = {
    "LoRA": random_lora,
    "DoRA": lambda: random_lora(use_dora=True),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS, init_weights=False),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=TARGETS),
    "SHiRA": lambda: peft.ShiraConfig(r=4, target_modules=TARGETS, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=TARGETS, total_step=10),
    "IA3": lambda: IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"]),
}


@pytest.mark.parametrize("name", UNMERGED_LAZILY)
def test_merged_adapters_can_be_disabled(name: str, llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    """PEFT unmerges each linear when it is called, without changing the version counters of the weights."""
    torch.manual_seed(0)
    base = ours(llama_checkpoint)
    expected = logits(base, input_ids)
    model = get_peft_model(base, UNMERGED_LAZILY[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.merge_adapter()
    with model.disable_adapter():
        first, second = logits(model, input_ids), logits(model, input_ids)
    assert_close(first, expected)
    assert_close(second, expected)
    assert not torch.allclose(logits(model, input_ids), expected, atol=1e-2)


def test_groups_are_unfused_with_adapters_and_fused_after_merge(
    adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor
) -> None:
    """Each adapter runs its linear separately, with other calls in between."""
    model = PeftModel.from_pretrained(ours(llama_checkpoint), adapter)
    expected = logits(model, input_ids)
    assert [group.joined for group in report(model)] == [False] * 4
    merged = model.merge_and_unload()
    assert [group.joined for group in report(merged)] == [True] * 4
    assert_close(logits(merged, input_ids), expected)
    assert [group.joined for group in report(merged)] == [True] * 4


def test_adapter_gradients_match_transformers(adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    gradients = []
    for load in (theirs, ours):
        model = PeftModel.from_pretrained(load(llama_checkpoint), adapter, is_trainable=True).train()
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        gradients.append(
            {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    expected, actual = gradients
    assert list(actual) == list(expected)
    assert all("lora_" in name for name in actual)
    assert_close(actual, expected)


def test_disabled_adapter_matches_base_model(adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    base = ours(llama_checkpoint)
    expected = logits(base, input_ids)
    model = PeftModel.from_pretrained(base, adapter)
    with_adapter = logits(model, input_ids)
    with model.disable_adapter():
        assert torch.equal(logits(model, input_ids), expected)
    assert torch.equal(logits(model, input_ids), with_adapter)
    assert not torch.allclose(with_adapter, expected, atol=0.1)


def test_disabled_modules_to_save_matches_base_model(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    base = ours(llama_checkpoint)
    expected = logits(base, input_ids)
    model = trained(get_peft_model(base, ADAPTERS["modules_to_save linear"]()), input_ids)
    assert not torch.allclose(logits(model, input_ids), expected, atol=0.01)
    with model.disable_adapter():
        assert_close(logits(model, input_ids), expected)


def test_multiple_adapters_match_transformers(adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    outputs = []
    for load in (theirs, ours):
        model = PeftModel.from_pretrained(load(llama_checkpoint), adapter)
        torch.manual_seed(1)
        model.add_adapter("second", random_lora(target_modules=["k_proj", "gate_proj"]))
        outputs.append([])
        for active in ("second", "default"):
            model.set_adapter(active)
            outputs[-1].append(logits(model, input_ids))
        # Each sequence of the batch uses another adapter.
        with torch.no_grad():
            names = ["second", "__base__"]
            outputs[-1].append(model(input_ids=input_ids, adapter_names=names, use_cache=False).logits)
    expected, actual = outputs
    assert_close(actual, expected)
    assert not torch.allclose(expected[0], expected[1], atol=0.1)


# Saving


@pytest.mark.parametrize("kind", ["wrapped", "merged in place", "injected"])
def test_saving_the_inner_model_raises(kind: str, llama_checkpoint: Path, tmp_path: Path) -> None:
    model: Any = ours(llama_checkpoint)
    if kind == "injected":
        peft.inject_adapter_in_model(random_lora(), model)
    else:
        wrapped = get_peft_model(model, random_lora())
        if kind == "merged in place":
            wrapped.merge_adapter()
    with pytest.raises(
        StateDictError,
        match=r"saved weights would lack the adapters[\s\S]*save_pretrained\(folder, state_dict=merged\)",
    ):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# Merging


def test_merged_model_saves_same_weights_as_transformers(
    adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    outputs = []
    for load in (theirs, ours):
        model = PeftModel.from_pretrained(load(llama_checkpoint), adapter)
        before = logits(model, input_ids)
        merged = model.merge_and_unload()
        assert_close(logits(merged, input_ids), before)
        merged.save_pretrained(tmp_path / load.__name__)
        outputs.append(before)
    assert_close(outputs[1], outputs[0])
    assert all("lora" not in name for name, _ in merged.named_modules())
    saved, expected = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert list(saved) == list(expected)
    assert_close(saved, expected)
    base = stored(llama_checkpoint)
    changed = {name for name in base if not torch.equal(base[name], saved[name])}
    assert changed == {name for name in base if not torch.equal(base[name], expected[name])}
    # Both libraries load it as the merged model.
    for load in (theirs, ours):
        assert_close(logits(load(tmp_path / "ours"), input_ids), outputs[0])


def test_modules_to_save_is_merged_into_saved_weights(
    llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    model = trained(get_peft_model(ours(llama_checkpoint), ADAPTERS["modules_to_save linear"]()), input_ids)
    expected = logits(model, input_ids)
    merged = model.merge_and_unload()
    assert_close(logits(merged, input_ids), expected)
    merged.save_pretrained(tmp_path)
    assert set(stored(tmp_path)) == set(stored(llama_checkpoint))
    for load in (theirs, ours):
        assert_close(logits(load(tmp_path), input_ids), expected)


def test_merge_and_unmerge_for_refit(
    adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    """Merge, send the weights to the engine, unmerge, and train on, as an RL trainer does in each step."""
    model = PeftModel.from_pretrained(ours(llama_checkpoint), adapter)
    base = model.get_base_model()
    expected = logits(model, input_ids)
    model.merge_adapter()
    sent = {
        name.replace(".base_layer", ""): tensor.clone()
        for name, tensor in base.state_dict_adapter.to_hf(base.state_dict()).items()
        if "lora_" not in name
    }
    model.unmerge_adapter()
    assert_close(logits(model, input_ids), expected)
    PeftModel.from_pretrained(theirs(llama_checkpoint), adapter).merge_and_unload().save_pretrained(tmp_path)
    merged = stored(tmp_path)
    assert set(sent) == set(merged)
    assert_close(sent, merged)


# The adapter of the state dict


def test_wrapped_model_names_match_transformers(adapter: Path, llama_checkpoint: Path) -> None:
    reference, model = (
        PeftModel.from_pretrained(load(llama_checkpoint), adapter).get_base_model() for load in (theirs, ours)
    )
    converted = model.state_dict_adapter.to_hf(model.state_dict(), layout="transformers")
    assert list(converted) == list(reference.state_dict())
    assert_same(converted, reference.state_dict())


def test_wrapped_model_loads_transformers_state_dict(
    adapter: Path, llama_checkpoint: Path, input_ids: torch.Tensor
) -> None:
    reference = PeftModel.from_pretrained(theirs(llama_checkpoint), adapter)
    other = new_model(reference.get_base_model().config, seed=1)
    other.save_pretrained(adapter.parent / "other")
    model = get_peft_model(ours(adapter.parent / "other"), LoraConfig.from_pretrained(adapter))
    loaded = model.load_state_dict(reference.state_dict())
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
    assert_close(logits(model, input_ids), logits(reference, input_ids))


# transformers' own integration


@pytest.fixture
def integrated(
    llama_checkpoint: Path, tmp_path: Path, accepts_installed_peft: None
) -> Iterator[dict[str, PreTrainedModel]]:
    """Return both models with the same adapter, added by transformers' `add_adapter`, and their saved files."""
    models = {}
    for load in (theirs, ours):
        models[load.__name__] = model = load(llama_checkpoint)
        torch.manual_seed(0)
        model.add_adapter(random_lora(), adapter_name="first")
        model.save_pretrained(tmp_path / load.__name__)
    return models


def test_add_adapter(integrated: dict[str, PreTrainedModel], input_ids: torch.Tensor, tmp_path: Path) -> None:
    model = integrated["ours"]
    assert_close(logits(model, input_ids), logits(integrated["theirs"], input_ids))
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    assert_same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    configs = [(tmp_path / name / "adapter_config.json").read_text() for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(("load", "source"), [(theirs, "ours"), (ours, "theirs"), (ours, "ours")])
def test_load_adapter(
    load: Load,
    source: str,
    integrated: dict[str, PreTrainedModel],
    llama_checkpoint: Path,
    input_ids: torch.Tensor,
    tmp_path: Path,
) -> None:
    model = load(llama_checkpoint)
    model.load_adapter(str(tmp_path / source))
    assert_close(logits(model, input_ids), logits(integrated[source], input_ids))


def test_switch_and_delete_adapters(
    integrated: dict[str, PreTrainedModel], llama_checkpoint: Path, input_ids: torch.Tensor
) -> None:
    outputs = []
    for name in ("theirs", "ours"):
        model = integrated[name]
        first = logits(model, input_ids)
        model.disable_adapters()
        off = logits(model, input_ids)
        model.enable_adapters()
        torch.manual_seed(1)
        model.add_adapter(random_lora(target_modules=["k_proj", "down_proj"]), adapter_name="second")
        second = logits(model, input_ids)
        model.delete_adapter("second")
        model.set_adapter("first")
        outputs.append([first, off, second, logits(model, input_ids)])
    expected, actual = outputs
    assert_close(actual, expected)
    assert torch.equal(actual[1], logits(ours(llama_checkpoint), input_ids))
    assert torch.equal(actual[3], actual[0])


def test_load_adapter_accepts_every_peft_that_transformers_accepts(
    integrated: dict[str, PreTrainedModel], llama_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_adapter` of transformers 5.24 does not check the version that `add_adapter` requires."""
    monkeypatch.setattr(transformers_peft, "MIN_PEFT_VERSION", "99.1")

    def error_of(load: Load) -> str:
        try:
            load(llama_checkpoint).load_adapter(str(tmp_path / "theirs"))
        except (ValueError, PackageVersionError) as error:
            return type(error).__name__
        return ""

    assert (error_of(theirs), error_of(ours)) in {("", ""), ("ValueError", "PackageVersionError")}


@pytest.mark.parametrize(
    ("method", "argument", "instead"),
    [
        ("add_adapter", LoraConfig(), "peft.get_peft_model"),
        ("load_adapter", "folder", "peft.PeftModel.from_pretrained"),
    ],
)
def test_adapter_methods_with_old_peft_raise(
    llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, method: str, argument: Any, instead: str
) -> None:
    """Which methods check the version depends on the version of transformers."""

    def checks(self: Any, *args: Any, **kwargs: Any) -> None:
        check_peft_version("99.1")

    monkeypatch.setattr(transformers_peft, "MIN_PEFT_VERSION", "99.1")
    monkeypatch.setattr(transformers_peft.PeftAdapterMixin, method, checks)
    model = ours(llama_checkpoint)
    with pytest.raises(PackageVersionError, match=rf"{method} of transformers .* needs peft>=99\.1.*{instead}"):
        getattr(model, method)(argument)
    assert not any("lora" in name for name, _ in model.named_parameters())
