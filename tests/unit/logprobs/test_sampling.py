"""The set of tokens that can be sampled, counted manually."""

import pytest
import torch

from nrl_models.logprobs.sampling import Sampling, processed, smallest_kept


def kept(probabilities: list[float], **sampling: float) -> list[int]:
    """Return the indices of the tokens that remain."""
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    return (logits >= smallest_kept(logits, Sampling(**sampling)))[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 100}, [0, 1, 2, 3]),
        ({"top_p": 0.1}, [1]),  # at least one token remains
        ({"top_p": 0.45}, [1, 3]),  # the token that crosses the bound remains
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.75}, [0, 1, 3]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # of the tokens within top-k, 0.7 / 0.9 is more than 0.75
        ({"top_k": 1, "top_p": 0.9}, [1]),
    ],
)
def test_kept_tokens(sampling: dict[str, float], expected: list[int]) -> None:
    assert kept([0.2, 0.4, 0.1, 0.3], **sampling) == expected


@pytest.mark.parametrize("sampling", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}])
def test_ties_are_kept_or_excluded_together(sampling: dict[str, float]) -> None:
    assert kept([0.3, 0.15, 0.3, 0.25], **sampling) == [0, 2]
    assert kept([0.4, 0.2, 0.2, 0.2], **sampling) == [0, 1, 2, 3]


@pytest.mark.parametrize("sampling", [{"top_k": 2}, {"top_p": 0.6}])
def test_threshold_is_midway_between_neighbors(sampling: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert smallest_kept(logits, Sampling(**sampling)).item() in (1.5, 2.5)


def test_rows_are_independent() -> None:
    logits = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.35, 0.25]]).log()
    assert (logits >= smallest_kept(logits, Sampling(top_p=0.7))).tolist() == [
        [True, False, False],
        [True, True, False],
    ]


def test_greedy_sampling_does_not_process_logits() -> None:
    sampling = Sampling(temperature=0.0, top_k=5, top_p=0.5)
    assert sampling.greedy
    assert not sampling.truncates
    assert sampling.is_identity
    assert sampling.processing == Sampling()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_out_of_range_values_raise(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**values)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=0.3)], ids=str)
def test_neighboring_floats_are_separated(sampling: Sampling) -> None:
    logits = torch.tensor([[1.0 + 2**-23, 1.0, -1.0, -2.0]])
    assert processed(logits, sampling).isfinite().tolist() == [[True, False, False, False]]
