"""Matching passed tensors to the model's own tensors: the rules, on hand-written tables."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import Match, match
from nrl_models.common.views.view import HFTensor, Piece, View


def rows(name: str, parameter: str, start: int, length: int) -> HFTensor:
    """Return a tensor that is a range of rows of a parameter with four columns."""
    return HFTensor(name, (length, 4), (Piece(View(parameter).then("narrow", 0, start, length)),))


def whole(name: str, parameter: str, *shape: int) -> HFTensor:
    return HFTensor(name, shape, (Piece(View(parameter)),))


OWN = {
    "qkv": TensorSpec((8, 4), torch.float32),
    "norm": TensorSpec((4,), torch.float32),
    "embed": TensorSpec((6, 4), torch.float32),
    "head": TensorSpec((6, 4), torch.float32),
}
TABLE = {
    tensor.name: tensor
    for tensor in (
        rows("q", "qkv", 0, 4),
        rows("k", "qkv", 4, 2),
        rows("v", "qkv", 6, 2),
        rows("older q", "qkv", 0, 4),
        rows("qk", "qkv", 0, 6),
        whole("norm", "norm", 4),
        whole("embed", "embed", 6, 4),
        whole("head", "head", 6, 4),
        # packed on the hub, separate in the model
        HFTensor(
            "norm and embed",
            (7, 4),
            (
                Piece(View("norm").then("reshape", 1, 4), (("narrow", (0, 0, 1)),)),
                Piece(View("embed"), (("narrow", (0, 1, 6)),)),
            ),
        ),
    )
}
PARTS = {"qkv": ["q", "k", "v"], "norm": ["norm"], "embed": ["embed"], "head": ["head"]}


def absent(name: str, given: Collection[HFTensor]) -> list[str]:
    names = {tensor.name for tensor in given}
    return [part for part in PARTS[name] if part not in names]


def matched(*keys: str, tied: dict[str, str] | None = None, **options: Any) -> Match:
    """Match these keys, with correct shapes and dtypes except for `changed`."""
    changed = options.pop("changed", {})
    given = {key: TensorSpec(TABLE[key].shape if key in TABLE else (1,), torch.float32) for key in keys} | changed
    options = {"why_unexpected": lambda key: "nobody knows it"} | options
    return match(given, TABLE.get, OWN, absent, tied or {}, **options)


def kinds(result: Match) -> set[tuple[str, str]]:
    return {(problem.kind, problem.subject) for problem in result.problems}


EVERYTHING = ("q", "k", "v", "norm", "embed", "head")


@pytest.mark.parametrize("keys", [EVERYTHING, EVERYTHING[::-1], ("qk", "v", "norm and embed", "head")])
def test_complete_match(keys: tuple[str, ...]) -> None:
    result = matched(*keys)
    assert not result.problems
    assert not result.missing
    assert result.sources.keys() == OWN.keys()
    for name, sources in result.sources.items():
        assert [target for _, target in sources] == [TABLE[key] for key, _ in sources]
        assert all(name in target.parameters for _, target in sources)


def test_missing_tensors() -> None:
    result = matched("q", "k", "v", "embed")
    assert kinds(result) == {("missing", "norm"), ("missing", "head")}
    assert result.missing == ["norm", "head"]


def test_missing_fused_tensor_lists_parts() -> None:
    assert kinds(matched("norm", "embed", "head")) == {("missing", "q, k, v")}


def test_may_miss_reports_no_problem() -> None:
    result = matched("q", "k", "v", may_miss=lambda name: name != "norm")
    assert kinds(result) == {("missing", "norm")}
    assert result.missing == ["norm", "embed", "head"]


def test_missing_part_is_partial_despite_may_miss() -> None:
    result = matched("k", "norm", may_miss=lambda name: True)
    (problem,) = result.problems
    assert (problem.kind, problem.subject) == ("partial", "k")
    assert problem.detail == "fill only a part of qkv; q, v not found"


def test_wrong_packed_shape_is_reported_once() -> None:
    result = matched("q", "k", "v", "head", changed={"norm and embed": TensorSpec((6, 4), torch.float32)})
    assert kinds(result) == {("shape", "norm and embed")}


@pytest.mark.parametrize(
    ("keys", "listed"),
    [
        (("older q", *EVERYTHING), "older q, q, k, v"),  # one region under two names
        (("qk", *EVERYTHING), "qk, q, k, v"),  # a larger region and its content
        (("q", "older q", "norm", "embed", "head"), "q, older q"),  # the right number of rows, but the same ones twice
        (("qk", "q"), "qk, q"),
        (("qk", "k"), "qk, k"),  # as many rows as needed, but v's would be uninitialized
    ],
)
def test_overlapping_tensors_are_duplicated(keys: tuple[str, ...], listed: str) -> None:
    result = matched(*keys, may_miss=lambda name: True)
    assert kinds(result) == {("duplicated", listed)}


def test_wrong_shape_is_reported_once() -> None:
    result = matched(
        "q", "k", "norm", "head", changed={"v": TensorSpec((3, 4), torch.float32), "embed": TensorSpec((), None)}
    )
    assert kinds(result) == {("shape", "v"), ("shape", "embed")}
    assert "(3, 4), the model expects (2, 4)" in str(result.problems[0])


@pytest.mark.parametrize("second", [torch.bfloat16, torch.float64])
def test_parts_with_mixed_floating_point_dtypes_match(second: torch.dtype) -> None:
    assert not matched(*EVERYTHING, changed={"k": TensorSpec((2, 4), second)}).problems


@pytest.mark.parametrize("second", [torch.int8, torch.float8_e4m3fn])
def test_parts_mixing_quantized_dtypes_are_a_problem(second: torch.dtype) -> None:
    result = matched(*EVERYTHING, changed={"k": TensorSpec((2, 4), second)})
    assert kinds(result) == {("dtype", "q, k, v")}
    assert str(second) in result.problems[0].detail
    # All have the same shape, so the match cannot decide.
    alike = {key: TensorSpec(TABLE[key].shape, second) for key in ("q", "k", "v")}
    assert not matched(*EVERYTHING, changed=alike).problems


def test_unknown_names_are_unexpected_unless_ignored() -> None:
    assert kinds(matched(*EVERYTHING, "other")) == {("unexpected", "other")}
    result = matched(*EVERYTHING, "other", why_unexpected=lambda key: None)
    assert not result.problems
    assert "other" not in [key for sources in result.sources.values() for key, _ in sources]


@pytest.mark.parametrize(("given", "other"), [("embed", "head"), ("head", "embed")])
def test_tied_tensor_matches_under_either_name(given: str, other: str) -> None:
    result = matched("q", "k", "v", "norm", given, tied={"head": "embed"})
    assert not result.problems
    assert not result.missing
    assert result.copies == {other: given}


def test_tied_tensors_both_passed_or_both_missing() -> None:
    result = matched(*EVERYTHING, tied={"head": "embed"})
    assert not result.copies
    assert not result.problems
    result = matched("q", "k", "v", "norm", tied={"head": "embed"})
    assert kinds(result) == {("missing", "embed"), ("missing", "head")}


def test_problems_list_all_subjects_with_files() -> None:
    files = {
        "q": StoredTensor("", "one", (4, 4), torch.float32, 0),
        "older q": StoredTensor("", "two", (4, 4), torch.float32, 0),
        "embed": StoredTensor("", "two", (6,), torch.float32, 0),
        "other": StoredTensor("", "three", (1,), torch.float32, 0),
    }
    result = matched(changed=files)
    assert {(problem.kind, problem.subject, problem.file) for problem in result.problems} == {
        ("duplicated", "q, older q", "one, two"),
        ("shape", "embed", "two"),
        ("unexpected", "other", "three"),
        ("missing", "norm", None),
        ("missing", "head", None),
    }


def test_long_lists_are_truncated() -> None:
    table = {f"e{index}": rows(f"e{index}", "w", index, 1) for index in range(20)}
    result = match(
        {key: TensorSpec((1, 4), torch.float32) for key in list(table)[:10]},
        table.get,
        {"w": TensorSpec((20, 4), torch.float32)},
        lambda name, given: [key for key in table if key not in {tensor.name for tensor in given}],
        {},
        why_unexpected=lambda key: None,
    )
    (problem,) = result.problems
    assert problem.subject.endswith("e7, and 2 more")
    assert "e10, e11" in problem.detail
    assert problem.detail.endswith("e17, and 2 more not found")


def test_empty_parts_are_not_duplicated() -> None:
    # Shared experts of zero width: gate and up are both complete and empty.
    own = {"gate_up": TensorSpec((0, 4), torch.float32)}
    table = {name: rows(name, "gate_up", 0, 0) for name in ("gate", "up")}
    given = {name: TensorSpec((0, 4), torch.float32) for name in table}
    result = match(given, table.get, own, absent, {}, why_unexpected=str)
    assert not result.problems
    assert set(result.sources) == {"gate_up"}
