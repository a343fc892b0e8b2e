"""A complete release check: bad input, environments that pip cannot build, resuming, and test outcomes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from tests.unit.release_check.wheels import sources
from tools.release_check import run
from tools.release_check.__main__ import app
from tools.release_check.errors import InstallError, NoReleaseError, PhaseError, ReleaseCheckError
from tools.release_check.findings import Cause, Finding, Kind, Phase
from tools.release_check.issues import update_issues
from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.packages import index
from tools.release_check.packages.environments import Environment
from tools.release_check.packages.index import Wheel
from tools.release_check.packages.tested_versions import PACKAGES, requested_versions
from tools.release_check.packages.tested_versions import tested_versions as pinned
from tools.release_check.phases import numbers, suite
from tools.release_check.report import markdown, write_report
from tools.release_check.run import Report, Request, release_check
from tools.release_check.subject import Subject

FINDING = Finding(
    Phase.SWEEP, Kind.EXCEPTION, "transformers.a:A.f", "TypeError", ("transformers.a:A.f",), ("AForText",), "i", "m"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NRL_MODELS_RELEASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # prevents access to an index
    index.wheels.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "nrl_models").mkdir(parents=True)
    (folder / "nrl_models" / "__init__.py").touch()
    (folder / "constraints.txt").write_text("transformers==5.23.0\npeft==0.21.2\n# torch\ntorch==2.13.0\n")
    return folder


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index with two releases of every package."""

    def wheels(package: str) -> dict[Version, Wheel]:
        versions = map(Version, ("5.23.0", "6.0"))
        return {version: Wheel(version, f"https://index/{package}-{version}", 1) for version in versions}

    monkeypatch.setattr(index, "wheels", wheels)


def test_pinned_versions(checkout: Path) -> None:
    versions = {name: str(version) for name, version in pinned(checkout).items()}
    assert versions == {"transformers": "5.23.0", "peft": "0.21.2", "torch": "2.13.0"}


@pytest.mark.parametrize("argument", ["peft", "numpy==1.0", "peft==", "peft==x y"])
def test_invalid_argument_raises(argument: str) -> None:
    with pytest.raises(ReleaseCheckError, match=r"peft|version"):
        requested_versions([argument])


def test_conflicting_arguments_raise() -> None:
    with pytest.raises(ReleaseCheckError, match=r"^newest: expected no other arguments"):
        requested_versions(["newest", "peft==0.22.0"])
    with pytest.raises(ReleaseCheckError, match=r"^peft==0\.22\.0: peft==0\.21\.0 is also there"):
        requested_versions(["peft==0.21.0", "peft==0.22.0"])
    assert len(requested_versions(["peft==0.22.0", "peft==0.22.0", "trl==1.16.0"])) == 2


def test_nonexistent_version_raises(checkout: Path, released: None) -> None:
    with pytest.raises(ReleaseCheckError) as raised:
        run.release_check(Request(("transformers==5.99",), checkout, checkout / "out", 1), print)
    assert str(raised.value).count("\n") == 0
    assert "transformers==5.99" in str(raised.value)


def test_newest_selects_newer_releases(checkout: Path, released: None) -> None:
    messages: list[str] = []
    versions, errors = run.resolve(("newest",), pinned(checkout), messages.append)
    assert {str(version) for version in versions.values()} == {"6.0"}
    assert "transformers: newest 6.0, tested 5.23.0 (newer)" in messages
    assert not errors


