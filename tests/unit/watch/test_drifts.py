"""Planted drifts are found within three steps, with the right cause first. Correct runs have no findings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_loop import Loop, with_logprobs
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from nrl_models import Sample, Sampling, export_adapter
from nrl_models.common.model_components.routers import routers_of
from nrl_models.errors import DriftError, UnknownArgumentError
from nrl_models.testing.tiny import tiny_config
from nrl_models.watch import Cause, Finding, Severity, Watch
from nrl_models.watch.trainer_changes import TrainerChanges

Plant = Callable[[], tuple[Loop, Callable[[Loop], None]]]


def found_within(loop: Loop, plant: Callable[[Loop], None], *, healthy: int = 2, steps: int = 3) -> Finding:
    """Return the first finding within some steps after a fault was planted."""
    for _ in range(healthy):
        assert loop.step().passed
    assert not loop.watch.findings
    plant(loop)
    for _ in range(steps):
        try:
            report = loop.step()
        except DriftError as error:
            return error.findings[0]
        if loop.watch.findings:
            return (report.findings or loop.watch.findings)[0]
    pytest.fail("the planted drift was not found")


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def test_layer_skipped_by_refit() -> None:
    def plant(loop: Loop) -> None:
        loop.engine.keeps = lambda name: "layers.1.mlp.down_proj" in name

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.MISSING_WEIGHTS
    assert any("layers.1.mlp.down_proj" in name for name in finding.names)


def test_tensor_changed_during_refit() -> None:
    loop = Loop()

    def plant(loop: Loop) -> None:
        refit = loop.engine._refit

        def lossy(sent: Any, digests: bool) -> dict[str, Any]:
            return refit(
                (
                    [(name, tensor * 1.001 if "layers.0.self_attn.q" in name else tensor) for name, tensor in bucket]
                    for bucket in sent
                ),
                digests,
            )

        loop.engine._refit = lossy

    finding = found_within(loop, plant)
    assert finding.cause is Cause.MISSING_WEIGHTS
    assert finding.names == ("model.layers.0.self_attn.q_proj.weight",)


def test_unmerged_adapter() -> None:
    pytest.importorskip("peft")
    loop = Loop(wrap=lora)
    loop.watch.refit()

    def plant(loop: Loop) -> None:
        def base() -> list[tuple[str, torch.Tensor]]:
            with loop.model.disable_adapter():
                return [(name, tensor.clone()) for name, tensor in export_adapter(loop.model).iter_export(loop.model)]

        loop.tensors = base

    assert found_within(loop, plant).cause is Cause.UNMERGED_ADAPTER


def test_weights_lost_in_sleep_mode() -> None:
    def plant(loop: Loop) -> None:
        def wake() -> None:
            with torch.no_grad():
                loop.engine.model.model.layers[1].self_attn.o_proj.weight.zero_()

        loop.engine.before_generate = wake

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.LOST_WEIGHTS
    assert any("layers.1.self_attn" in name for name in finding.names)


def test_router_in_bf16() -> None:
    loop = Loop(tiny_config(MixtralConfig), fail=False)

    def plant(loop: Loop) -> None:
        model = loop.engine.model

        for router in routers_of(model, model.get_decoder()):
            forward = router.forward
            router.forward = lambda states, *rest, forward=forward: forward(states.bfloat16().float(), *rest)

    finding = found_within(loop, plant)
    assert finding.cause is Cause.ROUTING
    assert finding.names == ("model.layers.0.mlp.gate",)


def test_prefix_cache_kept_across_refit() -> None:
    loop = Loop()

    def plant(loop: Loop) -> None:
        old = copy.deepcopy(loop.engine.model)

        @torch.no_grad()
        def with_stale_cache(samples: list[Sample]) -> list[Sample]:
            changed = []
            for sample in samples:
                cached = len(sample.prompt) - 1
                ids = torch.tensor([sample.sequence])
                past = old(input_ids=ids[:, :cached], use_cache=True).past_key_values
                logits = loop.engine.model(input_ids=ids[:, cached:-1], past_key_values=past).logits[0]
                logprobs = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
                changed.append(with_logprobs(sample, logprobs))
            return changed

        loop.engine.change_samples = with_stale_cache

    finding = found_within(loop, plant)
    assert finding.cause is Cause.CACHE
    assert "sampled from before sync" in finding.message


def test_engine_temperature_mismatch() -> None:
    def plant(loop: Loop) -> None:
        loop.engine.sampling = Sampling(temperature=0.7)

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.SAMPLING
    assert "temperature 0.7" in finding.message


def test_engine_top_p_mismatch() -> None:
    def plant(loop: Loop) -> None:
        loop.engine.sampling = Sampling(top_p=0.5)

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.SAMPLING
    assert "top-p 0.5" in finding.message


def test_engine_ignoring_refits_is_stale() -> None:
    def plant(loop: Loop) -> None:
        loop.engine.keeps = lambda name: True

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.STALE_WEIGHTS
    assert "version 2 and not 3" in finding.message


def test_samples_of_old_version_are_stale() -> None:
    def plant(loop: Loop) -> None:
        loop.versions = [loop.watch.version, 0, loop.watch.version]

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.STALE_WEIGHTS
    assert "versions [0]" in finding.message


def test_lagging_samples_are_not_compared() -> None:
    loop = Loop(max_staleness=2)
    assert loop.step().passed
    loop.versions = [0, 1, 1]
    samples = loop.sample()
    report = loop.watch.before_update(samples, loop.logprobs(samples).logprobs, versions=loop.versions)
    assert report.metrics.tokens == sum(len(sample.tokens) for sample in samples[1:])


def test_engine_dtype_mismatch() -> None:
    def plant(loop: Loop) -> None:
        loop.engine.model.to(torch.bfloat16)

    finding = found_within(Loop(), plant)
    assert finding.cause is Cause.PRECISION
    assert "bfloat16" in finding.message


def test_position_ids_counting_padding() -> None:
    loop = Loop(tiny_config(GPT2Config))
    samples = loop.sample()
    width = max(len(sample.sequence) for sample in samples)
    padding = [width - len(sample.sequence) for sample in samples]
    ids = torch.tensor([[0] * left + list(sample.sequence) for left, sample in zip(padding, samples, strict=True)])
    attention = torch.tensor([[0] * left + [1] * (width - left) for left in padding])
    positions = torch.arange(width).expand(len(samples), -1)  # the fault
    with torch.no_grad():
        logits = loop.model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
    scores = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    trainer = torch.zeros(ids.shape).index_copy(1, torch.arange(1, width), scores)
    engine = torch.zeros(ids.shape, dtype=torch.float64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        mask[row, width - len(sample.tokens) :] = True
        engine[row, width - len(sample.tokens) :] = torch.tensor(sample.logprobs, dtype=torch.float64)
    with pytest.raises(DriftError, match="padding") as caught:
        loop.watch.before_update(samples, trainer, engine=engine, mask=mask, attention_mask=attention)
    assert caught.value.findings[0].cause is Cause.PADDING


def test_trainer_token_mismatch() -> None:
    loop = Loop()
    samples = loop.sample()
    tokens = [list(sample.sequence) for sample in samples]
    tokens[1][-1] += 1
    with pytest.raises(DriftError) as caught:
        loop.watch.before_update(samples, loop.logprobs(samples).logprobs, tokens=tokens)
    (finding,) = caught.value.findings
    assert (finding.cause, finding.names) == (Cause.TOKENS, ("row 1",))


def test_tokenizer_changed_during_training() -> None:
    from recipe_inputs import byte_tokenizer

    tokenizer = byte_tokenizer(tiny_config(LlamaConfig))

    def plant(loop: Loop) -> None:
        tokenizer.add_tokens(["<think>"])

    finding = found_within(Loop(tokenizer=tokenizer), plant)
    assert finding.cause is Cause.TOKENS
    assert finding.names == ("vocabulary",)


def test_weights_changed_at_learning_rate_0() -> None:
    loop = Loop(learning_rate=0.0)
    loop.watch._changes = TrainerChanges(loop.optimizer, None)

    def plant(loop: Loop) -> None:
        step = loop.optimizer.step

        def decay() -> None:
            step()
            with torch.no_grad():
                loop.model.lm_head.weight.mul_(0.999)

        loop.optimizer.step = decay

    finding = found_within(loop, plant)
    assert finding.cause is Cause.UNEXPECTED_UPDATE
    assert finding.names == ("lm_head.weight",)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: SimpleNamespace(optimizer=optimizer)])
def test_unexpected_update_considers_each_optimizer_step(wrap: Callable[[Any], Any]) -> None:
    loop = Loop()
    loop.watch._changes = TrainerChanges(wrap(loop.optimizer), None)
    loop.watch.refit()
    loop.watch.before_update(samples := loop.sample(), loop.logprobs(samples))
    for rate in (0.0, 0.05):  # a warm-up in which one batch has two updates
        loop.optimizer.param_groups[0]["lr"] = rate
        loop.logprobs(samples, loss=lambda result: -result.logprobs.sum() / 50)
        loop.optimizer.step()
    loop.watch.refit()
    assert (loop.watch.version, loop.watch.findings) == (2, [])
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.optimizer.step()
    with torch.no_grad():
        loop.model.lm_head.weight.mul_(0.999)
    with pytest.raises(DriftError, match="unexpected update: 1 of"):
        loop.watch.refit()


def test_optimizer_without_learning_rate() -> None:
    loop = Loop()
    loop.watch._changes = TrainerChanges(loop.optimizer, None)
    loop.optimizer.param_groups[0]["lr"] = None  # Adafactor(relative_step=True)
    loop.optimizer.step()
    assert loop.watch._changes.take_learning_rate() is None


def test_wrong_optimizer_type_raises() -> None:
    with pytest.raises(UnknownArgumentError, match=r"optimizer=0\.1: expected a torch\.optim\.Optimizer"):
        Watch(optimizer=0.1)


def test_growing_error_with_constant_weights() -> None:
    loop = Loop(learning_rate=0.0)

    def plant(loop: Loop) -> None:
        planted_at = loop.steps

        def worse(samples: list[Sample]) -> list[Sample]:
            size = 0.01 * (loop.steps - planted_at)
            generator = torch.Generator().manual_seed(loop.steps)
            return [
                replace(
                    sample,
                    logprobs=tuple(
                        value + size * torch.randn((), generator=generator).item() for value in sample.logprobs
                    ),
                )
                for sample in samples
            ]

        loop.engine.change_samples = worse

    finding = found_within(loop, plant)
    assert finding.cause in (Cause.ENGINE, Cause.CACHE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "steps"), [pytest.param(LlamaConfig, 200, marks=pytest.mark.long), (MixtralConfig, 50)]
)
def test_healthy_steps_have_no_findings(config: type[Any], steps: int) -> None:
    loop = Loop(tiny_config(config), learning_rate=0.01, sampling=Sampling(temperature=0.8))
    for _ in range(steps):
        assert loop.step().passed
    assert not loop.watch.findings


def test_bf16_engine_within_bars_is_a_warning() -> None:
    loop = Loop()
    loop.engine.model.to(torch.bfloat16)
    watch = Watch(loop.model, loop.engine)
    watch.refit()
    samples = loop.sample()
    report = watch.before_update(samples, loop.logprobs(samples).logprobs)
    assert report.passed
    assert {(finding.cause, finding.level) for finding in watch.findings} == {(Cause.PRECISION, Severity.WARNING)}
