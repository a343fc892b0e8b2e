"""Importance weights for tokens of another distribution, compared with manually computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from nrl_models.errors import NonFiniteError, UnknownArgumentError
from nrl_models.losses import Correction, importance_weights

RATIOS = torch.tensor([[0.25, 1.0, 4.0], [2.0, 0.5, 1.5]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction("tis", cap=2.0), [[0.25, 1.0, 2.0], [2.0, 0.5, 0.0]]),
        (Correction("mis", cap=2.5), [[0.25, 1.0, 0.0], [2.0, 0.5, 0.0]]),
        (Correction("mis", cap=2.5, floor=0.4), [[0.0, 1.0, 0.0], [2.0, 0.5, 0.0]]),
        (Correction("tis", cap=0.5, level="sequence"), [[0.5, 0.5, 0.5], [0.5, 0.5, 0.0]]),
        (Correction("tis", cap=3.0, level="sequence"), [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        (Correction("mis", cap=0.5, level="sequence"), [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_importance_weights(correction: Correction, expected: list[list[float]]) -> None:
    trainer = torch.full((2, 3), -1.0, requires_grad=True)
    engine = torch.where(MASK, -1.0 - RATIOS.log(), math.nan)  # values outside of the mask may be anything
    weights = importance_weights(trainer, engine, MASK, correction)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert not weights.requires_grad


def test_equal_logprobs_have_weight_one() -> None:
    logprobs = -torch.rand(4, 7)
    for correction in (Correction("tis"), Correction("mis", floor=0.5), Correction("mis", level="sequence")):
        assert importance_weights(logprobs, logprobs.double(), torch.ones(4, 7), correction).eq(1.0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_non_finite_engine_logprobs_raise(value: float, kind: str, level: str) -> None:
    engine = torch.full((2, 3), -1.0)
    engine[1, 1] = value
    with pytest.raises(NonFiniteError, match=f"token 1 of sequence 1 is {value}"):
        importance_weights(torch.full((2, 3), -1.0), engine, MASK, Correction(kind, level=level))


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ({"cap": 2.0}, ("Invalid truncated importance sampling type: None", "has no type", "tis or mis")),
        ({"type": "icepop"}, ("Invalid truncated importance sampling type: icepop", "tis or mis")),
        ({"type": "tis", "floor": 0.5}, ("floor=0.5: only mis has one",)),
        ({"type": "mis", "floor": 3.0}, ("floor=3.0", "below the cap of 2.0")),
        ({"cap": 0.0, "level": "word"}, ("type: None", "cap=0.0", "level='word': expected token or sequence")),
        ({"type": "tis", "cap": math.nan}, ("cap=nan",)),
        ({"type": "tis", "cap": "2"}, ("cap='2': expected a number above 0",)),
        ({"type": "mis", "floor": None}, ("floor=None: expected a number",)),
        ({"type": "tis", "cap": True}, ("cap=True: expected a number above 0",)),
    ],
)
def test_invalid_correction_raises(arguments: dict[str, object], messages: tuple[str, ...]) -> None:
    with pytest.raises(UnknownArgumentError) as raised:
        Correction(**arguments)
    for message in messages:
        assert message in str(raised.value)


def test_non_correction_argument_raises() -> None:
    with pytest.raises(UnknownArgumentError, match="correction='tis': expected a Correction"):
        importance_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), "tis")


@pytest.mark.parametrize("kind", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trainer_nan_is_propagated(kind: str, level: str) -> None:
    """A weight of 0 would drop the token silently."""
    trainer = torch.tensor([[-1.0, math.nan], [-1.0, -1.0]])
    weights = importance_weights(trainer, torch.full((2, 2), -1.0), torch.ones(2, 2), Correction(kind, level=level))
    assert weights.isnan().tolist() == [[level == "sequence", True], [False, False]]


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3,)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_mismatched_shapes_raise(shape: tuple[int, ...], place: int) -> None:
    arguments = [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)]
    arguments[place] = torch.ones(shape)
    with pytest.raises(ValueError, match=r"expected \(sequences, length\) of all; got trainer"):
        importance_weights(*arguments, Correction("tis"))


@pytest.mark.parametrize("value", [0.5, 2, -1, math.nan])
def test_mask_with_other_values_raises(value: float) -> None:
    logprobs = torch.full((1, 2), -1.0)
    with pytest.raises(ValueError, match=f"mask has the value {value:g}: expected 1 or True"):
        importance_weights(logprobs, logprobs, torch.tensor([[1, value]]), Correction("tis"))
