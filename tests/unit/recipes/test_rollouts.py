"""A step of RL: training on samples, and metrics of engine and trainer."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import new_model
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import DriftError, MixedWeightsError, NonFiniteError, UnknownOptionError
from nrl_models.logprobs import Sampling
from nrl_models.losses import Correction, loss_named
from nrl_models.recipes.policy_batch import Question, Rollouts, SampleBatch
from nrl_models.recipes.rollouts import PolicyLoop
from nrl_models.testing.tiny import tiny_config
from nrl_models.watch import Watch

SAMPLES = [Sample((5, 6), (7, 2), (-0.5, -0.25), "stop"), Sample((5, 6, 7), (8, 9, 2), (-1.0, -2.0, -3.0), "stop")]


def test_sample_batch_masks() -> None:
    batch = SampleBatch.of(SAMPLES)
    assert batch.sequences == [(5, 6, 7, 2), (5, 6, 7, 8, 9, 2)]
    assert batch.sampled.int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]
    assert [row.int().tolist() for row in batch.score] == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert batch.logprobs[batch.sampled].tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]


class _Counting(HFEngine):
    """An engine that counts its calls."""

    batches = 0

    def _generate(self, *args: Any, **kwargs: Any) -> list[Sample]:
        self.batches += 1
        return super()._generate(*args, **kwargs)


@pytest.fixture
def make() -> Callable[..., PolicyLoop]:
    config = tiny_config(LlamaConfig)
    trained = new_model(config).eval()

    def made(name: str = "dr_grpo", *, reward: Any = None, **options: Any) -> PolicyLoop:
        settings = {key: options.pop(key) for key in list(options) if hasattr(loss_named(name), key)}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        model.load_state_dict(trained.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1))
        return PolicyLoop(
            model=model, optimizer=optimizer, engine=_Counting(copy.deepcopy(trained)),
            tokenizer=byte_tokenizer(config),
            reward=reward or (lambda row, text, ended: row + len(text) % 3), settings=loss_named(name, **settings),
            group=4, new_tokens=6, **options,
        )  # fmt: skip

    return made


def questions() -> Iterator[Question]:
    return (Question(number, (16 + number % 100, 17, 18)) for number in itertools.count())


def weights(loop: PolicyLoop) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


def test_engine_matches_trainer_after_refits(make: Callable[..., PolicyLoop]) -> None:
    loop = make()
    before = weights(loop)
    for step in range(3):
        metrics = loop.step(questions(), 2, seed=step)
        assert metrics["token_mult_prob_error"] < 1.0001
        assert metrics["kl_k3"] < 1e-8
        assert metrics["groups"] == 2
    assert not torch.equal(weights(loop), before)


def test_logprobs_use_sampling_parameters(make: Callable[..., PolicyLoop]) -> None:
    metrics = make(sampling=Sampling(temperature=0.6, top_k=20, top_p=0.9)).step(questions(), 2, seed=0)
    assert metrics["token_mult_prob_error"] < 1.0001
    assert metrics["outside"] == 0


def test_kl_moves_policy_to_reference(make: Callable[..., PolicyLoop]) -> None:
    """With constant rewards, a policy far from its reference moves back to it."""
    reference = make().model.requires_grad_(False)
    loop = make("grpo", kl=1.0, reward=lambda row, completion, ended: 0.0, reference=reference, lr=0.01)
    with torch.no_grad():
        loop.model.lm_head.weight.mul_(0.5)
    before = (loop.model.lm_head.weight - reference.lm_head.weight).norm()
    losses = [loop.step(questions(), 2, seed=step)["loss"] for step in range(4)]
    assert losses[-1] < losses[0]
    assert (loop.model.lm_head.weight - reference.lm_head.weight).norm() < before


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"updates": 2}, {"sampling": Sampling(temperature=0.6, top_p=0.9)}])
def test_watch_has_no_findings_in_healthy_steps(make: Callable[..., PolicyLoop], options: dict[str, Any]) -> None:
    loop = make(**options)
    sampling = loop.sampling
    loop = dataclasses.replace(loop, watch=Watch(loop.model, loop.engine, sampling=sampling, optimizer=loop.optimizer))
    for step in range(4):
        assert loop.step(questions(), 2, seed=step)["drift"] == 0
    assert loop.watch.version == 4
    assert len(loop.watch.history) == 4
    assert not loop.watch.findings


def test_watch_raises_before_update(make: Callable[..., PolicyLoop]) -> None:
    loop = make()
    loop = dataclasses.replace(loop, watch=Watch(loop.model, loop.engine))
    loop.step(questions(), 2, seed=0)
    with torch.no_grad():
        loop.engine.model.lm_head.weight.mul_(1.2)
    before = weights(loop)
    with pytest.raises(DriftError, match="lm_head"):
        loop.step(questions(), 2, seed=1)
    assert torch.equal(weights(loop), before)


def test_non_failing_watch_counts_drift(make: Callable[..., PolicyLoop]) -> None:
    loop = make()
    loop = dataclasses.replace(loop, watch=Watch(loop.model, loop.engine, fail=False))
    with torch.no_grad():
        loop.engine.model.lm_head.weight.mul_(1.2)
    assert loop.step(questions(), 2, seed=0)["drift"] == 1
    assert loop.step(questions(), 2, seed=1)["drift"] == 0


def test_metrics_detect_different_engine_weights(make: Callable[..., PolicyLoop]) -> None:
    loop = make()
    with torch.no_grad():
        loop.engine.model.lm_head.weight.mul_(1.2)
    metrics = loop.step(questions(), 2, seed=0)
    assert metrics["token_mult_prob_error"] > 1.01
    assert metrics["kl_k3"] > 1e-4
    assert loop.step(questions(), 2, seed=1)["token_mult_prob_error"] < 1.0001, "the refit updates the engine"


def test_unwritten_weight_raises(make: Callable[..., PolicyLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make()
    adapter = loop.model.state_dict_adapter
    whole = adapter.iter_export
    monkeypatch.setattr(adapter, "iter_export", lambda model: itertools.islice(whole(model), 1, None))
    with pytest.raises(MixedWeightsError, match=r"left 1 tensors unwritten: model\.embed_tokens\.weight"):
        loop.step(questions(), 1, seed=0)


def test_equal_rewards_do_not_change_weights(make: Callable[..., PolicyLoop]) -> None:
    loop = make(reward=lambda row, completion, ended: 1.0)
    before = weights(loop)
    metrics = loop.step(questions(), 2, seed=0)
    assert (metrics["loss"], metrics["gradient_norm"]) == (0.0, 0.0)
    assert torch.equal(weights(loop), before)


def test_rewards_are_fp32_for_any_default_dtype(
    make: Callable[..., PolicyLoop], low_default_dtype: Callable[[], None]
) -> None:
    rewards = itertools.cycle([1.0, 1.0001])
    loop = make("grpo", reward=lambda row, completion, ended: next(rewards))
    low_default_dtype()
    rollouts = loop.roll_out(questions(), 2, seed=0)
    assert rollouts.advantages.dtype == torch.float32
    # The standard deviation of a group is 5e-5 * sqrt(4 / 3), and 1e-4 is added to it.
    expected = torch.tensor([-1.0, 1.0] * 4, dtype=torch.float32) * 5e-5 / (5e-5 * math.sqrt(4 / 3) + 1e-4)
    torch.testing.assert_close(rollouts.advantages.flatten(), expected, rtol=1e-2, atol=0)


def test_dynamic_sampling_generates_until_enough_groups(make: Callable[..., PolicyLoop]) -> None:
    counted = itertools.count()

    def reward(row: int, completion: str, ended: bool) -> float:
        return float(row % 3 == 0 and next(counted) % 2)  # rewards differ only in every third question

    loop = make("dapo", reward=reward)
    rollouts = loop.roll_out(questions(), 2, seed=0)
    assert loop.engine.batches == 2
    assert [sample.prompt[0] - 16 for sample in rollouts.samples] == [0] * 4 + [3] * 4
    assert rollouts.rewards.shape == (4, 4)
    assert rollouts.advantages.abs().min() > 0
    loop = make("dapo", reward=lambda row, completion, ended: 0.0, dynamic_sampling=3)
    metrics = loop.step(questions(), 2, seed=0)
    assert loop.engine.batches == 3
    assert metrics["groups"] == 0
    assert "token_mult_prob_error" not in metrics, "the metric is missing, so a gate on it fails"


def test_overlong_completions_are_penalized(make: Callable[..., PolicyLoop]) -> None:
    loop = make(reward=lambda row, completion, ended: 0.0, overlong_buffer=2)
    lengths = iter([6, 5, 4, 2])

    def shortened(*_: Any, **__: Any) -> list[Sample]:
        return [Sample((16,), (20,) * length, (-1.0,) * length, "stop") for length in lengths]

    loop.engine._generate = shortened
    rollouts = loop.roll_out(questions(), 1, seed=0)
    assert rollouts.rewards.tolist() == [[0.0] * 4]
    torch.testing.assert_close(rollouts.advantages, torch.tensor([-1.0, -0.5, 0.0, 0.0]) + 0.375)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_row_tokens_do_not_change_updates(make: Callable[..., PolicyLoop], name: str, level: str) -> None:
    metrics = []
    for size in (9, 30, None):
        loop = make(name, row_tokens=size, correction=Correction("tis", level=level))
        measured = loop.step(questions(), 2, seed=0)
        metrics.append((weights(loop), measured["loss"], measured["gradient_norm"]))
    for other in metrics[1:]:
        torch.testing.assert_close(other[0], metrics[0][0], rtol=1e-5, atol=1e-6)
        assert other[1:] == pytest.approx(metrics[0][1:], rel=1e-4, abs=5e-6)


def test_later_updates_are_clipped(make: Callable[..., PolicyLoop]) -> None:
    one, two = make("grpo", lr=1.0), make("grpo", lr=1.0, updates=2)
    assert one.step(questions(), 4, seed=0)["clipped"] == 0.0
    assert two.step(questions(), 4, seed=0)["clipped"] > 0.0


def test_correction_cap_limits_update(make: Callable[..., PolicyLoop]) -> None:
    """With a cap close to zero, weights barely change."""
    moved = []
    for correction in (None, Correction("tis", cap=1e-3), Correction("mis", cap=1e-3)):
        loop = make(correction=correction, clip_gradient_norm=1e9)
        before = weights(loop)
        loop.step(questions(), 2, seed=0)
        moved.append((weights(loop) - before).norm().item())
    assert moved[0] > 0
    assert moved[1] == pytest.approx(moved[0] / 1000, rel=1e-2)
    assert moved[2] == 0.0


# Truncated sampling


def reference_logprobs(model: Any, ids: torch.Tensor, temperature: float, top_k: int = 0) -> torch.Tensor:
    """Return the log-probabilities of the last two tokens of each row. -inf for a token that `top_k` excludes."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:3] / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    return logits.log_softmax(-1).gather(-1, ids[:, 2:, None])[..., 0].double()


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("correction", [None, Correction("tis"), Correction("mis", cap=1e9, level="sequence")])
def test_excluded_tokens_are_masked(
    make: Callable[..., PolicyLoop], updates: int, correction: Correction | None
) -> None:
    """Loss, divergence and metrics, computed manually. The reference is not truncated; excluded tokens do not count."""
    reference = make().model
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.5)
    loop = make(
        "grpo", kl=0.7, reference=reference, updates=updates, lr=0.0, correction=correction,
        sampling=Sampling(temperature=0.8, top_k=40),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        prompts = torch.randint(16, 200, (8, 2), generator=generator)
        likely = loop.model(input_ids=prompts).logits[:, -1].topk(40).indices[:, 3:4]
        unlikely = loop.model(input_ids=prompts).logits[:, -1].topk(60).indices[:, -1:]
        first = torch.where(torch.arange(8)[:, None] % 3 == 0, unlikely, likely)
        second = loop.model(input_ids=torch.cat([prompts, first], 1)).logits[:, -1].topk(5).indices[:, 4:]
    ids = torch.cat([prompts, first, second], 1)
    old, theirs = reference_logprobs(loop.model, ids, 0.8, 40), reference_logprobs(reference, ids, 0.8)
    inside = old.isfinite()
    assert 0 < (~inside).sum() < 8
    engine = torch.where(inside, old, -3.0) + 0.1 * torch.rand(8, 2, generator=generator).double()
    samples = [
        Sample(tuple(row[:2]), tuple(row[2:]), tuple(logprobs), "stop")
        for row, logprobs in zip(ids.tolist(), engine.tolist(), strict=True)
    ]
    advantages = torch.randn(8, generator=generator)
    measured = loop.learn(Rollouts(samples, advantages, advantages.view(2, 4), 1.0, 2.0))
    difference = torch.where(inside, old - engine, 0.0)
    weight = torch.ones(8, 2)
    if correction is not None:
        ratio = difference.sum(1, keepdim=True) if correction.level == "sequence" else difference
        weight = ratio.exp().clamp(max=correction.cap)
    behind = torch.where(inside, theirs - old, 0.0)
    terms = -weight * advantages[:, None] + 0.7 * (behind.exp() - 1 - behind)
    assert measured["loss"] == pytest.approx((torch.where(inside, terms, 0.0) / 2).sum().item() / 8, rel=1e-3)
    assert measured["outside"] == (~inside).sum()
    assert measured["token_mult_prob_error"] == pytest.approx(difference[inside].abs().exp().mean().item(), rel=1e-4)
    assert measured["gradient_norm"] < 100


class _Replacing(torch.optim.SGD):
    """An optimizer whose steps replace the parameter's values by `values`."""

    values: torch.Tensor

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.copy_(self.values)


@pytest.mark.parametrize("flat_first", [False, True])
@pytest.mark.parametrize("correction", [None, Correction("tis")])
def test_support_may_change_between_updates(
    make: Callable[..., PolicyLoop], flat_first: bool, correction: Correction | None
) -> None:
    """A token counts in the second update if the policy can sample it then and at the start of the step.

    A flat policy has equal logits for all tokens, so `top_k` excludes none of them.
    """
    temperature = 0.8
    loop = make("grpo", updates=2, correction=correction, sampling=Sampling(temperature=temperature, top_k=40))
    sharp, head = copy.deepcopy(loop.model), loop.model.lm_head.weight
    optimizer = _Replacing([head], lr=0.0)
    optimizer.values = head.detach().clone() if flat_first else torch.zeros_like(head)
    head.data.mul_(not flat_first)
    loop = dataclasses.replace(loop, optimizer=optimizer)
    ids = torch.randint(16, 480, (8, 4), generator=torch.Generator().manual_seed(1))
    ids[::3, 2] = sharp(input_ids=ids[::3, :2]).logits[:, -1].argmax(-1)
    start = reference_logprobs(sharp, ids, temperature, 40)
    inside, flat = start.isfinite(), torch.full_like(start, -math.log(512))
    assert 0 < inside[4:].sum() < 8
    old, now = (flat, start) if flat_first else (start, flat)
    engine = torch.where(old.isfinite(), old, -3.0) + 0.1
    samples = [
        Sample(tuple(row[:2]), tuple(row[2:]), tuple(logprobs), "stop")
        for row, logprobs in zip(ids.tolist(), engine.tolist(), strict=True)
    ]
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5] * 2)
    measured = loop.learn(Rollouts(samples, advantages, advantages.view(2, 4), 1.0, 2.0))
    weight = 1.0 if correction is None else math.exp(-0.1)
    ratio = torch.where(inside, now - old, 0.0).exp()
    gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    counted = torch.cat([old[:4].isfinite(), inside[4:]])
    gains[:4] = advantages[:4, None]  # the first update starts from the policy
    expected = -weight * torch.where(counted, gains, 0.0).sum() / 2 / 4 / 2
    assert measured["loss"] == pytest.approx(expected.item(), rel=1e-3)
    assert measured["outside"] == (~counted).sum()
    assert measured["token_mult_prob_error"] == pytest.approx(math.exp(0.1), rel=1e-4)


