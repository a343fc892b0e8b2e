"""Changes are grouped by the function that causes them, judged, and compared with reported regressions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from tests.unit.release_check.wheels import sources
from tools.commands import command_line
from tools.release_check import replay as replays
from tools.release_check.changes_page import page
from tools.release_check.judgments import Cause, Judgment, read_causes, rows_of, unused_causes
from tools.release_check.numbers import changes
from tools.release_check.numbers.changes import ChangeGroup, UpstreamDifference, groups_of
from tools.release_check.numbers.facts import Change, Kind, Section, SectionRecord
from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.replay import recorded_releases, replay
from tools.release_check.reported import Reported, score

MODULE = "transformers.models.one.modeling_one"
RELEASES = [Version("5.0"), Version("5.1"), Version("5.2")]


class Case:
    """A placeholder for a fixture."""

    def __init__(self, module: str) -> None:
        self.module = module

    @classmethod
    def from_file(cls, architecture: str) -> Case:
        name = architecture.lower()
        return cls(f"transformers.models.{name}.modeling_{name}")


@pytest.fixture
def difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UpstreamDifference:
    monkeypatch.setattr(changes, "NumberCase", Case)
    use = "from ...shared import used\n"

    def files(body: str, shared: str) -> dict[str, str]:
        contents = {f"transformers/models/{name}/modeling_{name}.py": use for name in ("one", "two")}
        contents["transformers/models/one/modeling_one.py"] += f"def own(): return {body}\n"
        contents["transformers/shared.py"] = f"def used(): return {shared}\ndef unused(): return {shared}\n"
        return contents

    return UpstreamDifference(sources(tmp_path, "5.0", files("1", "1")), sources(tmp_path, "5.1", files("2", "2")))


def change(architecture: str, kind: Kind = Kind.NUMBERS, max_diff: float | None = 0.1, **values: Any) -> Change:
    options: dict[str, Any] = {"before": [1.0], "after": [2.0]} | values
    return Change(architecture, Section.EAGER, kind, "logits", **options, max_diff=max_diff)


def test_functions_that_cause_change(difference: UpstreamDifference) -> None:
    """Functions of the model come first; functions that it does not import are left out."""
    assert difference.functions("One", Kind.NUMBERS) == (f"{MODULE}:own", "transformers.shared:used")
    assert difference.functions("Two", Kind.NUMBERS) == ("transformers.shared:used",)


def test_numbers_are_grouped_by_function(difference: UpstreamDifference) -> None:
    groups = groups_of([change("One"), change("Two"), change("One", Kind.GRADIENTS)], difference, "5.1")
    assert {(group.fact, group.architectures) for group in groups} == {
        (Kind.NUMBERS, ("One",)),
        (Kind.NUMBERS, ("Two",)),
        (Kind.GRADIENTS, ("One",)),
    }


def test_equal_changes_of_models_form_one_group(difference: UpstreamDifference) -> None:
    both = [change(name, Kind.FIELDS, None, before="past_key_values", after="cache") for name in ("One", "Two")]
    (group,) = groups_of(both, difference, "5.1")
    assert group.architectures == ("One", "Two")
    assert group.functions == ("transformers.shared:used",)
    assert group.key == "5.1 fields eager: logits"


def reported(**values: Any) -> Reported:
    entry = {
        "thread": "thread",
        "introduced": "5.1",
        "fixed": None,
        "architectures": ["One"],
        "function": "models/one/modeling_one.py::own",
        "observation": "logits",
        "visible_on_cpu": True,
    }
    return Reported.from_json(entry | values)


def test_score(difference: UpstreamDifference) -> None:
    groups = groups_of([change("One")], difference, "5.1")
    noise = ChangeGroup("5.2", Kind.NUMBERS, (), (change("Two"),))
    regressions = [
        reported(thread="found"),
        reported(thread="fix found", introduced="4.0", fixed="5.1"),
        reported(thread="other file", function="models/two/modeling_two.py::f"),
        reported(thread="other results", observation="saved_file"),
        reported(thread="other class", architectures=["Two"]),
        reported(thread="other release", introduced="5.2"),
        reported(thread="before the first release", introduced="5.0"),
        reported(thread="on GPUs", visible_on_cpu=False),
    ]
    result = score(rows_of([*groups, noise], []), regressions, RELEASES)
    assert result.found == ("found", "fix found")
    assert result.missed == ("other file", "other results", "other class", "other release")
    assert result.unseen == ("before the first release", "on GPUs")
    assert result.recall == pytest.approx(1 / 3)
    assert result.false_alarm_rate == 0.5
    judged = rows_of([*groups, noise], [Cause(frozenset({"5.2"}), Judgment.INTENDED, "rounding")])
    assert score(judged, regressions, RELEASES).false_alarms == 0


def test_page_has_judgments_reports_and_releases(difference: UpstreamDifference) -> None:
    groups = groups_of([change("One"), change("Two")], difference, "5.1", "5.0")
    rows = rows_of(groups, [Cause(frozenset({"5.1"}), Judgment.REGRESSION, "see #1", classes=frozenset({"One"}))])
    reports = [reported(thread="one https://one"), reported(thread="two https://two", introduced="5.2")]
    result = score(rows, reports, RELEASES)
    text = page(rows, result, RELEASES, {"One": RELEASES, "Two": RELEASES[:2]}, reports)
    assert "regression: see #1" in text
    assert "| unjudged |" in text
    assert "| 5.1 | 5.0 | One |" in text
    assert "modeling_one:own" in text
    assert "| [one](https://one) | 5.1 | - | found |" in text
    assert "| [two](https://two) | 5.2 | - | missed |" in text
    assert "| One | all 3 |" in text
    assert "| Two | 5.0, 5.1 |" in text
    assert [row.judgment for row in rows] == [Judgment.REGRESSION, Judgment.UNJUDGED]


def test_cause_is_one_row(difference: UpstreamDifference) -> None:
    """A cause that changes an error, numbers and two releases is one row; other changes of the class stay apart."""
    error = change("One", Kind.ERROR, None, before="KeyError", after=None)
    first = groups_of([error, change("One"), change("One", Kind.TIES, None)], difference, "5.1", "5.0")
    second = groups_of([change("Two")], difference, "5.2", "5.0")
    releases, kinds = frozenset({"5.1", "5.2"}), frozenset({Kind.ERROR, Kind.NUMBERS})
    cause = Cause(releases, Judgment.FIX, "works", ("shared:used",), kinds=kinds)
    judged, unjudged = rows_of([*first, *second], [cause])
    assert judged.architectures == ("One", "Two")
    assert {one.kind for one in judged.changes} == kinds
    assert (judged.versions, judged.since, judged.functions) == (("5.1", "5.2"), ("5.0",), ("shared:used",))
    assert [one.kind for one in unjudged.changes] == [Kind.TIES]
    text = page([judged, unjudged], score([judged, unjudged], [], RELEASES), RELEASES, {}, [])
    assert (
        "| 5.1, 5.2 | 5.0 | One, Two | error (eager), numbers (eager), up to 0.1 | `shared:used` | fix: works |" in text
    )


def test_backticks_of_messages_do_not_end_code(difference: UpstreamDifference) -> None:
    error = change("One", Kind.ERROR, None, before="Cannot `crop`", after=None)
    rows = rows_of(groups_of([error], difference, "5.1"), [])
    assert "`Cannot 'crop'` to `None`" in page(rows, score(rows, [], RELEASES), RELEASES, {}, [])


def test_cause_without_change_is_reported(difference: UpstreamDifference) -> None:
    cause = Cause(frozenset({"5.1"}), Judgment.FIX, "works", sections=frozenset({Section.SDPA}))
    causes = [Cause(frozenset({"5.1"}), Judgment.FIX, "used"), cause]
    rows = rows_of(groups_of([change("One")], difference, "5.1"), causes)
    assert unused_causes(rows, causes, RELEASES) == [cause]
    assert unused_causes(rows, [cause], RELEASES[:1]) == []  # a replay of other releases


def test_judgments_have_reasons() -> None:
    for cause in read_causes():
        assert cause.reason
        assert cause.functions
        assert cause.judgment is not Judgment.UNJUDGED


def test_interrupted_class_is_not_recorded(
    tmp_path: Path, difference: UpstreamDifference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is compared with the release before, although some of its sections were recorded."""
    files = {version: OutcomeFile(tmp_path / f"{version}.jsonl", ("architecture", "section")) for version in RELEASES}
    for file, logits in zip(files.values(), ([1.0], [5.0], [2.0]), strict=True):
        file.add(SectionRecord("One", Section.EAGER, {Kind.NUMBERS: {"logits": logits}}).to_json())
    files[RELEASES[1]].add(
        SectionRecord("One", Section.SDPA, error_type="timed_out", message="more than 300 s").to_json()
    )
    monkeypatch.setattr(replays, "sources_of", lambda package, version, folder: difference.after)
    first, second, third = replay(RELEASES, tmp_path, ["One"], 1, recorded=True)
    assert (first, second) == ([], [])
    assert [(group.version, group.since) for group in third] == [("5.2", "5.0")]
    assert recorded_releases(RELEASES, tmp_path) == {"One": [RELEASES[0], RELEASES[2]]}


