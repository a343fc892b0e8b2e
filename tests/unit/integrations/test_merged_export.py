"""Exporting a model with PEFT adapters gives its merged weights. The model does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from checkpoints import assert_same, stored
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nrl_models import AutoModelForCausalLM, export_adapter, registry
from nrl_models.common.modules import peft_modules
from nrl_models.common.state_dict import merged
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import StateDictError
from nrl_models.logprobs import Sampling
from nrl_models.testing.case import FamilyCase

TARGETS = ["q_proj", "v_proj", "up_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE, MIXTURE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, **{"target_modules": TARGETS, "init_lora_weights": False, **options})


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LoRA": (DENSE, lora),
    "all linears, rsLoRA": (DENSE, lambda: lora(target_modules="all-linear", use_rslora=True)),
    "DoRA": (DENSE, lambda: lora(use_dora=True)),
    "LoHa": (DENSE, lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False)),
    "IA3": (DENSE, lambda: peft.IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"])),
    "modules_to_save linear": (DENSE, lambda: lora(target_modules=["v_proj"], modules_to_save=["q_proj"])),
    "modules_to_save layer": (DENSE, lambda: lora(target_modules=["v_proj"], modules_to_save=["mlp"])),
    "modules_to_save head": (DENSE, lambda: lora(modules_to_save=["lm_head"])),
    "bias all": (DENSE, lambda: lora(bias="all")),
    "embeddings": (DENSE, lambda: lora(target_modules=["embed_tokens"])),
    "trainable tokens": (DENSE, lambda: lora(trainable_token_indices={"embed_tokens": [3, 5]})),
    "target_parameters": (DENSE, lambda: lora(target_parameters=["self_attn.k_proj.weight"])),
    "experts": (MIXTURE, lambda: lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "GPT-OSS experts": ("GptOssForCausalLM", lambda: lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "latents": (
        "DeepseekV3ForCausalLM",
        lambda: lora(target_modules=["kv_a_proj_with_mqa"], target_parameters=EXPERTS),
    ),
}


def adapted(architecture: str, config: Any) -> Any:
    """Return a model with an adapter that changes its output."""
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(FamilyCase(registry.model_class(architecture)).model()), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def export(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in export_adapter(model).iter_export(model, **options)}


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    plain = copy.deepcopy(model).merge_and_unload()
    return dict(type(plain).state_dict_adapter.fget(plain).iter_export(plain))


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_export_matches_merge_and_unload(name: str) -> None:
    architecture, config = CONFIGS[name]
    model = adapted(architecture, config())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modules = [(key, type(module)) for key, module in model.named_modules()]
    expected = merged_by_peft(model)
    for options in ({}, {"max_bytes": 2**14}, {"layout": "transformers"}):
        sent = export(model, **options)
        plan = export_adapter(model).export_plan(layout=options.get("layout", "hub"))
        assert [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in sent.items()] == plan
        if "layout" not in options:
            assert_same(sent, expected)
    assert_same(dict(model.state_dict()), before)
    assert [(key, type(module)) for key, module in model.named_modules()] == modules
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_export_changes_adapted_weights() -> None:
    """The adapter changes weights, so the comparisons above are not trivially true."""
    model = adapted(MIXTURE, CONFIGS["experts"][1]())
    sent = export(model)
    plain = FamilyCase(registry.model_class(MIXTURE)).model()
    before = dict(plain.state_dict_adapter.iter_export(plain))
    assert sent.keys() == before.keys()
    changed = {name for name, tensor in sent.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in sent if "q_proj" in name or ".mlp.experts." in name}


def test_export_follows_active_adapter() -> None:
    """The export matches the forward: only the active adapter, no disabled adapter, no merged adapter twice."""
    model = adapted(DENSE, lora())
    model.add_adapter("second", lora(target_modules=["k_proj"]))
    first = export(model)
    assert_same(first, merged_by_peft(model))
    model.set_adapter("second")
    second = export(model)
    assert not torch.equal(*(sent["model.layers.0.self_attn.k_proj.weight"] for sent in (first, second)))
    assert_same(second, merged_by_peft(model))
    model.set_adapter("default")
    plain = FamilyCase(registry.model_class(DENSE)).model()
    with model.disable_adapter():
        assert_same(export(model), dict(plain.state_dict_adapter.iter_export(plain)))
    model.merge_adapter()
    assert_same(export(model), first)
    model.unmerge_adapter()


@pytest.mark.parametrize(
    "name", ["LoRA", "DoRA", "IA3", "modules_to_save linear", "embeddings", "trainable tokens", "experts"]
)
def test_disabled_adapters_are_not_exported(name: str) -> None:
    """PEFT unmerges adapters that are merged in place in the next forward."""
    architecture, config = CONFIGS[name]
    model = adapted(architecture, config())
    plain = FamilyCase(registry.model_class(architecture)).model()
    expected = dict(plain.state_dict_adapter.iter_export(plain))
    with model.disable_adapter():
        assert_same(export(model), expected)
    model.merge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(export(model), expected, rtol=1e-4, atol=1e-4)


def test_mixed_adapters_and_bare_tuner() -> None:
    def plain() -> nn.Module:
        return copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model())

    mixed = get_peft_model(plain(), lora(), mixed=True)
    mixed.add_adapter("second", peft.LoHaConfig(r=4, target_modules=["q_proj", "k_proj"], init_weights=False))
    mixed.set_adapter(["default", "second"])
    for model in (mixed, peft.LoraModel(plain(), lora(), "default")):
        expected = copy.deepcopy(model).merge_and_unload()
        torch.testing.assert_close(export(model), export(expected), rtol=1e-5, atol=1e-6)
        assert not torch.equal(
            expected.model.layers[0].self_attn.q_proj.weight, plain().model.layers[0].self_attn.q_proj.weight
        )


def test_nested_adapters() -> None:
    """PEFT wraps a linear with LoRA in the module of a second `PeftModel`."""
    base = copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model())
    torch.manual_seed(0)
    get_peft_model(base, lora(target_modules=["q_proj"]))
    model = get_peft_model(base, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    plain = copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model())
    plain.load_state_dict(export(model))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


INSIDE_COPIES: dict[str, tuple[str, dict[str, Any]]] = {
    "copies": (
        "VisionEncoderDecoderModel",
        {
            "target_modules": ["encoder.layers.0.attention.q_proj"],
            "modules_to_save": ["word_embeddings", "decoder"],
        },
    ),
    "LoRA": (
        DENSE,
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["layers.1.self_attn.q_proj.weight"],
            "modules_to_save": ["1"],
        },
    ),
    "LoRA on experts": (
        MIXTURE,
        {"target_modules": ["v_proj"], "target_parameters": EXPERTS[:1], "modules_to_save": ["1"]},
    ),
}
"""Adapter options that put copies or adapters inside a module that PEFT trains as a copy."""


@pytest.mark.parametrize("name", INSIDE_COPIES)
def test_export_of_adapters_inside_copied_module_matches_forward(name: str) -> None:
    """PEFT's `merge_and_unload` leaves these in the model."""
    architecture, options = INSIDE_COPIES[name]
    model = adapted(architecture, lora(**options))
    outer = [module for _, module in peft_modules(model) if hasattr(module, "modules_to_save")]
    assert any(list(peft_modules(module.modules_to_save["default"])) for module in outer)
    adapter = export_adapter(model)
    sent = {key: tensor.clone() for key, tensor in adapter.iter_export(model)}
    assert list(sent) == [key for key, *_ in adapter.export_plan()]
    case = FamilyCase(registry.model_class(architecture))
    plain = copy.deepcopy(case.model()).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    for key, tensor in plain.state_dict_adapter.from_hf(sent, strict=False).items():
        owner, _, attribute = key.rpartition(".")
        setattr(plain.get_submodule(owner), attribute, nn.Parameter(tensor))  # PEFT unties copies
    inputs = case.inputs(length=8)
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)
    with model.disable_adapter():
        assert_same(export(model), dict(case.model().state_dict_adapter.iter_export(case.model())))


