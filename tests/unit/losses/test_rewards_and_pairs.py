"""Rewards, pairs and named losses, compared with manually computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from nrl_models.errors import NonFiniteError, UnknownArgumentError
from nrl_models.losses import (
    LOSSES,
    Correction,
    dpo_loss,
    group_advantages,
    loss_named,
    misordered,
    overlong_penalty,
    ranking_loss,
    sequence_logprobs,
    teaching_groups,
)


def test_group_advantages() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2]])
    plain = torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(group_advantages(rewards, scale=False), plain)
    # The unbiased standard deviation of 1, 0, 0, 0: sqrt((0.75^2 + 3 0.25^2) / 3) = 1/2.
    torch.testing.assert_close(group_advantages(rewards, scale=True), plain / 0.5001)
    assert group_advantages(torch.tensor([[3.0]]), scale=True).item() == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", [False, True])
def test_advantages_of_non_finite_rewards_raise(value: float, scale: bool) -> None:
    with pytest.raises(NonFiniteError, match=f"completion 2 to question 1 is {value}"):
        group_advantages(torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, value]]), scale=scale)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 10, 16])
@pytest.mark.parametrize("reward", [0.1, -7.7, 1000.1, 1e6 + 0.1, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [False, True])
def test_equal_rewards_have_no_advantage(size: int, reward: float, dtype: torch.dtype, scale: bool) -> None:
    """The mean of three rewards of 1,000,000.1 is rounded in fp32: their advantage was 625."""
    assert not group_advantages(torch.full((2, size), reward, dtype=dtype), scale=scale).any()


def test_advantages_of_large_and_integer_rewards() -> None:
    large = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3]], dtype=torch.float64)
    assert group_advantages(large, scale=False).tolist() == [[-1.5, -0.5, 0.5, 1.5]]
    assert group_advantages(torch.tensor([[2**24 + 1, 2**24 + 2]]), scale=False).tolist() == [[-0.5, 0.5]]
    apart = torch.tensor([[3e38, 3e38, 3e38, -3e38]])
    torch.testing.assert_close(group_advantages(apart, scale=True), torch.tensor([[0.5, 0.5, 0.5, -1.5]]))
    with pytest.raises(NonFiniteError, match=r"question 0 are from -3e\+38 to 3e\+38: .* exceed the range of fp32"):
        group_advantages(apart, scale=False)


@pytest.mark.parametrize("rewards", [torch.ones(3), torch.ones(1, 2, 3)])
def test_rewards_without_group_dimension_raise(rewards: torch.Tensor) -> None:
    for function in (teaching_groups, lambda given: group_advantages(given, scale=True)):
        with pytest.raises(ValueError, match=r"expected \(groups, group_size\) of all; got rewards"):
            function(rewards)
        with pytest.raises(UnknownArgumentError, match=r"rewards=.*: expected a tensor"):
            function(rewards.tolist())


def test_complex_rewards_raise() -> None:
    for function in (teaching_groups, lambda given: group_advantages(given, scale=True)):
        with pytest.raises(UnknownArgumentError, match=r"rewards is of torch\.complex64: expected real numbers"):
            function(torch.ones(2, 2, dtype=torch.complex64))


def test_non_bool_scale_raises() -> None:
    """TRL's "none" would be truthy."""
    with pytest.raises(UnknownArgumentError, match="scale='none': expected True or False"):
        group_advantages(torch.ones(1, 2), scale="none")


def test_teaching_groups() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.5, 0.5 + 1e-6]])
    assert teaching_groups(rewards).tolist() == [False, False, True, True]
    assert teaching_groups(torch.zeros(2, 0)).tolist() == [False, False]
    with pytest.raises(NonFiniteError, match="completion 1 to question 0 is nan"):
        teaching_groups(torch.tensor([[1.0, math.nan]]))


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 80, 81, 90, 100, 120])
    expected = torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20), expected)
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20, 0.5), expected / 2)
    with pytest.raises(ValueError, match="1 to 100"):
        overlong_penalty(lengths, 100, 101)
    for arguments in ((lengths, 100, 2.5), (lengths, 100, "2"), ([80], 100, 20), (lengths, 100, 20, -1.0)):
        with pytest.raises(UnknownArgumentError, match=r"=.*: expected a"):
            overlong_penalty(*arguments)


def test_sequence_logprobs_ignore_masked_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-4.0, math.inf, -8.0]])
    mask = torch.tensor([[True, True, False], [False, False, True]])
    assert sequence_logprobs(logprobs, mask).tolist() == [-3.0, -8.0]


@pytest.mark.parametrize("name", ["reference_chosen", "reference_rejected"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_dpo_with_non_finite_reference_raises(name: str, value: float) -> None:
    arguments = {key: torch.zeros(3) for key in ("chosen", "rejected", "reference_chosen", "reference_rejected")}
    arguments[name][1] = value
    with pytest.raises(NonFiniteError, match=rf"{name} of pair 1 is {value}: expected finite numbers"):
        dpo_loss(**arguments)


def test_dpo_loss_and_gradient() -> None:
    chosen, rejected = (torch.tensor(values, requires_grad=True) for values in ([-1.0, -4.0], [-2.0, -3.0]))
    reference = torch.tensor([-1.5, -4.0]), torch.tensor([-1.5, -4.0])
    margins = [(-1.0 + 1.5) - (-2.0 + 1.5), (-4.0 + 4.0) - (-3.0 + 4.0)]
    assert margins == [1.0, -1.0]
    loss = dpo_loss(chosen, rejected, *reference, beta=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-0.5 * margin)) for margin in margins) / 2)
    slopes = torch.tensor([-0.5 / (1 + math.exp(0.5 * margin)) / 2 for margin in margins])
    torch.testing.assert_close(chosen.grad, slopes)
    torch.testing.assert_close(rejected.grad, -slopes)


