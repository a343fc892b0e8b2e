"""Metrics compared with closed forms."""

import math
from typing import Any

import pytest
import torch

from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import (
    consistency_metrics,
    js_divergence_error,
    kl_k1,
    kl_k2,
    kl_k3,
    sampling_importance_ratio,
    token_mult_prob_error,
)
from nrl_models.logprobs.metrics import quantile

METRICS = (
    token_mult_prob_error,
    sampling_importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    js_divergence_error,
)


def normal(deviation: float, mean: float = 0.0, count: int = 200_001) -> tuple[torch.Tensor, torch.Tensor]:
    """Return trainer and engine values whose differences are exact quantiles of a normal distribution."""
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    difference = mean + deviation * math.sqrt(2.0) * torch.erfinv(2 * levels - 1)
    engine = -1.0 - torch.arange(count, dtype=torch.float64) / count
    return engine + difference, engine


@pytest.mark.parametrize("deviation", [0.01, 0.06, 0.5])
def test_metrics_of_normal_differences(deviation: float) -> None:
    trainer, engine = normal(deviation)
    variance = deviation**2
    half_normal = 2 * math.exp(variance / 2) * torch.special.ndtr(torch.tensor(deviation, dtype=torch.float64)).item()
    assert token_mult_prob_error(trainer, engine) == pytest.approx(half_normal, rel=1e-4)
    assert sampling_importance_ratio(trainer, engine) == pytest.approx(math.exp(variance / 2), rel=1e-4)
    assert kl_k1(trainer, engine) == pytest.approx(0.0, abs=1e-9)
    assert kl_k2(trainer, engine) == pytest.approx(variance / 2, rel=1e-3)
    assert kl_k3(trainer, engine) == pytest.approx(math.exp(variance / 2) - 1, rel=2e-3)


def test_documented_bound_matches_deviation_of_0_060() -> None:
    trainer, engine = normal(0.060)
    assert token_mult_prob_error(trainer, engine) == pytest.approx(1.05, abs=5e-4)
    assert kl_k3(trainer, engine) == pytest.approx(1.8e-3, rel=0.01)


@pytest.mark.parametrize("shift", [0.3, -0.3])
def test_metrics_of_constant_difference(shift: float) -> None:
    engine = torch.linspace(-5, -0.5, 50, dtype=torch.float64)
    trainer = engine + shift
    assert token_mult_prob_error(trainer, engine) == pytest.approx(math.exp(0.3))
    assert sampling_importance_ratio(trainer, engine) == pytest.approx(math.exp(shift))
    assert kl_k1(trainer, engine) == pytest.approx(-shift)
    assert kl_k2(trainer, engine) == pytest.approx(0.045)
    assert kl_k3(trainer, engine) == pytest.approx(math.exp(shift) - 1 - shift)
    # With weights 1 and e^shift the mixture is log((1 + e^shift) / 2) above the engine.
    mixture = math.log((1 + math.exp(shift)) / 2)
    k3 = [math.exp(ratio) - 1 - ratio for ratio in (-mixture, shift - mixture)]
    assert js_divergence_error(trainer, engine) == pytest.approx(sum(k3) / 2)


def test_k1_and_k3_match_exact_kl() -> None:
    # Two distributions over 3 tokens. Each token occurs as often as the engine samples it, so the means are exact.
    counts = torch.tensor([2, 5, 3])
    engine, trainer = (counts / 10).double().log(), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    divergence = (engine.exp() * (engine - trainer)).sum().item()
    sampled = torch.arange(3).repeat_interleave(counts)
    assert kl_k1(trainer[sampled], engine[sampled]) == pytest.approx(divergence)
    assert kl_k3(trainer[sampled], engine[sampled]) == pytest.approx(divergence)
    assert sampling_importance_ratio(trainer[sampled], engine[sampled]) == pytest.approx(1.0)
    assert token_mult_prob_error(trainer[sampled], engine[sampled]) == pytest.approx(
        0.2 * 1.5 + 0.5 / 0.6 + 0.3 * 4 / 3
    )


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
def test_mask_excludes_tokens(metric: object) -> None:
    generator = torch.Generator().manual_seed(0)
    trainer, engine = torch.randn(2, 4, 9, generator=generator).log_softmax(-1)
    mask = torch.rand(4, 9, generator=generator) < 0.5
    wrong = torch.where(mask, trainer, trainer + 100)
    assert metric(wrong, engine, mask) == metric(trainer[mask], engine[mask])
    assert metric(wrong, engine, mask) != metric(trainer, engine)
    assert math.isnan(metric(trainer, engine, torch.zeros_like(mask)))


def test_js_is_bounded_for_extreme_ratios() -> None:
    trainer, engine = torch.tensor([-200.0]), torch.tensor([-1.0])
    assert js_divergence_error(trainer, engine) < 200
    assert token_mult_prob_error(trainer, engine) > 1e80


def test_consistency_metrics() -> None:
    engine = torch.full((3, 4), -2.0)
    trainer = engine.clone()
    trainer[1] += torch.tensor([0.0, 0.1, -0.2, 9.0])
    trainer[2] += torch.tensor([0.05, 0.05, 0.05, 0.05])
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 3] = False  # excludes the 9.0
    metrics = consistency_metrics(trainer, engine, mask)
    assert metrics.tokens == 11
    assert metrics.worst_sequence_index == 1
    assert metrics.worst_sequence == pytest.approx((1 + math.exp(0.1) + math.exp(0.2)) / 3)
    assert metrics.max == pytest.approx(0.2)
    assert metrics.p99 == pytest.approx(0.2)
    assert metrics.token_mult_prob_error == token_mult_prob_error(trainer, engine, mask)
    assert metrics.sampling_importance_ratio == sampling_importance_ratio(trainer, engine, mask)
    assert (metrics.kl_k1, metrics.kl_k2, metrics.kl_k3) == tuple(
        f(trainer, engine, mask) for f in (kl_k1, kl_k2, kl_k3)
    )
    assert metrics.js_divergence_error == pytest.approx(js_divergence_error(trainer, engine, mask))
    assert (metrics.nan, metrics.engine_infinite, metrics.trainer_infinite) == (0, 0, 0)