def test_export_adapter_of_model_without_adapters() -> None:
    model = FamilyCase(registry.model_class(DENSE)).model()
    assert export_adapter(model) is model.state_dict_adapter


@pytest.mark.usefixtures("accepts_installed_peft")
def test_export_after_transformers_add_adapter() -> None:
    """Adapters added by transformers' `add_adapter`, without a `PeftModel`."""
    model = copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model())
    model.add_adapter(lora())
    wrapped = get_peft_model(copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model()), lora())
    values = {key.removeprefix("base_model.model."): tensor for key, tensor in wrapped.state_dict().items()}
    model.load_state_dict({key: values[key] for key in model.state_dict()})
    assert_same(export(model), merged_by_peft(wrapped))


def test_refit_without_merging_raises() -> None:
    """Without merging, the refit sends nothing: neither base weights alone nor names that engines do not know."""
    plain = copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model())
    before = plain.state_dict_adapter
    model = get_peft_model(plain, lora())
    engine = HFEngine(copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model()))
    for adapter in (before, plain.state_dict_adapter):
        for source in (plain, model):
            with pytest.raises(StateDictError, match=r"nrl_models\.export_adapter\(model\)\.iter_export\(model\)"):
                engine.refit(adapter.iter_export(source), partial=True)
    with pytest.raises(StateDictError, match="would lack the adapters"):
        plain.state_dict_adapter.export_plan()
    engine.generate([[1, 2]], Sampling(), max_new_tokens=1)  # the engine still works, because no weights were sent
    engine.refit(export_adapter(model).iter_export(model))
    assert_same(dict(engine.model.state_dict_adapter.iter_export(engine.model)), merged_by_peft(model))


