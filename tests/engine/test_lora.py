"""Trained adapters reach vLLM as merged weights in a refit, or as vLLM's LoRA at run time."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from nrl_models import export_adapter
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.scores import final_scores
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling, token_mult_prob_error
from tests.engine.families import BOUND, tiny_model
from tests.engine.one_engine import OneEngine

DENSE, MIXTURE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
TARGETS: dict[str, dict[str, Any]] = {
    DENSE: {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    MIXTURE: {
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
NEW_TOKENS = 16


@pytest.fixture(params=[DENSE, MIXTURE])
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return with_adapter(request.param, tmp_path)


def with_adapter(architecture: str, folder: Path) -> Any:
    """Create a model with an effective adapter. `folder` receives the model without it as `base`, and the adapter."""
    model = tiny_model(architecture)
    model.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, init_lora_weights=False, **TARGETS[architecture])
    wrapped = peft.get_peft_model(model, config).eval()
    wrapped.save_pretrained(folder / "adapter")
    return wrapped


def mismatch(model: Any, engine: VLLMEngine, *, adapted: bool = True) -> float:
    """Return `token_mult_prob_error` between the engine's tokens and the trainer, with or without its adapter."""
    prompts = torch.randint(16, 200, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
    samples = engine.generate(prompts, Sampling(), max_new_tokens=NEW_TOKENS, seed=1)
    tokens = torch.tensor([[*sample.prompt, *sample.tokens] for sample in samples])
    sampled = torch.tensor([sample.logprobs for sample in samples], dtype=torch.float64)
    with nullcontext() if adapted else model.disable_adapter():
        trainer = HFEngine(model.get_base_model(), "trainer")
        return token_mult_prob_error(final_scores(trainer, tokens, NEW_TOKENS, Sampling()), sampled)


def test_refit_merges_adapter(adapted: Any, vllm: OneEngine, tmp_path: Path) -> None:
    engine = vllm(tmp_path / "base")
    assert mismatch(adapted, engine, adapted=False) <= BOUND
    assert mismatch(adapted, engine) > 1.5
    for _ in range(2):  # again after a step
        report = engine.refit(export_adapter(adapted).iter_export(adapted))
        assert not report.unwritten
        assert not report.stale_buffers
        assert mismatch(adapted, engine) <= BOUND
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.2)
        assert mismatch(adapted, engine) > 1.01


def test_use_adapter(vllm: OneEngine, tmp_path: Path) -> None:
    model = with_adapter(DENSE, tmp_path)
    engine = vllm(tmp_path / "base", enable_lora=True, max_lora_rank=8)
    assert mismatch(model, engine, adapted=False) <= BOUND
    for _ in range(2):  # again after a step, from the same folder
        engine.use_adapter(tmp_path / "adapter")
        assert engine.describe()["adapter"] == str(tmp_path / "adapter")
        assert mismatch(model, engine) <= BOUND
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.2)
        assert mismatch(model, engine) > 1.01
        model.save_pretrained(tmp_path / "adapter")
    engine.use_adapter(None)
    assert mismatch(model, engine, adapted=False) <= BOUND


def test_invalid_adapter_raises_and_keeps_engine_state(vllm: OneEngine, tmp_path: Path) -> None:
    model = with_adapter(DENSE, tmp_path)
    engine = vllm(tmp_path / "base", enable_lora=True, max_lora_rank=8)
    engine.use_adapter(tmp_path / "adapter")
    with pytest.raises(EngineError, match=r"has no adapter_config\.json"):
        engine.use_adapter(tmp_path / "base")
    larger = peft.get_peft_model(tiny_model(DENSE), peft.LoraConfig(r=16, target_modules=["q_proj"]))
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(EngineError, match=r"does not support the adapter in .*larger.*rank"):
        engine.use_adapter(tmp_path / "larger")
    with pytest.raises(EngineError, match=r"only supports adapters \(use_adapter\): start it without"):
        engine.refit(export_adapter(model).iter_export(model))
    assert not engine.capabilities().refit
    assert mismatch(model, engine) <= BOUND
    engine.use_adapter(None)
    assert mismatch(model, engine, adapted=False) <= BOUND