def test_non_finite_values_are_counted_and_excluded() -> None:
    inf = float("inf")
    trainer = torch.tensor([[-1.0, -inf, float("nan"), -1.0, -1.5], [-1.0, -1.0, -1.0, -inf, -1.0]])
    engine = torch.tensor([[-1.0, -2.0, -2.0, float("nan"), -1.0], [-inf, -1.0, -1.0, -inf, -1.0]])
    metrics = consistency_metrics(trainer, engine)
    assert (metrics.nan, metrics.engine_infinite, metrics.trainer_infinite) == (2, 2, 2)
    assert metrics.tokens == 5
    assert metrics.token_mult_prob_error == pytest.approx((4 + math.exp(0.5)) / 5)
    assert metrics.to_json()["token_mult_prob_error"] == metrics.token_mult_prob_error


def test_no_valid_tokens_give_nan() -> None:
    metrics = consistency_metrics(torch.full((1, 3), float("nan")), torch.zeros(1, 3))
    assert metrics.tokens == 0
    assert math.isnan(metrics.token_mult_prob_error)
    assert metrics.worst_sequence_index == -1
    assert metrics.to_json()["token_mult_prob_error"] is None


VALUES = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]])

UNREADABLE = {
    "complex": (VALUES.to(torch.complex64), r"is of torch\.complex64: expected log-probabilities"),
    "bool": (VALUES > -1, r"is of torch\.bool: expected log-probabilities"),
    "sparse": (VALUES.to_sparse(), r"has the layout sparse_coo: pass tensor\.to_dense\(\)"),
    "nested": (torch.nested.nested_tensor([VALUES[0], VALUES[1]]), r"is nested: pad it with torch\.nested"),
    "jagged": (torch.nested.nested_tensor([VALUES[0], VALUES[1, :1]], layout=torch.jagged), "is nested: pad it"),
    "meta": (VALUES.to("meta"), "is on meta and has no values"),
}


@pytest.mark.parametrize("metric", [consistency_metrics, *METRICS], ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_without_readable_numbers_raise(metric: Any, kind: str) -> None:
    tensor, message = UNREADABLE[kind]
    with pytest.raises(UnknownArgumentError, match=f"^trainer {message}"):
        metric(tensor, VALUES)
    with pytest.raises(UnknownArgumentError, match=f"^engine {message}"):
        metric(VALUES, tensor)
    if kind not in ("complex", "bool"):
        with pytest.raises(UnknownArgumentError, match=f"^mask {message}"):
            metric(VALUES, VALUES, tensor)


def test_8_bit_floats_are_compared() -> None:
    metrics = consistency_metrics(VALUES.to(torch.float8_e4m3fn), VALUES)
    assert metrics.token_mult_prob_error == 1.0  # the values are exact in float8
    assert metrics.tokens == 4


def test_mismatched_shapes_raise() -> None:
    with pytest.raises(ValueError, match="one shape"):
        token_mult_prob_error(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="sequences, length"):
        consistency_metrics(torch.zeros(3), torch.zeros(3))


def test_quantile_returns_an_observed_value() -> None:
    values = torch.arange(1.0, 201.0)
    assert quantile(values, 0.99) == 198.0
    assert quantile(values, 1.0) == 200.0
    assert quantile(values[:1], 0.99) == 1.0


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)
def test_list_inputs(metric: object) -> None:
    trainer, engine, mask = [[-0.1, -0.2], [-0.3, -9.0]], [[-0.2, -0.2], [-0.1, -1.0]], [[True, True], [1, 0]]
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (trainer, engine)]
    assert metric(trainer, engine) == metric(*tensors)
    assert metric(trainer[0], tensors[1][0]) == metric(tensors[0][0], tensors[1][0])
    assert metric(trainer, engine, mask) == metric(*tensors, torch.tensor(mask))
    assert consistency_metrics(trainer, engine, mask) == consistency_metrics(*tensors, torch.tensor(mask))
    assert metric(torch.tensor(-0.1), torch.tensor(-0.2)) == metric(torch.tensor([-0.1]), torch.tensor([-0.2]))


@pytest.mark.parametrize("metric", [*METRICS, consistency_metrics], ids=lambda metric: metric.__name__)
def test_invalid_inputs_raise(metric: object) -> None:
    values = torch.zeros(2, 2)
    with pytest.raises(UnknownArgumentError, match=r"trainer is a list that is not a tensor .*: expected a tensor or"):
        metric([[-0.1], [-0.2, -0.3]], values)
    with pytest.raises(UnknownArgumentError, match="engine is a NoneType that is not a tensor"):
        metric(values, None)
    with pytest.raises(UnknownArgumentError, match="mask is a str that is not a tensor"):
        metric(values, values, "all")
    with pytest.raises(ValueError, match="must have one shape"):
        metric(values, [[0.0]])
    for wrong in (-1.0, 0.5, math.nan):
        with pytest.raises(ValueError, match=f"mask has the value {wrong:g}: expected 1 or True for compared tokens"):
            metric(values, values, [[1.0, wrong], [0.0, 1.0]])