# Tied embeddings

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
BOTH = ["embed_tokens", "lm_head"]
ON_TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "copies of embeddings and head": ({"modules_to_save": BOTH}, True),
    "copy of head": ({"modules_to_save": ["lm_head"]}, True),
    "shared copy of embeddings and head": ({"modules_to_save": BOTH, "ensure_weight_tying": True}, False),
    "LoRA on embeddings and head": ({"target_modules": BOTH}, True),
    "shared LoRA on embeddings and head": ({"target_modules": BOTH, "ensure_weight_tying": True}, False),
    "trainable tokens": ({"trainable_token_indices": {"embed_tokens": [3, 5]}}, False),
    "different trainable tokens": ({"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [4]}}, True),
    "neither embeddings nor head": ({}, False),
}
"""Adapter options for a tied model, and whether merging unties the model."""


@pytest.mark.parametrize("name", ON_TIED)
def test_export_of_tied_model_matches_forward(name: str) -> None:
    options, unties = ON_TIED[name]
    case = FamilyCase(registry.model_class(DENSE), tiny={"tie_word_embeddings": True})
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(case.model()), lora(**copy.deepcopy(options))).eval()  # PEFT modifies lists
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    adapter = export_adapter(model)
    sent = dict(adapter.iter_export(model))
    assert list(sent) == [key for key, *_ in adapter.export_plan()]
    assert (HEAD in sent) is unties
    config = case.config
    config.tie_word_embeddings = not unties
    plain = case.model_class.from_config(config).eval()
    plain.load_state_dict(plain.state_dict_adapter.from_hf(sent))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-4)