def test_ranking_loss_and_gradient() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0], requires_grad=True), torch.tensor([1.0, 0.5])
    loss = ranking_loss(chosen, rejected, margin=0.25)
    loss.backward()
    assert loss.item() == pytest.approx((math.log1p(math.exp(-0.75)) + math.log1p(math.exp(0.75))) / 2)
    expected = [-1 / (1 + math.exp(0.75)) / 2, -1 / (1 + math.exp(-0.75)) / 2]
    torch.testing.assert_close(chosen.grad, torch.tensor(expected))


def test_mismatched_pair_shapes_raise() -> None:
    with pytest.raises(ValueError, match=r"expected \(pairs\) of all; got chosen \(2,\), rejected \(1,\)"):
        ranking_loss(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"expected \(pairs\) of all; got chosen \(2, 1\)"):
        ranking_loss(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"reference_rejected \(1,\)"):
        dpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"expected \(sequences, length\) of all"):
        sequence_logprobs(torch.zeros(2, 3), torch.ones(3))
    for loss in (ranking_loss, dpo_loss):
        with pytest.raises(ValueError, match="there are no pairs"):
            loss(*torch.zeros(4 if loss is dpo_loss else 2, 0))


def test_invalid_pair_settings_raise() -> None:
    for beta in (0.0, -1.0, math.nan, "0.1"):
        with pytest.raises(UnknownArgumentError, match=r"beta=.*: expected a number above 0"):
            dpo_loss(*torch.zeros(4, 2), beta=beta)
    with pytest.raises(UnknownArgumentError, match=r"margin=nan: expected"):
        ranking_loss(*torch.zeros(2, 2), margin=math.nan)


def test_pairs_in_bf16_are_computed_in_fp32() -> None:
    values = torch.tensor([[-100.5], [-101.0], [-100.0], [-101.5]]).bfloat16()
    loss = dpo_loss(*values)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log1p(math.exp(0.1)))


def test_misordered() -> None:
    assert misordered([1.0, 2.0], [-5.25, 1.9]) == []
    assert misordered(torch.tensor([1.0, 0.0, 3.0, math.nan, 1.0]), [0.0, 1.0, 3.0, 0.0, math.nan]) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="two lists of one length"):
        misordered([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="two lists of one length"):
        misordered([], [])


def test_loss_named() -> None:
    assert loss_named("dapo", eps_high=0.3).eps_high == 0.3
    assert loss_named("dapo").eps_high == 0.28
    assert loss_named("grpo", correction=Correction("tis")).correction == Correction("tis")
    with pytest.raises(UnknownArgumentError, match=r"unknown loss 'dap' \(did you mean dapo\?\)") as raised:
        loss_named("dap")
    assert all(name in str(raised.value) for name in LOSSES)
    with pytest.raises(UnknownArgumentError, match="dpo has no setting eps_high: expected some of beta"):
        loss_named("dpo", eps_high=0.3)
    with pytest.raises(UnknownArgumentError, match=r"eps_low=1\.5.*kl=-1|kl=-1.*eps_low=1\.5"):
        loss_named("grpo", eps_low=1.5, kl=-1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grpo", {"correction": "tis"}, "correction='tis': expected a Correction"),
        ("grpo", {"scale_rewards": "none"}, "scale_rewards='none': expected True or False"),
        ("dapo", {"kl": "0.1"}, "kl='0.1': expected a number"),
        ("dapo", {"eps_high": math.nan}, "eps_high=nan"),
        ("dpo", {"beta": "large"}, "beta='large': expected a number above 0"),
        ("reward", {"margin": math.nan}, "margin=nan: expected a number"),
        ("dapo", {"dynamic_sampling": 2.5}, r"dynamic_sampling=2\.5: expected a whole number"),
        ("dapo", {"dynamic_sampling": True}, "dynamic_sampling=True: expected a whole number"),
        ("grpo", {"overlong_buffer": 2.5}, r"overlong_buffer=2\.5: expected a whole number"),
        ("grpo", {"overlong_penalty": math.inf}, "overlong_penalty=inf"),
        ("grpo", {"kl": math.inf}, "kl=inf: expected a number"),
        (["grpo"], {}, r"unknown loss \['grpo'\]"),
    ],
)
def test_invalid_setting_types_raise(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=message):
        loss_named(name, **settings)


@pytest.mark.parametrize("value", [0.5, 2, -1, math.nan])
def test_sequence_logprobs_with_other_mask_values_raise(value: float) -> None:
    with pytest.raises(ValueError, match=f"mask has the value {value:g}: expected 1 or True"):
        sequence_logprobs(torch.full((1, 2), -1.0), torch.tensor([[1, value]]))
