"""Policy gradient losses and their gradients, compared with manually computed numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nrl_models.errors import NonFiniteError, UnknownArgumentError, UnknownOptionError
from nrl_models.losses import Normalize, clipped_share, loss_named, policy_loss, token_weights
from nrl_models.losses.policy import LARGEST_LOG_RATIO

MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("normalize", "longest", "expected"),
    [
        (Normalize.SEQUENCE, None, [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]]),
        (Normalize.TOKEN, None, [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]]),
        (Normalize.LONGEST, 5, [[1 / 10, 1 / 10, 0], [1 / 10, 0, 0]]),
    ],
)
def test_token_weights(normalize: Normalize, longest: int | None, expected: list[list[float]]) -> None:
    torch.testing.assert_close(token_weights(MASK, normalize, longest), torch.tensor(expected))


def test_token_weights_with_empty_sequence() -> None:
    weights = token_weights(torch.tensor([[True, True], [False, False]]), Normalize.SEQUENCE)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.25], [0.0, 0.0]]))
    assert token_weights(torch.zeros(2, 2), Normalize.TOKEN).sum() == 0  # no division by zero


def test_longest_is_required_only_for_longest_normalization() -> None:
    with pytest.raises(ValueError, match="longest=None"):
        token_weights(MASK, Normalize.LONGEST)
    with pytest.raises(ValueError, match="longest=5"):
        token_weights(MASK, Normalize.TOKEN, 5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # The gradient with respect to the log-probability: d ratio / d logprob is the ratio.
        (1.0, 2.0, -2.0, -2.0),
        (0.5, 1.0, -0.5, -0.5),  # positive advantage, ratio below the range: not clipped
        (1.25, 1.0, -1.25, -1.25),  # below 1.28, but above 1.2
        (1.5, 1.0, -1.28, 0.0),
        (0.5, -1.0, 0.8, 0.0),
        (0.9, -1.0, 0.9, 0.9),
        (1.5, -1.0, 1.5, 1.5),  # negative advantage, ratio above the range: not clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_objective_and_gradient(ratio: float, advantage: float, loss: float, slope: float) -> None:
    old = torch.tensor([[-1.0]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    arguments = logprobs, old, torch.tensor([advantage]), torch.ones(1, 1)
    actual = policy_loss(*arguments, eps_low=0.2, eps_high=0.28)
    actual.backward()
    assert actual.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)
    assert clipped_share(*arguments, eps_low=0.2, eps_high=0.28) == (slope == 0.0 and advantage != 0.0)


def test_batch_loss_matches_manual_computation() -> None:
    """Two sequences, of two tokens and of one, with corrections. The methods differ in the divisor."""
    old = torch.log(torch.tensor([[0.5, 0.25, 0.5], [0.2, 0.5, 0.5]]))
    ratios = torch.tensor([[1.1, 0.7, 9.0], [1.4, 9.0, 9.0]])
    correction = torch.tensor([[2.0, 0.5, 7.0], [0.1, 7.0, 7.0]])
    advantages = torch.tensor([1.0, -2.0])
    terms = [-2.0 * 1.1, -0.5 * 0.7], [0.1 * 2.0 * 1.4]
    slopes = [[-2.2, -0.35, 0.0], [0.28, 0.0, 0.0]]
    expected = {
        Normalize.SEQUENCE: (sum(terms[0]) / 2 + terms[1][0]) / 2,
        Normalize.TOKEN: (sum(terms[0]) + terms[1][0]) / 3,
        Normalize.LONGEST: (sum(terms[0]) + terms[1][0]) / (2 * 8),
    }
    for normalize, loss in expected.items():
        weights = token_weights(MASK, normalize, 8 if normalize is Normalize.LONGEST else None)
        logprobs = (old + ratios.log()).requires_grad_()
        actual = policy_loss(logprobs, old, advantages, weights, correction=correction)
        actual.backward()
        assert actual.item() == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(logprobs.grad, torch.tensor(slopes) * weights)


def test_kl_penalty() -> None:
    logprobs = torch.log(torch.tensor([[0.5]])).requires_grad_()
    reference = torch.log(torch.tensor([[0.25]]))
    actual = policy_loss(
        logprobs, logprobs.detach(), torch.zeros(1), torch.ones(1, 1), reference=reference, kl=0.1
    )  # k3 of a ratio of 1/2: 1/2 - 1 + log 2
    actual.backward()
    assert actual.item() == pytest.approx(0.1 * (0.5 - 1 + math.log(2)), abs=1e-7)
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - 0.5), abs=1e-7)
    with pytest.raises(ValueError, match=r"kl=0\.1"):
        policy_loss(logprobs, logprobs, torch.zeros(1), torch.ones(1, 1), kl=0.1)


def test_micro_batch_gradients_sum_to_batch_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    old, theirs = (-torch.rand(6, 9, generator=generator) for _ in range(2))
    mask = torch.rand(6, 9, generator=generator) > 0.3
    advantages = torch.randn(6, generator=generator)
    for normalize in Normalize:
        weights = token_weights(mask, normalize, 9 if normalize is Normalize.LONGEST else None)
        whole, parts = old.clone().requires_grad_(), old.clone().requires_grad_()
        policy_loss(whole, theirs, advantages, weights).backward()
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
            policy_loss(parts[rows], theirs[rows], advantages[rows], weights[rows]).backward()
        torch.testing.assert_close(parts.grad, whole.grad)


@pytest.mark.parametrize("fill_value", [math.nan, -math.inf, math.inf])
def test_masked_tokens_do_not_affect_loss_or_gradient(fill_value: float) -> None:
    weights = token_weights(MASK, Normalize.TOKEN)
    filled = torch.where(MASK, -1.0, fill_value)
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    arguments = {"correction": torch.where(MASK, 1.0, fill_value), "reference": filled, "kl": 0.1}
    loss = policy_loss(logprobs, filled, torch.tensor([1.0, -1.0]), weights, **arguments)
    loss.backward()
    assert loss.item() == pytest.approx(-1 / 3)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1.0, 0.0], [1.0, 0.0, 0.0]]) / 3)


@pytest.mark.parametrize("correction", [1e-3, 100.0, 1e6])
def test_loss_is_finite_with_large_correction(correction: float) -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    loss = policy_loss(
        logprobs, torch.tensor([[-90.0]]), -torch.ones(1), torch.ones(1, 1), correction=torch.full((1, 1), correction)
    )
    loss.backward()
    assert 1e33 < loss.item() < math.inf
    assert 0 < logprobs.grad.item() < math.inf


@pytest.mark.parametrize("log_ratio", [-math.inf, -1e4, -1.0, 0.0, 1.0, 40.0, 80.0, 89.0, 100.0, 1e4, 1e6, math.inf])
@pytest.mark.parametrize("advantage", [-1e4, -1.5, 0.0, 1.5])
def test_loss_and_gradient_are_finite_for_any_log_ratio(log_ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([[log_ratio - 1.0]], requires_grad=True)
    old = torch.full((1, 1), -1.0)
    loss = policy_loss(logprobs, old, torch.tensor([advantage]), torch.ones(1, 1))
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.isfinite().all()
    value = (logprobs.detach().double() - old.double()).item()
    ratio = math.exp(min(value, 700.0))
    clipped = min(max(ratio, 0.8), 1.2)
    unclipped = ratio * advantage < clipped * advantage or clipped == ratio
    if advantage == 0.0 or not unclipped:
        assert loss.item() == pytest.approx(-clipped * advantage, abs=1e-6)
        assert logprobs.grad.item() == 0.0
    elif ratio * abs(advantage) < 1e36:
        assert loss.item() == pytest.approx(-ratio * advantage, rel=1e-4)
        assert logprobs.grad.item() == pytest.approx(-ratio * advantage, rel=1e-4)
    else:
        assert loss.item() > 1e36
        assert logprobs.grad.item() > 1e36 or log_ratio == math.inf, "the update lowers the token's probability"


@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_first_update_has_gradient(eps: float, advantage: float) -> None:
    """The ratio is exactly 1, which is also the bound if eps is 0. There, `clamp` of torch 2.15 has no gradient."""
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    loss = policy_loss(
        logprobs, logprobs.detach(), torch.tensor([advantage]), torch.ones(1, 1), eps_low=eps, eps_high=eps
    )
    loss.backward()
    assert (loss.item(), logprobs.grad.item()) == (-advantage, -advantage)


def test_kl_penalty_has_gradient_at_largest_log_ratio() -> None:
    logprobs = torch.tensor([[-LARGEST_LOG_RATIO, -1.0]], requires_grad=True)
    reference = torch.tensor([[0.0, -1.0]])
    loss = policy_loss(logprobs, logprobs.detach(), torch.zeros(1), torch.ones(1, 2), reference=reference, kl=0.1)
    loss.backward()
    assert logprobs.grad[0, 0] < -1e30
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize(("logprob", "reference"), [(-math.inf, -1.0), (-1.0, -math.inf), (-1.0, math.inf)])
def test_kl_penalty_is_finite_for_infinite_log_ratios(logprob: float, reference: float) -> None:
    logprobs = torch.tensor([[logprob, -1.0]], requires_grad=True)
    theirs = torch.tensor([[reference, -1.0]])
    loss = policy_loss(
        logprobs, logprobs.detach().clamp(min=-9.0), torch.ones(1), torch.ones(1, 2), reference=theirs, kl=0.1
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprobs.grad.tolist()[0][0] in (0.0, -1.0)
    assert logprobs.grad.tolist()[0][1] == -1.0


@pytest.mark.parametrize("behind", [-1e4, -1.0, 0.5, 80.0, 89.0, 1e4])
def test_kl_penalty_is_finite_for_any_reference(behind: float) -> None:
    logprobs = torch.tensor([[-2.0]], requires_grad=True)
    arguments = logprobs, logprobs.detach(), torch.zeros(1), torch.ones(1, 1)
    loss = policy_loss(*arguments, reference=logprobs.detach() + behind, kl=0.5)
    loss.backward()
    assert math.isfinite(loss.item())
    if behind <= 80:
        assert loss.item() == pytest.approx(0.5 * (math.exp(behind) - 1 - behind), rel=1e-4)
        assert logprobs.grad.item() == pytest.approx(0.5 * (1 - math.exp(behind)), rel=1e-4)
    else:
        assert -math.inf < logprobs.grad.item() < -1e30, "the update raises the token's probability"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_gradient_is_finite_in_every_dtype(dtype: torch.dtype, kl: float) -> None:
    values = torch.tensor([[-6e4, -1.0, 0.0, 5.0, 11.0, 90.0, 6e4]], dtype=dtype)
    for sign in (-1.0, 1.0):
        logprobs = values.clone().requires_grad_()
        more = {"reference": -values, "kl": kl} if kl else {}
        loss = policy_loss(logprobs, 0.0 * values, torch.tensor([sign]), torch.ones(1, 7), **more)
        loss.backward()
        assert math.isfinite(loss.item())
        assert logprobs.grad.isfinite().all()
        if sign < 0.0 and not kl:
            torch.testing.assert_close(
                logprobs.grad[0, 2:4].double(), torch.tensor([1.0, math.exp(5)]).double(), rtol=0.01, atol=0
            )


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_sequence_with_zero_weights_is_ignored(advantage: float) -> None:
    weights = token_weights(torch.tensor([[True, True], [False, False]]), Normalize.TOKEN)
    logprobs = torch.full((2, 2), -1.0, requires_grad=True)
    loss = policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, advantage]), weights)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5, -0.5], [0.0, 0.0]]))


def test_normalize_accepts_strings() -> None:
    for normalize in Normalize:
        longest = 5 if normalize is Normalize.LONGEST else None
        assert torch.equal(token_weights(MASK, str(normalize), longest), token_weights(MASK, normalize, longest))
        assert loss_named("grpo", normalize=str(normalize)).normalize is normalize
    message = r"normalize='tokens' \(did you mean token\?\): expected sequence, token, longest"
    with pytest.raises(UnknownOptionError, match=message):
        token_weights(MASK, "tokens")
    with pytest.raises(UnknownOptionError, match=message):
        loss_named("grpo", normalize="tokens")
    with pytest.raises(UnknownOptionError, match="normalize=None"):
        loss_named("grpo", normalize=None)


def test_mismatched_shapes_raise() -> None:
    logprobs = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantages of \(2,\), got \(3,\)"):
        policy_loss(logprobs, logprobs, torch.zeros(3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"old \(2, 2\)"):
        policy_loss(logprobs, torch.zeros(2, 2), torch.zeros(2), torch.ones(2, 3))


NAN, INFINITE = math.nan, math.inf
GRID = torch.full((2, 3), -1.0)


def _with(value: float) -> torch.Tensor:
    return GRID.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"old": _with(NAN)}, "old of token 2 of sequence 1: nan"),
        ({"logprobs": _with(-INFINITE), "old": _with(-INFINITE)}, "old of token 2 of sequence 1: -inf"),
        ({"correction": _with(NAN)}, "correction of token 2 of sequence 1: nan"),
        ({"correction": _with(INFINITE)}, "correction of token 2 of sequence 1: inf"),
        ({"reference": _with(NAN), "kl": 0.1}, "reference of token 2 of sequence 1: nan"),
        ({"advantages": torch.tensor([1.0, NAN])}, "advantages of token 0 of sequence 1: nan"),
        ({"advantages": torch.tensor([-INFINITE, 1.0])}, "advantages of token 0 of sequence 0: -inf"),
        ({"weights": -_with(NAN)}, "weights of token 2 of sequence 1: nan"),
        ({"weights": _with(0.0)}, "weights of token 0 of sequence 0: -1"),
    ],
)
def test_non_finite_arguments_raise(overrides: dict[str, Any], message: str) -> None:
    arguments = {"logprobs": GRID, "old": GRID, "advantages": torch.ones(2), "weights": torch.ones(2, 3)} | overrides
    with pytest.raises(NonFiniteError, match=f"{message}.*expected|{message}.*Expected"):
        policy_loss(**arguments)
    if "weights" not in overrides:  # the same values in tokens that do not count
        arguments["weights"] = torch.zeros(2, 3)
        assert policy_loss(**arguments).item() == 0.0


def test_policy_nan_is_propagated() -> None:
    """Training skips such an update, so non-finite corrections of the same sequence do not raise."""
    correction = torch.tensor([[NAN, NAN, NAN], [1.0, 1.0, 1.0]])
    logprobs = torch.tensor([[NAN, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    loss = policy_loss(logprobs, logprobs, torch.ones(2), torch.ones(2, 3), correction=correction)
    assert math.isnan(loss.item())


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"eps_low": 2.0}, UnknownArgumentError, r"eps_low=2\.0: expected a number from 0 to 1"),
        ({"eps_high": -0.5}, UnknownArgumentError, r"eps_high=-0\.5: expected a number of at least 0"),
        ({"eps_high": NAN}, UnknownArgumentError, "eps_high=nan"),
        ({"eps_low": "0.2"}, UnknownArgumentError, r"eps_low='0\.2'"),
        ({"kl": -1.0, "reference": GRID}, UnknownArgumentError, r"kl=-1\.0: expected a finite number"),
        ({"kl": "0.1", "reference": GRID}, UnknownArgumentError, r"kl='0\.1'"),
        ({"old": [[-1.0] * 3] * 2}, UnknownArgumentError, "old=.*: expected a tensor"),
        ({"advantages": [1.0, 1.0]}, UnknownArgumentError, "advantages=.*: expected a tensor"),
        ({"correction": torch.ones(1, 3)}, ValueError, r"correction \(1, 3\)"),
    ],
)
def test_invalid_settings_and_types_raise(overrides: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"logprobs": GRID, "old": GRID, "advantages": torch.ones(2), "weights": torch.ones(2, 3)} | overrides
    with pytest.raises(error, match=message):
        policy_loss(**arguments)
    assert policy_loss(GRID, GRID, torch.ones(2), torch.ones(2, 3), eps_high=INFINITE).item() == -6.0  # without a clip


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(5), "token"), ValueError, r"mask \(5,\)"),
        (([[1, 0]], "token"), UnknownArgumentError, "mask=.*: expected a tensor"),
        ((MASK, "longest", 0), UnknownArgumentError, "longest=0: expected a whole number of at least 1"),
        ((MASK, "longest", "4"), UnknownArgumentError, "longest='4'"),
        ((MASK, "longest", True), UnknownArgumentError, "longest=True"),
    ],
)
def test_invalid_token_weights_arguments_raise(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        token_weights(*arguments)


def test_clipped_share_with_mismatched_shapes_raises() -> None:
    with pytest.raises(ValueError, match=r"old \(2, 2\)"):
        clipped_share(torch.zeros(1, 2), torch.zeros(2, 2), torch.ones(1), torch.ones(1, 2))


@pytest.mark.parametrize("value", [0.5, 2, -1, math.nan])
def test_masks_with_other_values_raise(value: float) -> None:
    mask = torch.tensor([[1, value], [0, 1]])
    with pytest.raises(ValueError, match=rf"mask has the value {value:g}: expected 1 or True"):
        token_weights(mask, "token")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_of_zeros_and_ones_are_equivalent(dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert torch.equal(token_weights(mask.to(dtype), "token"), mask / 3)


def test_integer_logprobs_raise() -> None:
    logprobs = torch.full((1, 2), -1)
    with pytest.raises(UnknownArgumentError, match=r"logprobs is of torch\.int64: expected floating-point"):
        policy_loss(logprobs, logprobs, torch.ones(1), torch.ones(1, 2))


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_masks_that_are_not_dense_raise(kind: str) -> None:
    mask = MASK.to_sparse() if kind == "sparse" else torch.nested.nested_tensor([MASK[0], MASK[1, :2]])
    with pytest.raises(UnknownArgumentError, match=f"^mask (has the layout {kind}_coo|is {kind}): "):
        token_weights(mask, Normalize.SEQUENCE)