# Nonfinite values


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_non_finite_rewards_raise_or_are_skipped(make: Callable[..., PolicyLoop], name: str, value: float) -> None:
    counted = itertools.count()

    def reward(row: int, completion: str, ended: bool) -> float:
        number = next(counted)
        return value if number == 5 else float(number % 2)

    loop = make(name, reward=reward)
    before = weights(loop)
    with pytest.raises(NonFiniteError, match=r"the reward of completion 1 is .*, to question 1 \(1\); 1 completions"):
        loop.step(questions(), 2, seed=0)
    assert torch.equal(weights(loop), before)
    counted = itertools.count()
    loop = make(name, reward=reward, on_non_finite="skip")
    metrics = loop.step(questions(), 2, seed=0)
    assert metrics["skipped"] == 1
    assert math.isfinite(metrics["reward"])
    assert metrics["groups"] == (2 if name == "dapo" else 1), "dynamic sampling generates another group"
    assert weights(loop).isfinite().all()
    assert not torch.equal(weights(loop), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("correction", [None, Correction("tis"), Correction("mis")])
def test_non_finite_engine_logprobs_raise_or_are_skipped(
    make: Callable[..., PolicyLoop], value: float, correction: Correction | None
) -> None:
    def spoiled(loop: PolicyLoop) -> PolicyLoop:
        generate = loop.engine._generate

        def spoil(*args: Any, **kwargs: Any) -> list[Sample]:
            metrics = generate(*args, **kwargs)
            metrics[2] = dataclasses.replace(metrics[2], logprobs=(*metrics[2].logprobs[:-1], value))
            return metrics

        loop.engine._generate = spoil
        return loop

    loop = spoiled(make(correction=correction))
    before = weights(loop)
    with pytest.raises(
        NonFiniteError, match=r"engine's log-probability of token \d of completion 2 is .*, to question 0"
    ):
        loop.step(questions(), 2, seed=0)
    assert torch.equal(weights(loop), before)
    loop = spoiled(make(correction=correction, on_non_finite="skip"))
    metrics = loop.step(questions(), 2, seed=0)
    assert (metrics["skipped"], metrics["groups"]) == (1, 1)
    assert math.isfinite(metrics["token_mult_prob_error"])
    assert weights(loop).isfinite().all()


def test_non_finite_advantages_raise_or_are_skipped(make: Callable[..., PolicyLoop]) -> None:
    rollouts = make().roll_out(questions(), 2, seed=0)
    rollouts.advantages[6] = math.nan
    with pytest.raises(NonFiniteError, match="the advantage of completion 2 is nan, to question 1"):
        make().learn(rollouts)
    loop = make(on_non_finite="skip")
    assert loop.learn(rollouts)["skipped"] == 1
    assert weights(loop).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_step_without_finite_rewards_changes_nothing(make: Callable[..., PolicyLoop], name: str, value: float) -> None:
    loop = make(name, reward=lambda row, completion, ended: value, on_non_finite="skip")
    before = weights(loop)
    metrics = loop.step(questions(), 2, seed=0)
    assert metrics["skipped"] == (2 * loop.settings.dynamic_sampling or 2)
    assert metrics["groups"] == 0
    assert not {"reward", "loss", "token_mult_prob_error"} & metrics.keys(), "they have no value"
    assert all(map(math.isfinite, metrics.values()))
    assert torch.equal(weights(loop), before)
    loop = dataclasses.replace(loop, reward=lambda row, completion, ended: float(len(completion) % 3))
    assert math.isfinite(loop.step(questions(), 2, seed=1)["reward"])


def test_groups_whose_advantages_overflow_raise_or_are_skipped(make: Callable[..., PolicyLoop]) -> None:
    """All rewards are finite in fp32, and the first group's differences from their mean are not."""
    counted = itertools.count()

    def reward(row: int, completion: str, ended: bool) -> float:
        number = next(counted)
        return float(number % 2) if number > 3 else -3e38 if number else 3e38

    loop = make("dr_grpo", reward=reward)
    before = weights(loop)
    with pytest.raises(NonFiniteError, match=r"advantage of completion 0 is inf, to question 0 \(0\)"):
        loop.step(questions(), 2, seed=0)
    assert torch.equal(weights(loop), before)
    counted = itertools.count()
    metrics = dataclasses.replace(loop, on_non_finite="skip").step(questions(), 2, seed=0)
    assert (metrics["skipped"], metrics["groups"]) == (1, 1)
    assert weights(loop).isfinite().all()
    assert not torch.equal(weights(loop), before)


def test_update_of_overflowing_rewards_is_skipped(make: Callable[..., PolicyLoop]) -> None:
    """Each reward and advantage is finite in fp32, and the gradient's norm is not."""
    counted = itertools.count()
    loop = make("dr_grpo", reward=lambda row, completion, ended: 3e38 if next(counted) % 2 else -3e38)
    before = weights(loop)
    metrics = loop.step(questions(), 2, seed=0)
    assert metrics["skipped_updates"] == 1
    assert not math.isfinite(metrics["gradient_norm"])
    assert torch.equal(weights(loop), before)


def test_reference_with_nan_does_not_reach_optimizer(make: Callable[..., PolicyLoop]) -> None:
    reference = make().model.requires_grad_(False)
    with torch.no_grad():
        reference.lm_head.weight[7].fill_(math.nan)
    loop = make("grpo", kl=0.5, reference=reference)
    before = weights(loop)
    with pytest.raises(NonFiniteError, match="reference"):
        loop.step(questions(), 2, seed=0)
    assert torch.equal(weights(loop), before)


@pytest.mark.parametrize("value", [None, "much", [1.0, 2.0]], ids=str)
def test_non_numeric_reward_raises(make: Callable[..., PolicyLoop], value: Any) -> None:
    with pytest.raises(NonFiniteError, match="expected a number"):
        make(reward=lambda row, completion, ended: value).step(questions(), 1, seed=0)


def test_update_with_non_finite_gradient_is_skipped(make: Callable[..., PolicyLoop]) -> None:
    loop = make()
    before = weights(loop)
    handle = loop.model.model.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * math.inf)
    metrics = loop.step(questions(), 2, seed=0)
    assert metrics["skipped_updates"] == 1
    assert not math.isfinite(metrics["gradient_norm"])
    assert torch.equal(weights(loop), before)
    handle.remove()
    assert loop.step(questions(), 2, seed=1)["skipped_updates"] == 0
    assert not torch.equal(weights(loop), before)


