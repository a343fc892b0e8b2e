"""Arguments of `Watch.before_update`: defaults, masks, versions and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nrl_models.engines.engine_types import Sample
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import TokenLogprobs
from nrl_models.watch import Watch

SAMPLES = [Sample((1, 2), (3, 4), (-1.0, -1.0)), Sample((1,), (2, 3, 4), (-1.0, -1.0, -1.0))]
TRAINER = torch.tensor([[0.0, 0.0, -1.0, 0.0], [0.0, -1.0, -1.0, -1.0]])
"""The last token of the first row is outside the trainer's top-p."""

MASK = torch.tensor([[False, False, True, False], [False, True, True, True]])
ENGINE = torch.full((2, 4), -1.0)


def compared(trainer: Any = TRAINER, **options: Any) -> tuple[int, float]:
    options = {"samples": SAMPLES} | options
    metrics = Watch(fail=False).before_update(trainer=trainer, **options).metrics
    return metrics.tokens, metrics.token_mult_prob_error


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_mask_overrides_sample_mask(dtype: torch.dtype) -> None:
    assert compared()[0] == 5
    assert compared(mask=MASK.to(dtype)) == (4, 1.0)
    assert compared(mask=MASK.to(dtype), versions=[0, 1]) == (1, 1.0)


def test_engine_overrides_sample_logprobs() -> None:
    assert compared()[1] > 1.0
    assert compared(engine=TRAINER) == (5, 1.0)


def test_token_logprobs_mask_is_used() -> None:
    scored = MASK | torch.tensor([[True, True, False, False], [False] * 4])  # prompts were scored as well
    result = TokenLogprobs(TRAINER, scored, ~scored)
    assert compared(result) == (4, 1.0)
    assert compared(result, mask=MASK.float()) == (4, 1.0)
    assert compared(TokenLogprobs(TRAINER, MASK, ~MASK), samples=None, engine=ENGINE) == (4, 1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"samples": None, "engine": ENGINE}, UnknownArgumentError, "expected trainer=, and samples="),
        ({"trainer": TRAINER[0]}, ValueError, r"trainer has shape \(4,\)"),
        ({"trainer": TRAINER.tolist()}, UnknownArgumentError, "trainer=.*: expected a tensor"),
        ({"mask": MASK.tolist()}, UnknownArgumentError, "mask=.*: expected a tensor"),
        ({"mask": MASK[:, 1:]}, ValueError, r"one shape .* mask \(2, 3\)"),
        ({"mask": MASK[:1]}, ValueError, r"one shape .* mask \(1, 4\)"),
        ({"samples": SAMPLES[:1]}, ValueError, "trainer has 2 rows, and there are 1 samples"),
        ({"samples": SAMPLES[:1], "engine": ENGINE, "mask": MASK}, ValueError, "2 rows, and there are 1 samples"),
        ({"versions": [1]}, ValueError, "there are 1 versions, and 2 rows"),
        ({"versions": 1}, UnknownArgumentError, "versions=1: expected a whole number for each row"),
        ({"versions": [0, None]}, UnknownArgumentError, "expected a whole number for each row"),
        ({"versions": [0, math.nan]}, UnknownArgumentError, "expected a whole number for each row"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compared(**options)


def test_versions_as_tensor() -> None:
    assert compared(engine=TRAINER, versions=torch.tensor([0, 1])) == (2, 1.0)
