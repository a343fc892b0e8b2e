import math

import pytest
import torch

from nrl_models.parity import compare_state_dicts, compare_tensors


def test_equal_tensors() -> None:
    tensor = torch.randn(4, 5)
    max_diff, mean_diff, cosine = compare_tensors(tensor, tensor.clone())
    assert (max_diff, mean_diff) == (0.0, 0.0)
    assert cosine == pytest.approx(1.0)


def test_differences_match_definition() -> None:
    max_diff, mean_diff, cosine = compare_tensors(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]))
    assert (max_diff, mean_diff) == (1.0, 1.0)
    assert cosine == pytest.approx(24 / 25)


def test_cosine_is_exact_on_large_tensors() -> None:
    """In fp32 the sum of a million squares is off by more than the 1e-4 that level 3 requires."""
    tensor = torch.full((2_000_000,), 0.1) + torch.linspace(0, 1e-3, 2_000_000)
    assert compare_tensors(tensor, tensor * 3).cosine_similarity == pytest.approx(1.0, abs=1e-12)


def test_differences_are_computed_in_fp32() -> None:
    assert compare_tensors(torch.tensor([256.0]).bfloat16(), torch.tensor([257.0])).max_diff == 1.0


def test_nan_on_one_side_is_infinite_difference() -> None:
    nan, number = torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])
    assert compare_tensors(nan, number).max_diff == math.inf
    assert compare_tensors(number, nan).max_diff == math.inf
    assert compare_tensors(nan, nan).max_diff == 0.0


def test_matching_infinities_are_equal() -> None:
    masked = torch.tensor([-math.inf, 1.0])
    assert compare_tensors(masked, masked).max_diff == 0.0
    assert compare_tensors(masked, torch.tensor([0.0, 1.0])).max_diff == math.inf


def test_shape_mismatch_raises() -> None:
    with pytest.raises(ValueError, match=r"shapes differ: reference \(2,\), actual \(3,\)"):
        compare_tensors(torch.zeros(2), torch.zeros(3))


def test_cosine_similarity_of_zero_tensors() -> None:
    assert compare_tensors(torch.zeros(3), torch.ones(3)).cosine_similarity == 0.0
    assert compare_tensors(torch.zeros(3), torch.zeros(3)).cosine_similarity == 1.0


def test_compare_state_dicts() -> None:
    first = {
        "same": torch.ones(2),
        "value": torch.zeros(2),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "a": torch.ones(1),
    }
    second = {
        "same": torch.ones(2),
        "value": torch.tensor([0.0, 0.5]),
        "shape": torch.ones(3),
        "dtype": torch.ones(2).double(),
        "b": torch.ones(1),
    }
    missing, extra, max_diffs = compare_state_dicts(first, second)
    assert missing == {"a"}
    assert extra == {"b"}
    assert max_diffs == {"value": 0.5, "shape": math.inf, "dtype": math.inf}
    assert not compare_state_dicts(first, second).equal
    assert compare_state_dicts(first, dict(first)).equal
    assert "all tensors match exactly" in str(compare_state_dicts(first, dict(first)))


def test_compare_tensors_output(capsys: pytest.CaptureFixture[str]) -> None:
    """The output uses the terms of the parity guide."""
    compare_tensors(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]), name="logits")
    compare_tensors(torch.tensor([3.0]), torch.tensor([3.0]))
    compare_tensors(torch.zeros(2), torch.zeros(2), verbose=False)
    line = "max_diff={}, mean_diff={}, cosine_sim={}"
    assert capsys.readouterr().out.splitlines() == [
        "logits: " + line.format("1.000000e+00", "1.000000e+00", "0.96000000"),
        line.format("0.000000e+00", "0.000000e+00", "1.00000000"),
    ]


def test_compare_state_dicts_output(capsys: pytest.CaptureFixture[str]) -> None:
    first = {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(2)}
    compare_state_dicts(first, {"b": torch.zeros(2), "c": torch.ones(3), "d": torch.ones(1)}, prefix="check: ")
    compare_state_dicts(first, dict(first), prefix="check: ")
    compare_state_dicts(first, {}, verbose=False)
    assert capsys.readouterr().out.splitlines() == [
        "check: Missing keys: ['a']",
        "check: Extra keys: ['d']",
        "check: b: max_diff=1.000000e+00",
        "check: c: max_diff=inf (shapes or dtypes differ, or NaN)",
        "check: All 3 parameters match exactly.",
    ]
