"""A watch on a trainer and vLLM: a correct run, and faults in a running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import changed, clear_prefix_cache, model_of

from nrl_models import AutoModelForCausalLM, Sampling, rollout_logprobs
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import DriftError
from nrl_models.watch import Cause, Watch

PROMPTS = [list(range(20, 160)), list(range(100, 230)), list(range(40, 180))]
"""Longer than a block of vLLM's CPU cache, which has 128 tokens."""


class Loop:
    """Sample from vLLM, train a copy of the demo's model, and refit vLLM."""

    def __init__(self, demo: Path, engine: VLLMEngine) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
        self.engine = engine
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=5e-2)
        self.sampling = Sampling(temperature=0.9)
        self.watch = Watch(self.model, engine, sampling=self.sampling)
        self.watch.refit()
        self.steps = 0

    def step(self, sampling: Sampling | None = None) -> None:
        self.steps += 1
        samples = self.engine.generate(PROMPTS, sampling or self.sampling, max_new_tokens=24, seed=self.steps)
        self.optimizer.zero_grad()
        scores = rollout_logprobs(
            self.model,
            [sample.sequence for sample in samples],
            score=[[False] * len(sample.prompt) + [True] * len(sample.tokens) for sample in samples],
            temperature=self.sampling.temperature,
            loss=lambda result: -(result.logprobs * result.mask).sum() / 50,
        )
        self.watch.before_update(samples, scores.logprobs)
        self.optimizer.step()
        self.watch.refit()


@pytest.fixture
def loop(demo: Path, vllm: Callable[..., VLLMEngine], demo_trainer: HFEngine) -> Iterator[Loop]:
    engine = vllm(demo)
    yield Loop(demo, engine)
    clear_prefix_cache(engine)
    engine.refit(demo_trainer.model.state_dict_adapter.iter_export(demo_trainer.model))


def cause_of(run: Callable[[], Any]) -> tuple[Cause, tuple[str, ...]]:
    with pytest.raises(DriftError) as caught:
        run()
    finding = caught.value.findings[0]
    return finding.cause, finding.names


def test_healthy_steps_have_no_findings(loop: Loop) -> None:
    for _ in range(4):
        loop.step()
    assert (loop.watch.version, loop.watch.findings) == (5, [])


def test_weights_changed_in_engine(loop: Loop) -> None:
    loop.step()
    weight = model_of(loop.engine).model.layers[1].input_layernorm.weight
    with changed(weight, torch.zeros_like(weight)):
        clear_prefix_cache(loop.engine)
        cause, names = cause_of(loop.step)
    assert cause is Cause.LOST_WEIGHTS
    assert names == ("model.layers.1.input_layernorm",)


def test_layer_skipped_by_refit(loop: Loop) -> None:
    loop.step()
    weight = model_of(loop.engine).model.layers[1].post_attention_layernorm.weight
    old = weight.detach().clone()
    refit = loop.engine._refit

    def refit_except_layer(*args: Any) -> dict[str, Any]:
        report = refit(*args)
        weight.data.copy_(old)
        return report

    loop.engine._refit = refit_except_layer
    with torch.no_grad():
        loop.model.model.layers[1].post_attention_layernorm.weight.mul_(1.1)
    try:
        cause, names = cause_of(loop.watch.refit)
    finally:
        del loop.engine._refit
    assert cause in (Cause.MISSING_WEIGHTS, Cause.STALE_WEIGHTS)  # little else changed
    assert names == ("model.layers.1.post_attention_layernorm",)


def test_prefix_cache_kept_across_refit(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.step()
    monkeypatch.setattr(type(loop.engine.llm), "reset_prefix_cache", lambda *args, **options: True)
    cause, _ = cause_of(lambda: [loop.step() for _ in range(3)])
    assert cause is Cause.CACHE


def test_engine_temperature_mismatch(loop: Loop) -> None:
    loop.step()
    cause, _ = cause_of(lambda: loop.step(Sampling(temperature=0.6)))
    assert cause is Cause.SAMPLING
