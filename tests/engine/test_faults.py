"""Faults planted in a real engine or a trainer. The report's verdict must name each one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import SETTINGS, changed, clear_prefix_cache, model_of
from transformers import Gemma2Config, Gemma2ForCausalLM

from nrl_models import AutoModelForCausalLM
from nrl_models.consistency.cells import Settings
from nrl_models.consistency.matrix import run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.refit import RefitChecker, RefitStep
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import Verdict
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine


class Bench:
    """Run the check on one checkpoint and return the verdict."""

    def __init__(self, path: Path, engine: VLLMEngine, trainer: HFEngine, prompts: Prompts, folder: Path) -> None:
        self.path, self.engine, self.trainer, self.prompts, self.folder = path, engine, trainer, prompts, folder

    def verdict(self, settings: Settings = SETTINGS) -> Verdict | None:
        """Return the verdict of the only cell. None if it passes."""
        clear_prefix_cache(self.engine)
        store = Store(self.folder, asdict(settings), fresh=True)
        meter = Meter(self.engine, self.trainer, self.prompts, settings, store)
        report = run_matrix(str(self.path), meter, References(self.path))
        clear_prefix_cache(self.engine)
        assert not report.error
        verdict = report.results[0].verdict
        assert (report.verdict == "pass") == (verdict is None)
        if verdict is not None:
            assert verdict.summary in report.markdown()
        return verdict


@pytest.fixture
def llama(
    demo: Path, vllm: Callable[..., VLLMEngine], demo_trainer: HFEngine, demo_prompts: Prompts, tmp_path: Path
) -> Bench:
    """The demo's checkpoint."""
    return Bench(demo, vllm(demo), demo_trainer, demo_prompts, tmp_path / "store")


@pytest.fixture(scope="session")
def gemma2_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """A model with effective soft caps, a scaled embedding and a sliding window."""
    return make_checkpoint(Gemma2Config, Gemma2ForCausalLM, final_logit_softcapping=3.0)


@pytest.fixture
def gemma2(gemma2_checkpoint: Path, vllm: Callable[..., VLLMEngine], tmp_path: Path) -> Bench:
    """A model with more features that an engine can ignore."""
    trainer = HFEngine(AutoModelForCausalLM.from_pretrained(gemma2_checkpoint, dtype=torch.float32), "trainer")
    vocabulary = trainer.capabilities().vocabulary or 0
    return Bench(gemma2_checkpoint, vllm(gemma2_checkpoint), trainer, Prompts(None, vocabulary), tmp_path / "store")


def layer(model: torch.nn.Module, index: int) -> Any:
    return model.model.layers[index]


# Engine faults


def test_correct_engine_passes(llama: Bench) -> None:
    assert llama.verdict() is None


