"""Further drifts: refits that write other values than they receive, adapter scales, shifted log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_drifts import found_within
from training_loop import Loop
from transformers import LlamaConfig, MixtralConfig, Qwen2Config

from nrl_models import Sample, export_adapter
from nrl_models.common.modules import peft_modules
from nrl_models.testing.tiny import tiny_config
from nrl_models.watch import Cause

Tensors = dict[str, torch.Tensor]


def written(loop: Loop, change: Callable[[Tensors], None]) -> None:
    """Change the engine's parameters after each refit. Its digests are those of the sent tensors."""
    refit = loop.engine._refit

    def changed(sent: Any, digests: bool) -> dict[str, Any]:
        report = refit(sent, digests)
        with torch.no_grad():
            change(dict(loop.engine.model.named_parameters()))
        return report

    loop.engine._refit = changed


def lora_of_scale_4(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def exchange_experts(tensors: Tensors) -> None:
    experts = tensors["model.layers.1.mlp.experts.down_proj"]
    experts.copy_(experts.flip(0))


def exchange_heads(tensors: Tensors) -> None:
    keys = tensors["model.layers.1.self_attn.k_proj.weight"]
    keys.copy_(keys.roll(len(keys) // 2, 0))


def round_norms(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.copy_(tensor.to(torch.float8_e4m3fn))


def zero_biases(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"].zero_()


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "change", "module"),
    [
        (MixtralConfig, exchange_experts, "model.layers.1.mlp"),
        (LlamaConfig, exchange_heads, "model.layers.1.self_attn"),
        (LlamaConfig, round_norms, "layernorm"),
        (Qwen2Config, zero_biases, "model.layers.1.self_attn"),
    ],
)
def test_refit_writing_wrong_values(config: Any, change: Callable[[Tensors], None], module: str) -> None:
    finding = found_within(Loop(tiny_config(config)), lambda loop: written(loop, change))
    assert finding.cause is Cause.MISSING_WEIGHTS
    assert any(module in name for name in finding.names)


@pytest.mark.long
@pytest.mark.parametrize(
    ("factor", "words"), [(2.0, "at twice their scale"), (0.5, "at half their scale"), (None, "at scale 1")]
)
def test_adapter_merged_with_wrong_scale(factor: float | None, words: str) -> None:
    pytest.importorskip("peft")
    loop = Loop(wrap=lora_of_scale_4)
    loop.watch.refit()

    def plant(loop: Loop) -> None:
        def scaled() -> list[tuple[str, torch.Tensor]]:
            layers = [module for _, module in peft_modules(loop.model)]
            scales = [dict(layer.scaling) for layer in layers]
            for layer in layers:
                layer.scaling = {name: scale * factor if factor else 1.0 for name, scale in layer.scaling.items()}
            tensors = [(name, tensor.clone()) for name, tensor in export_adapter(loop.model).iter_export(loop.model)]
            for layer, scale in zip(layers, scales, strict=True):
                layer.scaling = scale
            return tensors

        loop.tensors = scaled

    finding = found_within(loop, plant)
    assert finding.cause is Cause.ADAPTER_SCALE
    assert words in finding.message


@pytest.mark.long
@pytest.mark.parametrize("neighbor", ["before", "after"])
def test_shifted_logprobs(neighbor: str) -> None:
    def shifted(samples: list[Sample]) -> list[Sample]:
        return [
            replace(sample, logprobs=sample.logprobs[1:] + sample.logprobs[:1])
            if neighbor == "after"
            else replace(sample, logprobs=sample.logprobs[-1:] + sample.logprobs[:-1])
            for sample in samples
        ]

    def plant(loop: Loop) -> None:
        loop.engine.change_samples = shifted

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.SHIFTED
    assert neighbor in finding.message


def test_dropout_in_the_trainer() -> None:
    loop = Loop()

    def plant(loop: Loop) -> None:
        norm = loop.model.model.norm
        norm.register_forward_hook(
            lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1, module.training)
        )
        loop.model.train()

    finding = found_within(loop, plant)
    assert finding.cause is Cause.TRAINER


def test_rotary_embedding_lost_in_sleep_mode() -> None:
    def plant(loop: Loop) -> None:
        loop.engine.before_generate = lambda: loop.engine.model.model.rotary_emb.inv_freq.zero_()

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.LOST_WEIGHTS


def without_digests(loop: Loop) -> None:
    """Make the engine report no digests."""
    refit = loop.engine._refit
    loop.engine._refit = lambda sent, digests: refit(sent, digests) | {"digests": {}}


def test_engine_without_digests_is_probed(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    without_digests(loop)
    finding = found_within(loop, lambda loop: written(loop, exchange_heads), healthy=3)
    assert finding.cause is Cause.MISSING_WEIGHTS
    assert finding.names == ("model.layers.1.self_attn.qkv_proj",)
    assert caplog.text.count("reports no digests of received weights: probes compare the weights") == 1


def test_warning_without_digests_and_probes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop(probe_every=0)
    without_digests(loop)
    loop.step()
    assert "no probes are scored" in caplog.text


def test_no_warning_with_digests(caplog: pytest.LogCaptureFixture) -> None:
    Loop().step()
    assert "digests" not in caplog.text