def test_newest_without_newer_release(checkout: Path, released: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daily workflow succeeds on a day without releases."""
    monkeypatch.setattr(run, "tested_versions", lambda _: dict.fromkeys(PACKAGES, Version("6.0")))
    result = CliRunner().invoke(app, ["newest", "--checkout", str(checkout), "--out", str(checkout / "out")])
    assert result.exit_code == 0
    assert "no package has a release newer" in result.output
    assert (checkout / "out" / "report.json").is_file()


def test_unreachable_index_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    result = CliRunner().invoke(app, ["newest", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if "nrl_models of" not in line]
    assert "http://127.0.0.1:9/simple/transformers/" in line


@pytest.mark.parametrize("option", ["--checkout", "--out"])
def test_invalid_folder_exits_2(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = ["file", "missing"] if option == "--checkout" else ["file"]
    for name in wrong:
        out = [] if option == "--out" else ["--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, ["newest", option, str(tmp_path / name), *out])
        assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
        assert str(tmp_path / name) in result.output


def test_install_failure_does_not_stop_other_packages(
    checkout: Path, released: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other packages are judged, and recorded outcomes remain."""
    outcome_file = checkout / "out" / "kept.jsonl"
    outcome_file.parent.mkdir()
    outcome_file.touch()

    def make(versions: dict[str, Version], *_: Any, **__: Any) -> Environment:
        if "peft" in versions:
            raise InstallError("peft==6.0: pip cannot install it")
        return Environment(checkout / "environment", checkout)

    monkeypatch.setattr(run, "make_environment", make)
    monkeypatch.setattr(Environment, "versions", {"transformers": Version("6.0")})
    monkeypatch.setattr(run, "PHASES", {Phase.SWEEP: lambda subject: iter([FINDING])})
    request = Request(("transformers==6.0", "peft==6.0"), checkout, checkout / "out", 1, (Phase.SWEEP,))
    report = release_check(request, print)
    assert {cause.kind for cause in report.causes} == {Kind.CONFLICT, Kind.EXCEPTION}
    assert report.status == 1
    assert outcome_file.exists()


def test_install_failure_of_all_packages(checkout: Path, released: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any, **__: Any) -> Environment:
        raise InstallError("transformers==6.0: pip cannot install it")

    monkeypatch.setattr(run, "make_environment", make)
    report = release_check(Request(("transformers==6.0",), checkout, checkout / "out", 1), print)
    assert report.errors == ["transformers==6.0: pip cannot install it"]
    assert report.status == 2


def test_failing_phase_does_not_stop_other_phases(
    checkout: Path, released: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Subject) -> Iterator[Finding]:
        raise ReleaseCheckError("sweep: took too long")

    monkeypatch.setattr(run, "make_environment", lambda *_, **__: Environment(checkout / "environment", checkout))
    monkeypatch.setattr(Environment, "versions", {})
    monkeypatch.setattr(run, "PHASES", {Phase.SWEEP: fails, Phase.NEW: lambda subject: iter([FINDING])})
    request = Request(("transformers==6.0",), checkout, checkout / "out", 1, (Phase.SWEEP, Phase.NEW))
    report = release_check(request, print)
    assert report.errors[0] == "sweep: took too long"
    assert len(report.causes) == 1


def test_report_lists_counts_and_phases_with_nothing_to_check(
    checkout: Path, released: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(subject: Subject) -> Iterator[Finding]:
        outcomes = OutcomeFile(subject.file(Phase.SWEEP), ("architecture", "check"))
        for check, outcome in (("load", "equal"), ("logits", "equal"), ("media_greedy", "not_applicable")):
            outcomes.add({"architecture": "LlamaForCausalLM", "check": check, "outcome": outcome})
        yield from ()

    monkeypatch.setattr(run, "make_environment", lambda *_, **__: Environment(checkout / "environment", checkout))
    monkeypatch.setattr(Environment, "versions", {})
    monkeypatch.setattr(run, "PHASES", {Phase.SWEEP: sweep, Phase.NUMBERS: numbers})
    monkeypatch.setattr(run, "tested_versions", lambda _: {"transformers": Version("6.0")})
    request = Request(("transformers==6.0",), checkout, checkout / "out", 1, (Phase.SWEEP, Phase.NUMBERS))
    report = release_check(request, print)
    assert report.phases == ["training: sweep (2 equal, 1 not applicable)"]
    assert report.skipped == ["training: numbers: transformers and torch have the versions of the recorded results"]
    assert report.status == 0
    text = markdown(report)
    assert all(f"- {line}" in text for line in (*report.phases, *report.skipped))
    assert "0 causes." in text


def test_unknown_architecture_is_not_judged(checkout: Path, released: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "make_environment", lambda *_, **__: Environment(checkout / "environment", checkout))
    monkeypatch.setattr(Environment, "versions", {})
    monkeypatch.setattr(Subject, "_subjects", {"families": {"LlamaForCausalLM": "llama"}})
    names = ("LlamaForCausalM", "Other")
    request = Request(("transformers==6.0",), checkout, checkout / "out", 1, names=names)
    report = release_check(request, print)
    (error,) = report.errors
    assert "--name LlamaForCausalM: not registered (did you mean LlamaForCausalLM?)" in error
    assert "--name Other: not registered" in error
    assert report.status == 2
    assert "Nothing was checked." in markdown(report)


def test_report_contains_function_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"5.0": "class A:\n    def f(self, old): ...\n", "6.0": "class A:\n    def f(self, new): ...\n"}

    def sources_of(_: str, version: Version, __: Path) -> Any:
        return sources(tmp_path, str(version), {"transformers/a.py": texts[str(version)]})

    monkeypatch.setattr(run, "sources_of", sources_of)
    cause = Cause(FINDING.kind, FINDING.subject, FINDING.detail, [FINDING])
    versions = {"transformers": Version("6.0")}, {"transformers": Version("5.0")}
    diffs = run.diffs_of([cause], *versions)
    report = Report(*versions, causes=[cause], diffs=diffs)
    assert "-    def f(self, old): ..." in diffs["transformers.a:A.f"]
    assert "+    def f(self, new): ..." in markdown(report)
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["causes"][0]["id"] == cause.id


TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_number(number):
    with open("ran", "a") as file:
        file.write(str(number))
    if number == 1:
        raise TypeError("planted")
"""


def test_suite_resumes(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with a recorded outcome does not run again. Its failure is still reported."""
    (checkout / "test_planted.py").write_text(TESTS)
    environment = Environment(checkout, checkout)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the checkout lacks the plugin of nrl_models
    versions = {"accelerate": Version("1.0")}
    monkeypatch.setitem(PACKAGES, "accelerate", replace(PACKAGES["accelerate"], tests=("test_planted.py",)))
    subject = Subject(environment, versions, {}, frozenset(), tmp_path, 1)
    monkeypatch.setattr(Subject, "_subjects", {"families": {}, "quick": []})
    (first,) = suite(subject)
    assert first.detail == "TypeError"
    lines = (tmp_path / "suite.jsonl").read_text().splitlines()
    (tmp_path / "suite.jsonl").write_text("\n".join(line for line in lines if "[2]" not in line) + '\n{"test": "cut')
    (again,) = suite(subject)
    assert again == first
    assert (checkout / "ran").read_text() == "0122"


def test_pytest_start_failure_raises(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest exits with 1, as it does with failed tests."""
    (checkout / "test_planted.py").write_text(TESTS)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    monkeypatch.setitem(PACKAGES, "accelerate", replace(PACKAGES["accelerate"], tests=("test_planted.py",)))
    versions = {"accelerate": Version("1.0")}
    subject = Subject(Environment(checkout, checkout), versions, {}, frozenset(), tmp_path, 1)
    monkeypatch.setattr(Subject, "_subjects", {"families": {}, "quick": []})
    with pytest.raises(PhaseError, match=r"nrl_models\.testing"):
        list(suite(subject))


def test_issues_are_updated_instead_of_reopened() -> None:
    cause = Cause(FINDING.kind, FINDING.subject, FINDING.detail, [FINDING])
    report = {"versions": {"transformers": "6.0"}, "causes": [cause.to_json()], "diffs": {}}
    report = json.loads(json.dumps(report))
    open_issues: list[dict[str, Any]] = []
    calls: list[tuple[str, ...]] = []

    def gh(arguments: Any) -> str:
        calls.append(tuple(arguments[:2]))
        if arguments[1] == "create" and arguments[0] == "issue":
            open_issues.append({"number": 7, "title": arguments[arguments.index("--title") + 1]})
        return json.dumps(open_issues) if arguments[1] == "list" else ""

    update_issues(report, gh)
    update_issues(report, gh)
    assert [call for call in calls if call[0] == "issue" and call[1] != "list"] == [
        ("issue", "create"),
        ("issue", "edit"),
    ]


def test_unknown_release_error_names_newest(released: None) -> None:
    with pytest.raises(NoReleaseError, match=r"newest: 5\.23\.0, 6\.0"):
        index.wheel("peft", Version("7.0"))