def test_wrong_rope_base(llama: Bench) -> None:
    model = model_of(llama.engine)
    rotary = layer(model, 0).self_attn.rotary_emb
    cache = rotary.cos_sin_cache
    size = 2 * (cache.shape[1] // 2)
    angles = torch.outer(torch.arange(len(cache)), 500_000.0 ** (-torch.arange(0, size, 2) / size))
    with changed(cache, torch.cat([angles.cos(), angles.sin()], 1)):
        verdict = llama.verdict()
    assert verdict.at_fault == ("engine decode", "engine prefill")
    assert "'rope_theta': 500000.0" in verdict.cause.message
    assert verdict.divergence.module == "model.layers.0.self_attn.o_proj"
    assert "between model.layers.0.self_attn.qkv_proj and" in str(verdict.divergence)


def test_scaled_weight(llama: Bench) -> None:
    weight = layer(model_of(llama.engine), 1).post_attention_layernorm.weight
    with changed(weight, weight * 1.5):
        verdict = llama.verdict()
    assert verdict.kind == "engine"
    assert verdict.divergence.module == "model.layers.1.post_attention_layernorm"
    assert "the expected one times 1.5" in str(verdict.divergence)


def test_temperature_not_applied(llama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's default: log-probabilities before the temperature is applied.
    sampler = llama.engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler
    monkeypatch.setattr(sampler, "logprobs_mode", "raw_logprobs")
    monkeypatch.setattr(sampler.topk_topp_sampler, "logprobs_mode", "raw_logprobs")
    verdict = llama.verdict(replace(SETTINGS, sampling=replace(SETTINGS.sampling, top_p=1.0)))
    assert verdict.at_fault == ("engine decode",)
    assert verdict.cause.message == "the temperature was not applied"


def test_scores_shifted_by_one_token(llama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    score = llama.engine.score

    def shifted(*args: Any, **kwargs: Any) -> list[list[float]]:
        return [[row[0], *row[:-1]] for row in score(*args, **kwargs)]

    monkeypatch.setattr(llama.engine, "score", shifted)
    verdict = llama.verdict()
    assert verdict.at_fault == ("engine prefill",)
    assert verdict.cause.message == "each token had the log-probability of the previous token"


def test_decoding_shifted_by_one_position(llama: Bench) -> None:
    model = model_of(llama.engine)
    batch = SETTINGS.batches[0]

    def with_shifted_positions(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = kwargs["positions"]
        return (args, kwargs | {"positions": positions + 1}) if len(positions) <= batch else None

    handle = model.register_forward_pre_hook(with_shifted_positions, with_kwargs=True)
    try:
        verdict = llama.verdict()
    finally:
        handle.remove()
    assert verdict.kind == "engine decode"
    assert "decoding one token after a cached prompt" in str(verdict.divergence)
    assert verdict.divergence.module.startswith("model.layers.0.self_attn")


def test_nan_in_engine(llama: Bench) -> None:
    weight = layer(model_of(llama.engine), 3).input_layernorm.weight
    with changed(weight, torch.full_like(weight, torch.nan)):
        verdict = llama.verdict()
    assert verdict.kind == "not finite"
    assert verdict.at_fault == ("engine decode", "engine prefill")


def test_bfloat16_engine_is_precision(
    demo: Path, vllm: Callable[..., VLLMEngine], demo_trainer: HFEngine, demo_prompts: Prompts, tmp_path: Path
) -> None:
    bench = Bench(demo, vllm(demo, dtype=torch.bfloat16), demo_trainer, demo_prompts, tmp_path / "store")
    verdict = bench.verdict()
    assert verdict.kind == "precision"
    assert verdict.at_fault == ()
    assert "Engine: bfloat16; trainer: float32" in verdict.summary


# Refit faults


@contextmanager
def refitted(bench: Bench, change: Callable[[Any], Any], settings: Settings = SETTINGS) -> Iterator[RefitStep]:
    """Refit the engine, train a step, and refit it with a fault. Restores everything afterwards."""
    model = bench.trainer.model
    original = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    checker = RefitChecker(str(bench.path), Meter(bench.engine, bench.trainer, bench.prompts, settings))
    with ExitStack() as stack:
        stack.callback(lambda: bench.engine.refit(model.state_dict_adapter.iter_export(model)))
        stack.callback(lambda: model.load_state_dict(original))
        assert checker.refit("first").passed
        assert checker.train() > 1.01
        yield checker.refit("second", change=change)


def test_layer_not_refitted(llama: Bench) -> None:
    def without(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in tensors if ".layers.2." not in name)

    with refitted(llama, without) as step:
        assert not step.passed
        assert any("parameters of the engine were not written: model.layers.2." in problem for problem in step.problems)
        verdict = step.result.verdict
    assert verdict.kind == "engine"
    # A step changes its norm by less than its projections.
    assert verdict.divergence.module in ("model.layers.2.input_layernorm", "model.layers.2.self_attn.qkv_proj")
    assert "it was not refitted" in str(verdict.divergence)


def test_output_embedding_not_refitted(llama: Bench) -> None:
    with refitted(llama, lambda tensors: ((n, t) for n, t in tensors if n != "lm_head.weight")) as step:
        assert any("lm_head.weight" in problem for problem in step.problems)
        verdict = step.result.verdict
    assert verdict.divergence.module == "logits"
    assert "it was not refitted" in str(verdict.divergence)


def test_gate_and_up_swapped_during_refit(llama: Bench) -> None:
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def swapped(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            for part, other in swap.items():
                if f".{part}." in name:
                    name = name.replace(part, other)
                    break
            yield name, tensor

    with refitted(llama, swapped) as step:
        assert any("arrived changed" in problem for problem in step.problems)
        verdict = step.result.verdict
    assert verdict.kind == "engine"
    assert verdict.divergence.module == "model.layers.0.mlp.gate_up_proj"
    assert "halves swapped" in str(verdict.divergence)


def test_stale_prefix_cache_after_refit(llama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.engine.llm, "reset_prefix_cache", lambda: True)
    # The measurement before the second refit leaves keys and values of its prompts in the cache, in blocks of 128.
    with refitted(llama, lambda tensors: tensors, replace(SETTINGS, lengths=(200,))) as step:
        assert not step.problems
        verdict = step.result.verdict
    monkeypatch.undo()
    clear_prefix_cache(llama.engine)
    assert verdict is not None
    assert verdict.kind == "engine decode"
    assert "before the last refit" in verdict.summary


# Trainer faults


def test_wrong_trainer_weight(llama: Bench) -> None:
    attention = layer(llama.trainer.model, 1).self_attn
    weight = attention.k_proj.weight
    with changed(weight, layer(llama.trainer.model, 2).self_attn.k_proj.weight.clone()):
        verdict = llama.verdict()
    assert verdict.kind == "trainer"
    assert "model.layers.1.self_attn.k_proj.weight" in str(verdict.divergence)
    assert "holds what belongs in model.layers.2.self_attn.k_proj.weight" in str(verdict.divergence)


# Faults that require a model with more features


def test_missing_soft_cap(gemma2: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemma2.verdict() is None
    monkeypatch.setattr(model_of(gemma2.engine).logits_processor, "soft_cap", None)
    verdict = gemma2.verdict()
    assert verdict.kind == "engine"
    assert verdict.cause.message == "the soft cap of the logits was not applied"
    assert verdict.divergence.module == "logits"


def test_stale_buffer(gemma2: Bench) -> None:
    normalizer = model_of(gemma2.engine).model.normalizer
    with changed(normalizer, torch.ones_like(normalizer)):
        verdict = gemma2.verdict()
    assert verdict.kind == "engine"
    assert "the expected one times 0.0625" in str(verdict.divergence)


def test_wrong_attention_scale(gemma2: Bench) -> None:
    with ExitStack() as stack:
        for layer in model_of(gemma2.engine).model.layers:
            original = layer.self_attn.attn.impl.scale
            stack.callback(setattr, layer.self_attn.attn.impl, "scale", original)
            layer.self_attn.attn.impl.scale = gemma2.trainer.model.config.head_dim**-0.5
        verdict = gemma2.verdict()
    assert verdict.kind == "engine"
    assert "query_pre_attn_scalar" in verdict.cause.message
