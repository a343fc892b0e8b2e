"""The pages of engine coverage: failures first, with the facts of their verdicts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nrl_models import registry
from nrl_models.certify import Answer, Certificate, Status, Validity, verify
from nrl_models.certify.with_engine import REFITS
from nrl_models.consistency.cells import THRESHOLD
from nrl_models.consistency.verdict import CauseKind, VerdictCause
from nrl_models.quirks import Pattern
from tests.engine import coverage_page
from tests.engine.certificates import SweepOutcome, write_certificate
from tests.engine.facts import Facts, FirstDifference
from tests.engine.families import AGREES, AS_LOADED, DISAGREES, NOT_DECIDED, NOT_RUN, Outcome, decided
from tests.engine.image_families import ImageOutcome
from tests.engine.limits import LIMITS
from tests.engine.obstacles import IMAGES, MLX, VLLM, Stage
from tools.checkout import PAGES
from tools.coverage_pages import engine_outcomes
from tools.coverage_pages.results import Kind, Record, read_records

FACTS = Facts(
    unwritten=("model.a", "model.b", "model.c"),
    nan=3,
    cause=VerdictCause(CauseKind.CONFIG, "`sliding_window` were 9 and not 8", "sliding_window"),
    difference=FirstDifference("model.layers.0.o", "Linear", after="model.layers.0.q", pattern=Pattern.SCALED),
)
UNRECORDED = Facts(note="Its modules cannot be compared, because there are none")


def outcome(status: str, reason: str = "", refitted: float | None = None, **more: object) -> Record:
    return Record({"engine": "1"}, {"status": status, "reason": reason, "refitted": refitted, "stepped": None, **more})


RECORDS = {
    "AForCausalLM": outcome("agrees", refitted=1.000002),
    "BForCausalLM": outcome("not run", "no tiny model: ValueError: 7 is not a size", stage="tiny model"),
    "CForCausalLM": outcome(
        "disagrees", "both", 2.02, facts=asdict(FACTS), transformers={"status": "agrees", "loaded": 1.0}
    ),
    "DForCausalLM": outcome("not run", "EngineError: vLLM failed: a | b; from files: vLLM failed", stage="run"),
    "GForCausalLM": outcome("disagrees", "Wrong: engine.", 2.02, facts=asdict(UNRECORDED)),
    "HForCausalLM": outcome("disagrees", "a | b", 2.02),
    "IForCausalLM": outcome("disagrees", "images", 2.02, faults=["tower", "attention", "tower"]),
    "JForCausalLM": outcome("not decided", refitted=1.07, bounds=[1.27]),
    "FForCausalLM": outcome("not run", "no tiny model: UnmetRequirementError: ...", stage="requirement"),
}


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    page = tmp_path / "engine-coverage.md"
    page.write_text("# x\n\n## MLX\n\nkept\n")
    monkeypatch.setattr(coverage_page, "PAGE", page)
    monkeypatch.setattr(engine_outcomes, "CERTIFICATES", page.with_suffix("") / "certificates")
    monkeypatch.setitem(registry._REQUIREMENTS, "FForCausalLM", ("transformers>=9",))
    certificate = tmp_path / "engine-coverage" / "certificates" / "vllm" / "CForCausalLM.json"
    certificate.parent.mkdir(parents=True)
    certificate.write_text("{}")
    contents = coverage_page.pages_with(
        "vLLM",
        ["How."],
        RECORDS,
        [*RECORDS, "EForCausalLM"],
        causes={"CForCausalLM": "known."},
        obstacles={"BForCausalLM": "its size is 7"},
    )
    coverage_page.write_pages(contents)
    return {path.name: path.read_text() for path in contents}


def test_summary_lists_counts_and_failures_only(pages: dict[str, str]) -> None:
    summary = pages["engine-coverage.md"]
    assert "- 1 agree, after both refits\n- 1 not decided" in summary
    assert "\n- 4 disagree" in summary
    assert (
        "- 3 cannot be run here: the engine fails for 1, 1 needs package versions that its environment does not "
        "have, 1 has no usable tiny model"
    ) in summary
    assert "- not tested yet: EForCausalLM" in summary
    assert "AForCausalLM" not in summary
    assert summary.index("## vLLM") < summary.index("CForCausalLM") < summary.index("BForCausalLM")
    assert summary.endswith("## MLX\n\nkept\n")


def test_summary_contains_verdict_facts(pages: dict[str, str]) -> None:
    rows = pages["engine-coverage.md"].splitlines()
    assert (
        "| CForCausalLM | 2.0200 | The refit does not write `model.a`, `model.b`, and 1 more. The engine computes as "
        "if `sliding_window` were 9 and not 8. The output of `model.layers.0.q` agrees, and the input of "
        "`model.layers.0.o` differs. 3 of the engine's decode log-probabilities are NaN; the error is computed "
        "without them. Known. **Agrees with `model_impl=transformers`.** |"
    ) in rows
    assert "| GForCausalLM | 2.0200 | Cause unknown: its modules cannot be compared, because there are none |" in rows
    assert r"| HForCausalLM | 2.0200 | A \| b |" in rows
    assert "| IForCausalLM | 2.0200 | First difference, depending on the prompt: attention, tower |" in rows
    assert "| BForCausalLM | No usable tiny model: its size is 7 |" in pages["engine-coverage.md"]
    assert "| DForCausalLM | The engine fails |" in pages["engine-coverage.md"]
    assert "| FForCausalLM | Needs transformers>=9 |" in pages["engine-coverage.md"]


def test_engine_page_lists_every_result(pages: dict[str, str]) -> None:
    page = pages["vllm.md"]
    assert "| AForCausalLM | 1.0000020 |  |  |  |" in page  # without a certificate
    settings = "vLLM with `model_impl=transformers`: agrees, 1.0000000."
    link = "[JSON](certificates/vllm/CForCausalLM.json)"
    assert f"| CForCausalLM | disagrees | 2.0200 |  |  | {settings} | {link} | The refit does not write" in page
    assert (
        "| BForCausalLM | No usable tiny model: its size is 7 | `no tiny model: ValueError: 7 is not a size` |" in page
    )
    assert r"| `EngineError: vLLM failed: a \| b; from files: vLLM failed` |" in page
    assert "| FForCausalLM | Needs transformers>=9 |  |" in page
    assert page.index("CForCausalLM") < page.index("BForCausalLM") < page.index("AForCausalLM")


@pytest.mark.parametrize(
    ("kind", "causes"), [(Kind.ENGINE, VLLM), (Kind.IMAGES, IMAGES), (Kind.MLX, MLX)], ids=lambda value: str(value)[:20]
)
def test_skipped_architectures_have_known_cause(kind: Kind, causes: dict[str, str]) -> None:
    outcomes = {name: record.outcome for name, record in read_records(PAGES)[kind].items()}
    not_run = {name: Stage(each["stage"]) for name, each in outcomes.items() if each["status"] == "not run"}
    assert causes.keys() == {name for name, stage in not_run.items() if stage is not Stage.REQUIREMENT}


def test_recorded_facts_round_trip() -> None:
    for facts in (FACTS, UNRECORDED):
        assert Facts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


def test_known_limits_explain_recorded_disagreements() -> None:
    records = read_records(PAGES)
    failing = {
        (kind, name): Facts.from_json(record.outcome["facts"])
        for kind in (Kind.ENGINE, Kind.MLX)
        for name, record in records[kind].items()
        if record.outcome["status"] in (AS_LOADED, DISAGREES)
    }
    assert all(facts != Facts() for facts in failing.values())
    for name, limit in LIMITS.items():
        assert records[Kind.ENGINE][name].outcome["status"] == limit.status
        assert limit.explains(failing[Kind.ENGINE, name])
        assert not limit.explains(Facts())


@pytest.mark.parametrize("kind", [Kind.ENGINE, Kind.IMAGES, Kind.MLX])
def test_recorded_agreements_are_conclusive(kind: Kind) -> None:
    for name, record in read_records(PAGES)[kind].items():
        status = record.outcome["status"]
        errors = [record.outcome.get(key) for key in coverage_page.MEASURED]
        assert status not in (AGREES, NOT_DECIDED) or decided(AGREES, *errors) == status, name


def test_a_wide_bound_is_not_decided(pages: dict[str, str]) -> None:
    assert decided(AGREES, 1.3994) == decided(AS_LOADED, 1.3994) == NOT_DECIDED
    assert decided(AGREES, 1.0443, None) == AGREES
    assert "- 1 not decided: their errors exceed 1.05" in pages["engine-coverage.md"]
    assert "| JForCausalLM | refitted: 1.0700 (1.2700) |" in pages["engine-coverage.md"]
    agreeing = pages["vllm.md"].partition("## Architectures that agree")[2]
    assert "JForCausalLM" in pages["vllm.md"]
    assert "JForCausalLM" not in agreeing


TEXT = Outcome("AForCausalLM", AGREES, refitted=1.000002, stepped=1.000003, bounds=(1.0001, 1.0001))
IMAGE = ImageOutcome("AForCausalLM", AGREES, refitted=1.000002, bounds=(1.0001,))


@pytest.mark.parametrize(
    ("outcome", "answer", "expected"),
    [
        (TEXT, Answer.NOT_DECIDED, {REFITS[0]: Status.PASSED, REFITS[1]: Status.PASSED}),
        (
            replace(TEXT, status=DISAGREES, stepped=2.0, reason="stale", loaded=2.0),
            Answer.NOT_READY,
            {REFITS[0]: Status.PASSED, REFITS[1]: Status.FAILED, "log-probabilities": Status.FAILED},
        ),
        (
            replace(TEXT, status=AS_LOADED, refitted=None, stepped=None, bounds=(1.0001,), reason="NaN", loaded=1.0),
            Answer.NOT_READY,
            {REFITS[0]: Status.FAILED, REFITS[1]: Status.NOT_DECIDED, "log-probabilities": Status.PASSED},
        ),
        (IMAGE, Answer.NOT_DECIDED, {"images": Status.PASSED}),
        (
            replace(IMAGE, status=NOT_DECIDED, refitted=1.4, bounds=(1.5,)),
            Answer.NOT_DECIDED,
            {"images": Status.NOT_DECIDED},
        ),
        (replace(IMAGE, status=DISAGREES, refitted=2.0), Answer.NOT_READY, {"images": Status.FAILED}),
    ],
)
def test_sweep_writes_certificates(
    outcome: SweepOutcome,
    answer: Answer,
    expected: dict[str, Status],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_outcomes, "CERTIFICATES", tmp_path / "engine-coverage" / "certificates")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    write_certificate("vLLM", "vllm", outcome, checkpoint)
    file = tmp_path / "engine-coverage" / "certificates" / "vllm" / "AForCausalLM.json"
    certificate = Certificate.load(file)
    assert verify(file, checkpoint).validity is Validity.VALID
    assert certificate.answer is answer
    results = {result.name: result for result in certificate.results}
    assert {name: result.status for name, result in results.items()} == {
        **expected, "other checks": Status.LEFT_OUT
    }  # fmt: skip
    first = next(iter(expected))
    assert results[first].value == outcome.refitted
    assert results[first].bound == (min(outcome.bounds[0], THRESHOLD) if outcome.bounds else None)
    assert certificate.options["dtype"] == "float32"
    write_certificate("vLLM", "vllm", Outcome("AForCausalLM", NOT_RUN, reason="vLLM does not start"), checkpoint)
    assert not file.exists()


def test_published_certificates_are_intact_and_small() -> None:
    folder = Path(__file__).parents[3] / "docs" / "engine-coverage" / "certificates"
    files = sorted(folder.glob("*/*.json"))
    assert files
    for file in files:
        assert Certificate.load(file).name.replace("#", "-") == f"tiny {file.stem}"  # the name of a variant has a "#"
        assert file.stat().st_size < 8_000
        page = folder.parent / f"{file.parent.name}.md"
        assert f"(certificates/{file.parent.name}/{file.name})" in page.read_text()


def test_published_pages_are_short() -> None:
    folder = Path(__file__).parents[3] / "docs"
    for path in [folder / "engine-coverage.md", *(folder / "engine-coverage").glob("*.md")]:
        assert len(path.read_text().splitlines()) <= 200
