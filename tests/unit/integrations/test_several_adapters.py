"""Several active adapters are exported only if PEFT merges them into the weights that its forward uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from torch import nn

from nrl_models import export_adapter, registry
from nrl_models.errors import StateDictError
from nrl_models.testing.case import FamilyCase

TARGETS = ["q_proj", "v_proj", "up_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE, MIXTURE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


def plain(architecture: str = DENSE) -> Any:
    return copy.deepcopy(FamilyCase(registry.model_class(architecture)).model())


def change(model: nn.Module) -> None:
    """Give the adapters values that change the model's output."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "default" in name or "second" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)


def with_two(first: Any, second: Any, architecture: str = DENSE) -> Any:
    """Return a model with two new active adapters."""
    model = get_peft_model(plain(architecture), first)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    return model.eval()


def assert_engine_computes_the_same(model: Any, architecture: str = DENSE) -> None:
    engine, ids = plain(architecture), torch.arange(8)[None]
    engine.load_state_dict(dict(export_adapter(model).iter_export(model)))
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(engine(ids).logits, expected, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            assert not torch.allclose(model(ids).logits, expected, atol=1e-2)


ADDED: dict[str, tuple[str, Callable[[], Any]]] = {
    "LoRA": (DENSE, lambda: LoraConfig(r=4, target_modules=[*TARGETS, "embed_tokens"])),
    "LoHa": (DENSE, lambda: peft.LoHaConfig(r=4, target_modules=TARGETS)),
    "IA3": (DENSE, lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["up_proj"])),
    "BOFT": (DENSE, lambda: peft.BOFTConfig(boft_block_size=4, target_modules=TARGETS)),
    "commuting rotations": (DENSE, lambda: OFTConfig(oft_block_size=2, target_modules=TARGETS)),
    "target_parameters": (DENSE, lambda: LoraConfig(r=4, target_parameters=["self_attn.k_proj.weight"])),
    "experts": (MIXTURE, lambda: LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADDED)
def test_two_active_adapters(name: str) -> None:
    architecture, config = ADDED[name]
    model = with_two(config(), config(), architecture)
    change(model)
    assert_engine_computes_the_same(model, architecture)


def oft(*targets: str) -> Any:
    return OFTConfig(oft_block_size=8, target_modules=list(targets or TARGETS))


OTHER_WEIGHTS: dict[str, Callable[[], Any]] = {
    "OFT": oft,
    "OSF": lambda: peft.OSFConfig(effective_rank=4, target_modules=TARGETS),
}


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_adapters_merged_into_different_weights_raise(name: str) -> None:
    """They raise before training, when new adapters change nothing yet, and name each linear."""
    config = OTHER_WEIGHTS[name]
    model = with_two(config(), config())
    with pytest.raises(StateDictError, match=r"\(default, second\), which PEFT merges into other weights") as caught:
        export_adapter(model)
    layers = model.config.num_hidden_layers
    assert len(caught.value.problems) == layers * len(TARGETS)
    model.base_model.set_adapter("second")
    exporter = export_adapter(model)
    change(model)
    assert_engine_computes_the_same(model)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(StateDictError, match="activate only one"):
        next(exporter.iter_export(model))
    with model.disable_adapter():
        assert next(exporter.iter_export(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_a_difference(dtype: torch.dtype) -> None:
    lora = LoraConfig(r=4, target_modules=TARGETS)
    assert export_adapter(with_two(lora, copy.deepcopy(lora)).to(dtype))
    with pytest.raises(StateDictError, match="which PEFT merges into other weights"):
        export_adapter(with_two(oft(), oft()).to(dtype))


def test_adapters_on_different_linears() -> None:
    model = with_two(oft("q_proj", "up_proj"), oft("v_proj"))
    change(model)
    assert_engine_computes_the_same(model)


def test_adapters_merged_in_place() -> None:
    """PEFT's forward then uses the merged weights too, and they are exported unchanged."""
    model = with_two(oft(), oft())
    change(model)
    model.base_model.merge_adapter()
    engine, ids = plain(), torch.arange(8)[None]
    engine.load_state_dict(dict(export_adapter(model).iter_export(model)))
    with torch.no_grad():
        torch.testing.assert_close(engine(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_failing_adapter_forward_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    model = with_two(oft(), oft())
    monkeypatch.setattr("peft.tuners.oft.layer.Linear.forward", fails)
    with pytest.raises(StateDictError, match=r"q_proj: has several active adapters, and .* cannot be compared .*: no"):
        export_adapter(model)
