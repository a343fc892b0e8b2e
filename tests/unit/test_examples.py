"""The parts of the examples that need no engine: the task, its reward and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))

import arithmetic  # noqa: E402
import runs  # noqa: E402


def test_held_out_sums_are_disjoint_from_training_sums() -> None:
    training, held_out = arithmetic.questions()
    assert (training, held_out) == arithmetic.questions()
    seen = {frozenset((question.first, question.second)) for question in training}
    assert seen.isdisjoint(frozenset((question.first, question.second)) for question in held_out)
    assert len(held_out) >= 100
    assert len(training) + len(held_out) == arithmetic.LARGEST**2


@pytest.mark.parametrize(
    ("completion", "ended", "worth"),
    [
        ("17 + 25 = 42", True, 1.0),
        ("17 + 25 = 42", False, 0.0),  # truncated: the next token may be a digit
        ("17 + 25 = 43", True, 0.2),
        ("The sum is 42", True, 0.8),
        ("17 + 25 = 42, or 43", True, 0.0),
        ("42 = 17 + 25", True, 0.0),
        ("I cannot", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_reward(completion: str, ended: bool, worth: float) -> None:
    assert arithmetic.reward(arithmetic.Question(17, 25), completion, ended) == pytest.approx(worth)


def test_gain_is_paired_and_resampled_by_question() -> None:
    before = [0.0, 0.2, 1.0, 0.2] * 30
    questions = range(len(before))
    # All questions rose by the same amount, so there is no spread.
    assert runs.gain(before, [score + 0.1 for score in before], questions) == pytest.approx((0.1, 0.1, 0.1))
    after = before[1:] + before[:1]
    mean, low, high = runs.gain(before, after, questions)
    assert mean == pytest.approx(0.0)
    assert low < 0 < high
    assert runs.gain(before, after, [question // 4 for question in questions]) == pytest.approx((0.0, 0.0, 0.0))


def test_page_contains_recorded_runs() -> None:
    recorded = [json.loads(file.read_text()) for file in sorted((ROOT / "docs" / "rl-run").glob("*.json"))]
    assert runs.table(recorded) in (ROOT / "docs" / "rl-run.md").read_text()