def test_head_untied_by_peft_is_kept(tmp_path: Path) -> None:
    case = FamilyCase(registry.model_class(DENSE), tiny={"tie_word_embeddings": True})
    model = get_peft_model(copy.deepcopy(case.model()), lora(modules_to_save=BOTH))
    before = model.get_base_model().state_dict_adapter
    with torch.no_grad():
        model.base_model.model.lm_head.weight.add_(1)
    merged_model = model.merge_and_unload()
    assert not merged_model.config.tie_word_embeddings
    head = merged_model.lm_head.weight
    assert not torch.equal(head, merged_model.model.embed_tokens.weight)
    for adapter in (merged_model.state_dict_adapter, export_adapter(merged_model)):
        assert torch.equal(dict(adapter.iter_export(merged_model))[HEAD], head)
    with pytest.raises(StateDictError, match="would lack the adapters"):
        before.export_plan()
    for state_dict in (None, merged_model.state_dict()):
        merged_model.save_pretrained(tmp_path, state_dict=state_dict)
        assert torch.equal(case.model_class.from_pretrained(tmp_path).lm_head.weight, head)


# Unsupported adapters


@pytest.mark.parametrize(
    ("wrap", "inner"), [(AveragedModel, "module"), (nn.Sequential, "0")], ids=["moving average", "sequence"]
)
def test_export_of_unsupported_wrapper_raises(wrap: Callable[[nn.Module], nn.Module], inner: str) -> None:
    model = wrap(FamilyCase(registry.model_class(DENSE)).model())
    with pytest.raises(StateDictError, match=rf"{type(model).__name__}: is neither .*\n.*pass .* model\.{inner}"):
        export_adapter(model)
    assert export(model.get_submodule(inner))
    with pytest.raises(StateDictError, match="NoneType: is neither"):
        export_adapter(None)  # type: ignore[arg-type]
    adapter = model.get_submodule(inner).state_dict_adapter
    for call in (lambda: next(adapter.iter_export(model)), lambda: adapter.hf_views(model)):
        with pytest.raises(StateDictError, match=rf"pass the model inside: model\.{inner}"):
            call()


@pytest.mark.parametrize("name", ["LoRA", "modules_to_save linear", "embeddings", "experts"])
def test_views_exclude_merged_weights(name: str) -> None:
    architecture, config = CONFIGS[name]
    model = adapted(architecture, config())
    adapter, sent = export_adapter(model), export(model)
    views = adapter.hf_views(model)
    assert_same(views, {key: sent[key] for key in views})
    plain = FamilyCase(registry.model_class(architecture)).model()
    adapted_modules = tuple(name for name, _ in peft_modules(model.get_base_model()))
    expected = [key for key in plain.state_dict_adapter.hf_views(plain) if not key.startswith(adapted_modules)]
    assert sorted(views) == sorted(expected)


def test_hf_views_with_adapters_raise() -> None:
    before = copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model()).state_dict_adapter
    model = adapted(DENSE, lora())
    inner = model.get_base_model()
    for adapter, model_ in [(inner.state_dict_adapter, inner), (inner.state_dict_adapter, model), (before, model)]:
        with pytest.raises(StateDictError, match="export_adapter"):
            adapter.hf_views(model_)


@pytest.mark.parametrize("name", ["LoRA", "experts", "embeddings"])
def test_save_merged_weights_without_unloading_adapter(name: str, tmp_path: Path) -> None:
    architecture, config = CONFIGS[name]
    model = adapted(architecture, config())
    base = model.get_base_model()
    adapter = export_adapter(model)
    merged_state = adapter.from_hf({key: tensor.clone() for key, tensor in adapter.iter_export(model)}, strict=False)
    base.save_pretrained(tmp_path, state_dict=merged_state)
    assert_same(stored(tmp_path), export(model))
    for with_adapters in (model.state_dict(), base.state_dict()):
        with pytest.raises(StateDictError, match=r"save_pretrained\(folder, state_dict=merged\)"):
            base.save_pretrained(tmp_path, state_dict=with_adapters)
    assert_same(stored(tmp_path), export(model))


