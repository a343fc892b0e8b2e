"""Compare verl's losses, corrections and metrics with ours, on the same numbers: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="needs verl: make test-trainers", exc_type=ImportError
)

import numpy as np  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

from nrl_models.logprobs import kl_k1, kl_k2, kl_k3  # noqa: E402
from nrl_models.losses import (  # noqa: E402
    Correction,
    Normalize,
    clipped_share,
    group_advantages,
    importance_weights,
    policy_loss,
    token_weights,
)

MAX_LENGTH, GROUP = 10, 4
LENGTHS = [6, 2, 10, 6, 1, 4, 5, 6]
REWARDS = [1.0, 0.0, 0.25, 0.5, 1.0, 1.0, 0.0, -0.5]
METHODS = {
    "grpo": (Normalize.SEQUENCE, "seq-mean-token-mean", 0.2),
    "dr_grpo": (Normalize.LONGEST, "seq-mean-token-sum-norm", 0.2),
    "dapo": (Normalize.TOKEN, "token-mean", 0.28),
}
CORRECTIONS = {
    "tis": (Correction("tis", cap=1.2), "1.2"),
    "mis": (Correction("mis", cap=1.2, floor=0.8), "0.8_1.2"),
}


def numbers(seed: int, spread: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = -3 * torch.rand(len(LENGTHS), MAX_LENGTH, generator=generator)
    return values + spread * torch.randn(values.shape, generator=generator)


MASK = torch.arange(MAX_LENGTH) < torch.tensor(LENGTHS)[:, None]
OLD = numbers(0)
ENGINE = OLD + 0.2 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(1))
REFERENCE = OLD + 0.5 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(2))


def logprobs() -> torch.Tensor:
    """Return log-probabilities of the policy after an update, so that some ratios are outside the clip range."""
    changed = OLD + 0.3 * torch.randn(OLD.shape, generator=torch.Generator().manual_seed(3))
    return changed.requires_grad_()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-5, atol=1e-7)


def advantages_of(method: str) -> torch.Tensor:
    return group_advantages(torch.tensor(REWARDS).view(-1, GROUP), scale=method != "dr_grpo").flatten()


@pytest.mark.parametrize("method", METHODS)
def test_group_advantages_match_verl(method: str) -> None:
    rewards = torch.zeros(MASK.shape).scatter(1, torch.tensor(LENGTHS)[:, None] - 1, torch.tensor(REWARDS)[:, None])
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, MASK.float(), np.repeat([0, 1], GROUP), epsilon=1e-4, norm_adv_by_std_in_grpo=method != "dr_grpo"
    )
    assert_same(advantages_of(method)[:, None] * MASK, theirs)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_importance_weights_match_verl(name: str, level: str) -> None:
    correction, threshold = CORRECTIONS[name]
    correction = Correction(correction.type, cap=correction.cap, floor=correction.floor, level=level)
    theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(OLD - ENGINE, MASK.float(), level, threshold)
    ours = importance_weights(OLD, ENGINE, MASK, correction)
    assert_same(ours, theirs)
    bounded = ours[MASK] == (correction.cap if name == "tis" else 0.0)
    assert 0 < bounded.sum() < MASK.sum()


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("name", [None, *CORRECTIONS])
@pytest.mark.parametrize("method", METHODS)
def test_policy_loss_matches_verl(method: str, name: str | None, kl: float) -> None:
    """verl additionally clips the loss of tokens with a negative advantage at `clip_ratio_c`. The papers do not."""
    normalize, aggregation, high = METHODS[method]
    config = ActorConfig(
        strategy="fsdp2", clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=high, clip_ratio_c=1e9,
        loss_agg_mode=aggregation, ppo_micro_batch_size_per_gpu=1, rollout_n=GROUP,
    )  # fmt: skip
    advantages, gains = advantages_of(method), advantages_of(method)[:, None].expand_as(OLD)
    weights = None if name is None else importance_weights(OLD, ENGINE, MASK, CORRECTIONS[name][0])
    verl_logprobs = logprobs()
    theirs, measured = core_algos.compute_policy_loss_vanilla(
        OLD, verl_logprobs, gains, MASK.float(), aggregation, config, rollout_is_weights=weights
    )
    if kl:
        penalty = core_algos.kl_penalty(verl_logprobs, REFERENCE, "low_var_kl")
        theirs = theirs + kl * core_algos.agg_loss(penalty, MASK.float(), aggregation)
    counted = token_weights(MASK, normalize, MAX_LENGTH if normalize is Normalize.LONGEST else None)
    arguments: Any = (OLD, advantages, counted)
    nrl_logprobs = verl_logprobs.detach().requires_grad_()
    ours = policy_loss(
        nrl_logprobs, *arguments, eps_high=high, correction=weights, reference=REFERENCE if kl else None, kl=kl
    )  # fmt: skip
    ratios = (verl_logprobs - OLD).exp()[MASK]
    assert ratios.min() < 0.8 < 1.28 < ratios.max()
    assert_same(ours, theirs)
    theirs.backward()
    ours.backward()
    assert_same(nrl_logprobs.grad, verl_logprobs.grad)
    assert clipped_share(nrl_logprobs, *arguments, eps_high=high) == pytest.approx(
        measured["actor/pg_clipfrac"], rel=1e-5
    )


def test_kl_estimators_match_verl() -> None:
    theirs = rollout_corr_helper.compute_offpolicy_metrics(OLD, ENGINE, MASK.float())
    assert kl_k1(OLD, ENGINE, MASK) == pytest.approx(theirs["kl"], rel=1e-5)
    assert kl_k3(OLD, ENGINE, MASK) == pytest.approx(theirs["k3_kl"], rel=1e-5)
    for ours, name in ((kl_k1, "k1"), (kl_k2, "k2"), (kl_k3, "k3")):  # verl uses these for the policy and its reference
        of_tokens = core_algos.kl_penalty(ENGINE, OLD, name)[MASK]
        assert ours(OLD, ENGINE, MASK) == pytest.approx(of_tokens.mean().item(), rel=1e-5)
