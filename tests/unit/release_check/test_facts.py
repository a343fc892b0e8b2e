"""`compare` classifies planted changes, and ignores rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.release_check.numbers.facts import (
    Change,
    Facts,
    Kind,
    Section,
    SectionRecord,
    compare,
    fingerprint,
    uncompared,
)

LOGITS = fingerprint(torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)))


def record(facts: Facts, **values: Any) -> SectionRecord:
    return SectionRecord("LlamaForCausalLM", Section.EAGER, facts, **values)


def changes(before: Facts, after: Facts) -> list[Change]:
    return compare([record(before)], [record(after)])


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (Kind.NAMES, {"a": "2x3"}, {"a": "3x2"}),
        (Kind.NAMES, {"a": "2x3"}, {}),
        (Kind.DTYPES, {"auto": "bfloat16"}, {"auto": "bfloat16", "auto: gate.weight": "float32"}),
        (Kind.TIES, {"embed": ["head"]}, {}),
        (Kind.FILES, {"a": "2 float32 0123"}, {"a": "2 float32 4567"}),
        (Kind.LOADING, {}, {"missing_keys": ["a"]}),
        (Kind.TOKENS, {"tokens": [[1, 2]]}, {"tokens": [[1, 3]]}),
        (Kind.FIELDS, {"output": ["logits", "past_key_values"]}, {"output": ["cache", "logits"]}),
        (Kind.CONFIG_KEYS, {"rope_theta": True}, {}),
        (Kind.CONFIG_DEFAULTS, {"rope_theta": "10000.0"}, {"rope_theta": "1000000.0"}),
        (Kind.INITIALIZATION, {"a": "0123"}, {"a": "4567"}),
        (Kind.INITIALIZATION_SCALE, {"a": [0.0, 0.02]}, {"a": [0.0, 0.04]}),
        (Kind.NUMBERS, {"logits": LOGITS}, {"logits": [*LOGITS[:-1], 0.0]}),
        (Kind.NUMBERS, {"logits": LOGITS}, {"logits": LOGITS[:-1]}),
        (Kind.NUMBERS, {"logits": LOGITS}, {"logits": [None, *LOGITS[1:]]}),
        (Kind.GRADIENTS, {"a": [1.0, 0.5]}, {"a": [1.001, 0.5]}),
    ],
)
def test_planted_change_is_classified(kind: Kind, before: dict[str, Any], after: dict[str, Any]) -> None:
    (change,) = changes({kind: before}, {kind: after})
    assert change.kind is kind
    assert (change.before, change.after) == (before.get(change.key), after.get(change.key))
    assert changes({kind: before}, {kind: before}) == []


def test_rounding_is_ignored() -> None:
    rounded = [value * (1 + 1e-6) for value in LOGITS if value is not None]
    assert changes({Kind.NUMBERS: {"logits": LOGITS}}, {Kind.NUMBERS: {"logits": rounded}}) == []
    low = {Kind.LOW_PRECISION: {"logits": LOGITS}}
    assert (
        changes(low, {Kind.LOW_PRECISION: {"logits": [value * 1.005 for value in LOGITS if value is not None]}}) == []
    )
    assert changes(low, {Kind.LOW_PRECISION: {"logits": [value * 1.05 for value in LOGITS if value is not None]}})


def test_error_and_absence_records() -> None:
    works, fails = record({Kind.NUMBERS: {"logits": LOGITS}}), record({}, error_type="TypeError", message="cache")
    (change,) = compare([works], [fails])
    assert (change.kind, change.before, change.after) == (Kind.ERROR, None, "TypeError cache")
    (change,) = compare([fails], [works])
    assert (change.kind, change.before, change.after) == (Kind.ERROR, "TypeError cache", None)
    assert compare([fails], [fails]) == []
    absent = record({Kind.CLASS: {"present": False}})
    (change,) = compare([works], [absent])
    assert (change.kind, change.before, change.after) == (Kind.CLASS, True, False)
    assert compare([absent], [absent]) == []
    assert compare([], [works]) == []


def test_absent_class_is_one_change() -> None:
    absent = [SectionRecord("A", section, {Kind.CLASS: {"present": False}}) for section in Section]
    works = [SectionRecord("A", section) for section in Section]
    assert [change.after for change in compare(absent, works)] == [True]
    assert [change.after for change in compare(works, absent)] == [False]


def test_sections_of_one_side_are_listed() -> None:
    one, other = SectionRecord("A", Section.EAGER), SectionRecord("A", Section.VIDEO)
    third = SectionRecord("B", Section.VIDEO)
    assert uncompared([one], [one, other, third]) == {Section.VIDEO: ["A", "B"]}
    assert uncompared([one, other], [one]) == {Section.VIDEO: ["A"]}
    assert uncompared([one], [one]) == {}


@pytest.mark.parametrize("shape", [(2, 7, 64), (3, 100, 8), (5,), ()])
def test_fingerprint_depends_on_every_element(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = fingerprint(values)
    assert len(before) <= 64
    for index in range(0, values.numel(), max(1, values.numel() // 50)):
        moved = values.clone()
        moved.view(-1)[index] += 0.5
        (change,) = changes({Kind.NUMBERS: {"x": before}}, {Kind.NUMBERS: {"x": fingerprint(moved)}})
        assert change.max_diff is not None


def test_masked_logits_do_not_hide_changes() -> None:
    values = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    values[:, 3] = torch.finfo(torch.float32).min
    moved, unmasked = values.clone(), values.clone()
    moved[0, 0] += 0.01
    unmasked[0, 3] = 0.5
    before = {Kind.NUMBERS: {"x": fingerprint(values)}}
    for after in (moved, unmasked):
        assert changes(before, {Kind.NUMBERS: {"x": fingerprint(after)}})


def test_record_json_round_trip() -> None:
    original = record({Kind.NUMBERS: {"logits": LOGITS}, Kind.TIES: {"a": ["b"]}}, seconds=0.5)
    assert SectionRecord.from_json(original.to_json()) == original