def test_prompt_tuning_raises() -> None:
    model = get_peft_model(
        copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model()),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    )
    with pytest.raises(StateDictError, match=r"prompt_encoder\.default\.embedding\.weight: reaches no weight"):
        export_adapter(model)


def test_unknown_parameter_in_adapter_raises() -> None:
    model = adapted(DENSE, lora())
    model.get_base_model().model.layers[1].self_attn.q_proj.stray = nn.Parameter(torch.ones(2))
    with pytest.raises(StateDictError, match=r"model\.layers\.1\.self_attn\.q_proj\.stray: reaches no weight"):
        export_adapter(model)


def test_adapter_on_one_of_two_tied_weights_raises() -> None:
    case = FamilyCase(registry.model_class(DENSE), tiny={"tie_word_embeddings": True})
    model = get_peft_model(copy.deepcopy(case.model()), lora(target_modules=["embed_tokens"]))
    with pytest.raises(StateDictError, match=r"lm_head\.weight: is tied to model\.embed_tokens\.weight, and only one"):
        export_adapter(model)
    with model.disable_adapter():
        assert HEAD not in dict(export_adapter(model).iter_export(model))


def test_quantized_model_with_adapter_raises(llama_checkpoint: Path) -> None:
    pytest.importorskip("bitsandbytes")
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint, quantization_config=quantization, device_map="cpu")
    with pytest.raises(StateDictError, match="is quantized") as caught:
        export_adapter(get_peft_model(model, lora()))
    (advice,) = [line for line in str(caught.value).splitlines() if "What to do" in line]
    assert "load the adapter on a model without quantization and shards" in advice


UNMERGEABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "lora_bias": (
        lambda: lora(lora_bias=True),
        r"q_proj: has an adapter that PEFT does not merge: Impossible to merge",
    ),
    "aLoRA": (
        lambda: lora(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"),
        r"v_proj: has an adapter that PEFT does not merge: aLoRA does not support merging",
    ),
    "Poly": (lambda: peft.PolyConfig(r=4, target_modules=TARGETS, n_tasks=2, n_skills=2), r"up_proj: has an adapter"),
    "adaption prompts": (
        lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"),
        r"model\.layers\.1\.self_attn: is PEFT's AdaptedAttention, which is merged into no weight",
    ),
    "prefix": (
        lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        r"prompt_encoder\.default\.embedding\.weight: reaches no weight",
    ),
}


@pytest.mark.parametrize("name", UNMERGEABLE)
def test_unmergeable_adapter_raises_before_export(name: str) -> None:
    config, message = UNMERGEABLE[name]
    model = get_peft_model(copy.deepcopy(FamilyCase(registry.model_class(DENSE)).model()), config())
    with pytest.raises(StateDictError, match=message):
        export_adapter(model)


def test_adapter_that_becomes_unmergeable_raises_before_export() -> None:
    model = adapted(DENSE, lora())
    exporter = export_adapter(model)
    model.add_adapter("second", lora(lora_bias=True, target_modules=["v_proj"]))
    model.set_adapter("second")
    with pytest.raises(StateDictError, match=r"v_proj: has an adapter that PEFT does not merge"):
        next(exporter.iter_export(model))
    with model.disable_adapter():
        assert next(exporter.iter_export(model))


def test_merge_error_of_peft_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(DENSE, lora())

    def fails(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no")

    monkeypatch.setattr("peft.tuners.lora.layer.Linear.merge", fails)
    with pytest.raises(StateDictError, match=r"q_proj: has an adapter that PEFT does not merge: no"):
        export_adapter(model)


# Planted bugs


@pytest.mark.parametrize("bug", ["base weights are exported", "model is merged"])
def test_export_checks_detect_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "base weights are exported":
        monkeypatch.setattr(merged, "is_disabled", lambda wrapper: True)
    else:
        monkeypatch.setattr(merged, "copy", SimpleNamespace(deepcopy=lambda module, _: module))
    with pytest.raises(AssertionError):
        test_export_matches_merge_and_unload("experts")