def test_modules_of_a_section_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's module does not import the quantizer that loads its checkpoint."""
    monkeypatch.setattr(changes, "NumberCase", Case)
    quantizer = "transformers/integrations/compressed_tensors.py"

    def files(body: str) -> dict[str, str]:
        return {"transformers/models/one/modeling_one.py": "", quantizer: f"def convert(): return {body}\n"}

    difference = UpstreamDifference(sources(tmp_path, "5.0", files("1")), sources(tmp_path, "5.1", files("2")))
    (quantized,) = groups_of([replace(change("One"), section=Section.FP4_EXPERTS)], difference, "5.1")
    assert quantized.functions == ("transformers.integrations.compressed_tensors:convert",)
    (other,) = groups_of([change("One")], difference, "5.1")
    assert other.functions == ()


def test_errors_list_functions_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's module imports no cache layer. Errors in assisted generation come from them."""
    monkeypatch.setattr(changes, "NumberCase", Case)

    def files(body: str) -> dict[str, str]:
        cache = f"class Layer:\n    def crop(self): return {body}\n"
        return {"transformers/models/one/modeling_one.py": "", "transformers/cache_utils.py": cache}

    difference = UpstreamDifference(sources(tmp_path, "5.0", files("1")), sources(tmp_path, "5.1", files("2")))
    (group,) = groups_of([change("One", Kind.ERROR, None, before=None, after="ValueError")], difference, "5.1")
    assert group.functions == ("transformers.cache_utils:Layer.crop",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "abc", "--to", "5.24"], "--from abc: expected a version"),
        (["--from", "5.5", "--to", "x"], "--to x: expected a version"),
        (["--from", "5.5", "--to", "5.24", "--only", "9.9"], "--only 9.9: not from 5.5 to 5.24"),
    ],
)
def test_invalid_release_exits_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "releases", lambda first, last: [Version("5.5.0"), Version("5.24.0")])
    result = CliRunner().invoke(command_line(replays.main), [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output


def test_recorded_releases_exclude_absent_classes(tmp_path: Path) -> None:
    for version, present in (("5.0", False), ("5.1", True)):
        record = SectionRecord("One", Section.EAGER, {} if present else {Kind.CLASS: {"present": False}})
        OutcomeFile(tmp_path / f"{version}.jsonl", ("architecture", "section")).add(record.to_json())
    assert recorded_releases(RELEASES, tmp_path) == {"One": [Version("5.1")]}