def foreign_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".model.layers.", ".decoder.layers."): tensor for name, tensor in tensors.items()}


def foreign_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add an adapter layer that the engine does not have, with the matrices of an existing one."""
    layer = {name: tensor for name, tensor in tensors.items() if "layers.1." in name}
    more = {name.replace("layers.1.", "layers.7."): tensor.clone() for name, tensor in layer.items()}
    return tensors | more


def without_a_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}


def without_a_part_of_a_fused_module(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.v_proj" not in name}


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.masked_fill(tensor > tensor.median(), float("nan")) for name, tensor in tensors.items()}


def as_integers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (tensor * 100).int() for name, tensor in tensors.items()}


def of_a_smaller_model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """vLLM would copy the matrices into a separate parameter."""
    smaller = {name: tensor[:-8].clone() for name, tensor in tensors.items() if "v_proj.lora_B" in name}
    return tensors | smaller


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, r"lora_A\.weight has \d+ NaN and 0 infinite values"),
        (as_integers, r"lora_A\.weight in .* has the dtype int32: expected a floating-point dtype"),
        (of_a_smaller_model, r"other sizes than the engine's model: model\.layers\.0\.self_attn\.v_proj \(256 to"),
        (foreign_prefix, r"ignores \d+ modules of the adapter in .*: decoder.layers.0.mlp.down_proj"),
        (foreign_layer, r"ignores 4 modules of the adapter in .*: model.layers.7"),
        (without_a_layer, r"has no matrices for 4 modules .*: model.layers.1.mlp.down_proj, .*layers_to_transform"),
        (without_a_part_of_a_fused_module, r"has no matrices for 1 modules .*: model.layers.0.self_attn.v_proj"),
        (lambda tensors: {}, "vLLM does not support the adapter|found no module"),
    ],
)
def test_partially_applicable_adapter_raises(
    vllm: OneEngine, tmp_path_factory: pytest.TempPathFactory, change: Any, message: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "partial-adapters"
    model = with_adapter(DENSE, folder)
    engine = vllm(folder / "base", enable_lora=True, max_lora_rank=8)
    engine.use_adapter(folder / "adapter")
    changed = shutil.copytree(folder / "adapter", folder / "changed", dirs_exist_ok=True)
    file = changed / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(EngineError, match=message):
        engine.use_adapter(changed)
    assert engine.describe()["adapter"] == str(folder / "adapter")
    assert mismatch(model, engine) <= BOUND
    engine.use_adapter(None)


def test_adapter_with_layers_to_transform(vllm: OneEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "partial-adapters"
    with_adapter(DENSE, folder)
    config = peft.LoraConfig(r=8, init_lora_weights=False, target_modules=["q_proj"], layers_to_transform=[1])
    model = peft.get_peft_model(tiny_model(DENSE), config).eval()
    model.save_pretrained(folder / "one-layer")
    engine = vllm(folder / "base", enable_lora=True, max_lora_rank=8)
    engine.use_adapter(folder / "one-layer")
    assert mismatch(model, engine) <= BOUND
    with pytest.raises(EngineError, match=r"enable_lora=True, with which vLLM cannot score existing"):
        engine.score([[1, 2, 3]], Sampling())
    assert not engine.capabilities().score
    assert mismatch(model, engine) <= BOUND
    engine.use_adapter(None)


def test_use_adapter_without_enable_lora_raises(vllm: OneEngine, tmp_path: Path) -> None:
    with_adapter(DENSE, tmp_path)
    with pytest.raises(EngineError, match=r"start it with enable_lora=True, and max_lora_rank"):
        vllm(tmp_path / "base").use_adapter(tmp_path / "adapter")


def test_vllm_lora_for_experts_requires_gpu(vllm: OneEngine, tmp_path: Path) -> None:
    """vLLM's kernel requires Triton. This test fails if a vLLM for CPUs supports it: then extend `test_use_adapter`."""
    model = with_adapter(MIXTURE, tmp_path)
    engine = vllm(tmp_path / "base", enable_lora=True, max_lora_rank=8)
    with pytest.raises(EngineError, match=r"module 'triton\.language' has no attribute"):
        mismatch(model, engine)
    vllm.stop()