def test_invalid_on_non_finite_raises(make: Callable[..., PolicyLoop]) -> None:
    with pytest.raises(UnknownOptionError, match="on_non_finite='ignore': expected raise, skip"):
        make(on_non_finite="ignore")


def test_dynamic_sampling_compares_rewards_without_penalties(make: Callable[..., PolicyLoop]) -> None:
    """Completions that are all wrong differ only in the length penalty: DAPO's equation 11 drops them."""
    loop = make("dapo", reward=lambda row, completion, ended: 0.0, overlong_buffer=6, dynamic_sampling=2)
    lengths = itertools.cycle([6, 5, 4, 2])
    loop.engine._generate = lambda prompts, *_, **__: [
        Sample(tuple(prompt), (20,) * (size := next(lengths)), (-1.0,) * size, "stop") for prompt in prompts
    ]
    rollouts = loop.roll_out(questions(), 2, seed=0)
    assert rollouts.samples == []
    assert rollouts.rewards.shape == (4, 4)


# Dropout


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_by_default(make: Callable[..., PolicyLoop], checkpointing: bool) -> None:
    metrics = {}
    for name, options in {"eval": {}, "train": {}, "dropout": {"dropout": True}}.items():
        loop = make("grpo", kl=0.5, reference=make().model, updates=2, **options)
        for model in (loop.model, loop.reference):
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.3
            model.train(name != "eval")
        runs: list[int] = []
        if checkpointing:
            loop.model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in loop.model.model.layers:
                layer.self_attn.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        measured = loop.step(questions(), 2, seed=0)
        metrics[name] = measured["token_mult_prob_error"], weights(loop), len(runs)
        assert loop.model.training == loop.reference.training == (name != "eval")
        assert "forward" not in vars(loop.model.model.layers[0])
    assert metrics["train"][0] == metrics["eval"][0] < 1.0001
    torch.testing.assert_close(metrics["train"][1], metrics["eval"][1], rtol=0, atol=1e-6)
    assert metrics["dropout"][0] > 1.01
    if checkpointing:
        assert metrics["train"][2] == metrics["dropout"][2] > metrics["eval"][2], (
            "layers are recomputed in the backward pass"
        )
