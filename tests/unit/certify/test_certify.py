"""`nrl_models.certify`: results, budgets, resuming, and faults that must fail."""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import new_model
from completions_server import serving
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig
from typer.testing import CliRunner

from nrl_models.certify import Answer, Certificate, CheckResult, Side, Status, all_checks, certify, with_engine
from nrl_models.certify.certified import CheckpointUnderTest, Options, plotted_file
from nrl_models.certify.check_result import answer_of
from nrl_models.certify.report import write_html
from nrl_models.cli import app
from nrl_models.consistency.measure import Measurement, Meter
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ConsistencyError, EngineError, EngineOptionError, UnknownArgumentError
from nrl_models.testing.tiny import tiny_config
from tests.unit.printed import unframed

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("certify")]  # the tests share the reports below

OFFLINE = (
    "files", "tokenizer", "values", "embeddings", "padding", "packing", "saved files", "sharding", "weights", "layers",
    "logits", "gradients",
)  # fmt: skip
ENGINE = (
    "engine start", "longest length", "LoRA merged into weights", "refit from random weights",
    "refit after a training step", "log-probabilities", "decode against prefill",
)  # fmt: skip
REFITS, MATRIX = ENGINE[3:5], ENGINE[5:]
OTHER_MODELS = (
    "draft layers", "router replay", "routed experts", "images", "prefix caching", "LoRA served by the engine",
)  # fmt: skip
"""Checks that do not apply to a Llama in transformers."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, whose logits spread over several nats."""
    folder = tmp_path_factory.mktemp("certify") / "tiny"
    config = tiny_config(LlamaConfig)
    config.max_position_embeddings = 160
    model = new_model(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    model.save_pretrained(folder)
    byte_tokenizer(model.config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ready(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """The certificate of a correct model."""
    out = tmp_path_factory.mktemp("certify-out") / "out"
    return certify(checkpoint, engine="hf-generate", dtype=torch.float32, out=out)


def by_name(certificate: Certificate) -> dict[str, CheckResult]:
    return {result.name: result for result in certificate.results}


def test_correct_model_is_ready(ready: Certificate) -> None:
    assert ready.answer is Answer.READY, ready.sentence
    results = by_name(ready)
    assert {*OFFLINE, *ENGINE, *OTHER_MODELS} == results.keys()
    assert all(results[name].status is Status.PASSED and results[name].compared for name in (*OFFLINE, *ENGINE))
    assert {results[name].status for name in OTHER_MODELS} == {Status.NOT_APPLICABLE}
    assert ready.longest == 160
    assert ready.options["engine"] == "hf-generate"
    assert set(ready.files) >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_certificate_round_trip(ready: Certificate) -> None:
    assert ready.folder is not None
    assert Certificate.load(ready.folder / "certificate.json") == ready


@pytest.mark.parametrize(
    ("statuses", "answer"),
    [
        ((), Answer.NOT_DECIDED),
        ((Status.NOT_APPLICABLE,), Answer.NOT_DECIDED),
        ((Status.PASSED, Status.NOT_APPLICABLE), Answer.READY),
        ((Status.PASSED, Status.LEFT_OUT), Answer.NOT_DECIDED),
        ((Status.PASSED, Status.NOT_COVERED), Answer.READY),
        ((Status.NOT_COVERED,), Answer.NOT_DECIDED),
        ((Status.PASSED, Status.NOT_DECIDED), Answer.NOT_DECIDED),
        ((Status.PASSED, Status.NOT_DECIDED, Status.FAILED), Answer.NOT_READY),
    ],
)
def test_answer_of(statuses: tuple[Status, ...], answer: Answer) -> None:
    assert answer_of(CheckResult(name=status, status=status, summary="") for status in statuses) is answer


def test_passed_check_without_comparison_raises() -> None:
    with pytest.raises(ValueError, match="compared nothing"):
        CheckResult(name="logits", status=Status.PASSED, summary="", compared=0)


def test_answer_without_engine_is_not_decided(checkpoint: Path, tmp_path: Path) -> None:
    certificate = certify(checkpoint, out=tmp_path / "out", only=("files", "tokenizer"))
    assert certificate.answer is Answer.NOT_DECIDED
    results = by_name(certificate)
    assert {name for name, result in results.items() if result.status is Status.PASSED} == {"files", "tokenizer"}
    results = by_name(certify(checkpoint, out=tmp_path / "out", skip=OFFLINE[3:]))
    assert all(results[name].summary == "no engine: pass --engine" for name in ENGINE)


def test_budget_leaves_out_expensive_checks(checkpoint: Path, tmp_path: Path) -> None:
    certificate = certify(checkpoint, engine="hf-generate", out=tmp_path / "out", budget=6.0)
    left_out = certificate.with_status(Status.LEFT_OUT)
    assert {result.name for result in left_out} >= {*REFITS, *MATRIX}
    assert all(result.summary.startswith("no time left") for result in left_out)
    assert certificate.answer is Answer.NOT_DECIDED
    assert by_name(certificate)["files"].status is Status.PASSED


def test_interrupted_run_resumes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_checks: list[str] = []

    def progress(name: str, results: list[CheckResult]) -> None:
        started_checks.append(name)
        if name == "embeddings":
            raise KeyboardInterrupt

    options: dict[str, Any] = {"out": tmp_path / "out", "only": ("files", "tokenizer", "embeddings")}
    with pytest.raises(KeyboardInterrupt):
        certify(checkpoint, progress=progress, **options)
    assert started_checks == ["files", "tokenizer", "embeddings"]
    started_checks.clear()
    certificate = certify(checkpoint, progress=lambda name, results: started_checks.append(name), **options)
    assert started_checks == ["embeddings", ""]
    assert len(certificate.with_status(Status.PASSED)) == 3
    # Another checkpoint in the same folder has no results.
    monkeypatch.setattr(all_checks, "versions", lambda: {"torch": "99"})
    started_checks.clear()
    certify(checkpoint, progress=lambda name, results: started_checks.append(name), **options)
    assert started_checks == ["files", "tokenizer", "embeddings", ""]


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("no port"), EngineError("did not start")])
def test_check_that_raised_runs_again(
    error: Exception, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise error

    options: dict[str, Any] = {"out": tmp_path / "out", "engine": "hf-generate"}
    selected = ("files", "engine start")
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointUnderTest, "start_engine", fails)
        first = by_name(certify(checkpoint, only=selected, **options))["engine start"]
    assert first.status in (Status.NOT_DECIDED, Status.FAILED)
    # A run that does not select the check keeps the error.
    assert by_name(certify(checkpoint, only=("files",), **options))["engine start"] == first
    started_checks: list[str] = []
    again = certify(checkpoint, only=selected, progress=lambda name, results: started_checks.append(name), **options)
    assert started_checks == ["engine start", ""]
    assert by_name(again)["engine start"].status is Status.PASSED


def test_server_checks_run_again(checkpoint: Path, tmp_path: Path) -> None:
    """A server may restart with other options, which its responses do not show."""
    started_checks: list[str] = []
    options: dict[str, Any] = {"out": tmp_path / "out", "only": ("files", *MATRIX), "dtype": torch.float32}
    with serving(HFEngine.start(checkpoint, dtype=torch.float32)) as (address, served):
        options["engine"] = address
        first = certify(checkpoint, **options)
        served.change = lambda choice: choice | {"logprobs": {**choice["logprobs"], "token_logprobs": None}}
        second = certify(checkpoint, progress=lambda name, results: started_checks.append(name), **options)
    assert "files" not in started_checks
    assert ", ".join(MATRIX) in started_checks
    assert by_name(first)["log-probabilities"].summary != by_name(second)["log-probabilities"].summary


def expired(subject: CheckpointUnderTest) -> CheckpointUnderTest:
    subject.deadline = 0.0
    return subject


def test_cells_beyond_budget_are_listed_and_resumed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"engine": "hf-generate", "dtype": torch.float32, "out": tmp_path / "out"}
    options["only"] = ("files", *MATRIX)
    (check,) = (check for check in all_checks.CHECKS if "log-probabilities" in check.names)
    expired_check = replace(check, run=lambda subject: check.run(expired(subject)))
    others = tuple(other for other in all_checks.CHECKS if other is not check)
    monkeypatch.setattr(all_checks, "CHECKS", (*others, expired_check))
    certificate = certify(checkpoint, **options)
    (other,) = certificate.with_status(Status.NOT_COVERED)
    assert other.name == with_engine.OTHER_CELLS
    assert other.summary.startswith("3 of 4 cells: ")
    assert by_name(certificate)["log-probabilities"].status is Status.PASSED
    monkeypatch.undo()
    certificate = certify(checkpoint, **options)
    assert not certificate.with_status(Status.NOT_COVERED)
    assert by_name(certificate)["log-probabilities"].summary.startswith("4 cells")


def test_cell_exceeding_budget_does_not_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell takes 30 s here. The second ends before the deadline of 70 s, the third would not."""
    now = [0.0]
    original = Meter.measure

    def slow(self: Meter, *args: Any, **options: Any) -> Any:
        measurement = original(self, *args, **options)
        now[0] += 30.0
        return measurement

    monkeypatch.setattr(Meter, "measure", slow)
    monkeypatch.setattr(with_engine, "time", SimpleNamespace(monotonic=lambda: now[0]))
    options = Options("hf-generate", dtype=torch.float32)
    subject = CheckpointUnderTest(checkpoint, options, tmp_path, deadline=70.0)
    *_, other = with_engine.log_probabilities(subject)
    assert other.name == with_engine.OTHER_CELLS
    assert other.summary.startswith("2 of 4 cells: ")
    assert now[0] == 60.0


def test_budget_interrupts_running_check(checkpoint: Path, tmp_path: Path) -> None:
    def slow(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
        yield CheckResult("a", Status.PASSED, "")
        time.sleep(60)
        yield CheckResult("b", Status.PASSED, "")

    check = all_checks.Check(("a", "b"), slow, 0)
    subject = CheckpointUnderTest(checkpoint, Options("hf-generate"), tmp_path)
    handler, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    subject.deadline = started + 1.0
    results = all_checks._run(check, subject)
    assert time.monotonic() - started < 10
    assert [result.status for result in results] == [Status.PASSED, Status.LEFT_OUT]
    assert signal.getsignal(signal.SIGALRM) == handler


def test_refits_stop_at_budget(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = (check for check in all_checks.CHECKS if check.names == REFITS)
    subject = CheckpointUnderTest(checkpoint, Options("hf-generate", dtype=torch.float32), tmp_path)
    results = all_checks._run(check, expired(subject))
    assert [(result.name, result.status) for result in results] == [(name, Status.LEFT_OUT) for name in REFITS]
    assert results[0].summary.startswith("no time left")


def test_unrelated_output_directory_raises(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConsistencyError, match="choose another directory"):
        certify(checkpoint, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_unknown_checks_raise(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnknownArgumentError, match=r"unknown checks weight \(did you mean weights\?\): expected some of files, "
    ):
        certify(checkpoint, out=tmp_path / "out", only=("weight",))


# Faults


def test_missing_tensor_is_not_ready(checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    tensors = safetensors.torch.load_file(broken / "model.safetensors")
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    safetensors.torch.save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    certificate = certify(broken, engine="hf-generate", out=tmp_path / "out")
    assert certificate.answer is Answer.NOT_READY
    assert certificate.side is Side.FILES
    assert certificate.sentence.endswith("Source of the failure: files.")
    assert "model.layers.0.self_attn.v_proj.weight" in by_name(certificate)["files"].summary
    assert {result.status for result in certificate.results[1:]} == {Status.LEFT_OUT}


def test_tokenizer_larger_than_embeddings_is_not_ready(checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    content = json.loads((broken / "tokenizer.json").read_text())
    content["added_tokens"] = [
        *content["added_tokens"],
        {**content["added_tokens"][0], "id": 5000, "content": "<|new|>"},
    ]
    content["model"]["vocab"]["<|new|>"] = 5000
    (broken / "tokenizer.json").write_text(json.dumps(content))
    certificate = certify(broken, out=tmp_path / "out", only=("files", "tokenizer"))
    assert certificate.answer is Answer.NOT_READY
    assert "have no embedding row, the first is 5000" in by_name(certificate)["tokenizer"].summary


def test_wrong_layer_is_not_ready(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nrl_models.families.llama.model import LlamaMLP

    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden_states: 1.01 * original(self, hidden_states))
    only = ("weights", "layers", "logits", "gradients")
    certificate = certify(checkpoint, out=tmp_path / "out", only=("files", *only))
    results = by_name(certificate)
    assert certificate.answer is Answer.NOT_READY
    assert [results[name].status for name in only] == [Status.PASSED, Status.FAILED, Status.FAILED, Status.FAILED]
    assert "model.layers.0.mlp (LlamaMLP)" in results["logits"].advice


def test_stale_tensor_after_refit_is_not_ready(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HFEngine.refit

    def refit(self: HFEngine, tensors: Any, **options: Any) -> Any:
        stale = (item for item in tensors if "layers.1.mlp.up_proj" not in item[0])
        return original(self, stale, **options | {"partial": True})

    monkeypatch.setattr(HFEngine, "refit", refit)
    certificate = certify(
        checkpoint, engine="hf-generate", dtype=torch.float32, out=tmp_path / "out", only=("files", *REFITS)
    )
    assert certificate.answer is Answer.NOT_READY
    assert "layers.1.mlp.up_proj" in " ".join(result.summary for result in certificate.with_status(Status.FAILED))


@pytest.mark.parametrize("change", [lambda value: 1.2 * value, lambda value: value - 0.01], ids=["scaled", "small"])
def test_wrong_logprobs_are_not_ready(
    change: Callable[[float], float], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, an error of 1.01 is not rounding, although the guide's bound for all dtypes is 1.05."""
    original = HFEngine.generate

    def generate(self: HFEngine, *args: Any, **options: Any) -> Any:
        samples = original(self, *args, **options)
        return [replace(sample, logprobs=tuple(map(change, sample.logprobs))) for sample in samples]

    monkeypatch.setattr(HFEngine, "generate", generate)
    certificate = certify(
        checkpoint, engine="hf-generate", dtype=torch.float32, out=tmp_path / "out", only=("files", *MATRIX)
    )
    results = by_name(certificate)
    assert certificate.answer is Answer.NOT_READY
    assert results["log-probabilities"].status is results["decode against prefill"].status is Status.FAILED


def test_measurements_are_not_reused_for_another_engine(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"engine": "hf-generate", "dtype": torch.float32, "out": tmp_path / "out"}
    options["only"] = ("files", *MATRIX)
    assert by_name(certify(checkpoint, **options))["log-probabilities"].status is Status.PASSED
    original = HFEngine.generate

    def wrong(self: HFEngine, *args: Any, **more: Any) -> Any:
        samples = original(self, *args, **more)
        return [replace(sample, logprobs=tuple(value - 1.0 for value in sample.logprobs)) for sample in samples]

    monkeypatch.setattr(HFEngine, "generate", wrong)
    assert by_name(certify(checkpoint, fresh=True, **options))["log-probabilities"].status is Status.FAILED
    monkeypatch.setattr(HFEngine, "generate", original)
    assert by_name(certify(checkpoint, fresh=True, **options))["log-probabilities"].status is Status.PASSED
    monkeypatch.setattr(HFEngine, "generate", wrong)
    installed = all_checks.versions() | {"vllm": "99.0"}
    monkeypatch.setattr(all_checks, "versions", lambda: installed)
    assert by_name(certify(checkpoint, **options))["log-probabilities"].status is Status.FAILED


def test_answer_with_unreachable_engine_is_not_decided(checkpoint: Path, tmp_path: Path) -> None:
    certificate = certify(
        checkpoint, engine="http://127.0.0.1:9", out=tmp_path / "out", only=("files", "log-probabilities")
    )
    assert certificate.answer is Answer.NOT_DECIDED
    assert "127.0.0.1:9" in by_name(certificate)["log-probabilities"].summary


# The report

PLOTTED = ("longest length", *REFITS, "log-probabilities")
"""Checks with plots."""


def plots(page: str) -> list[bytes]:
    """Decode the images of a page."""
    return [base64.b64decode(image) for image in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]


def test_report_plots_worst_cell_of_each_check(ready: Certificate, tmp_path: Path) -> None:
    assert ready.folder is not None
    write_html(ready, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert len(plots(page)) == 2 * len(PLOTTED)
    assert all(image.startswith(b"\x89PNG") for image in plots(page))
    assert page.count("<figcaption") == 2 * len(PLOTTED)
    assert "http" not in page
    assert "<dt>dtype</dt><dd>float32</dd>" in page
    assert "<dt>layers</dt><dd>all</dd>" in page
    for name in PLOTTED:  # the plotted values are those of the result
        measurement = Measurement.load(plotted_file(ready.folder, name))
        errors = [metrics.token_mult_prob_error for metrics in measurement.metrics.values()]
        assert by_name(ready)[name].value in errors


def test_rerun_check_discards_old_plots(checkpoint: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "hf-generate", "dtype": torch.float32, "out": tmp_path / "out"}
    file = plotted_file(tmp_path / "out", "longest length")
    certificate = certify(checkpoint, only=("files", "longest length"), **options)
    assert file.is_file()
    assert certify(checkpoint, only=("files",), **options).results == certificate.results
    assert file.is_file()  # the result was reused
    certify(checkpoint, only=("files",), seed=1, **options)
    assert not file.is_file()


def test_report_omits_damaged_plots(ready: Certificate, tmp_path: Path) -> None:
    assert ready.folder is not None
    folder = shutil.copytree(ready.folder, tmp_path / "out")
    plotted_file(folder, "longest length").write_bytes(b"damaged")
    write_html(replace(ready, folder=folder), tmp_path / "report.html")
    assert len(plots((tmp_path / "report.html").read_text())) == 2 * len(PLOTTED) - 2
    write_html(replace(ready, folder=None), tmp_path / "report.html")
    assert not plots((tmp_path / "report.html").read_text())


# The command


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_certify_command(checkpoint: Path, working_directory: Path) -> None:
    arguments = ["certify", str(checkpoint), "--only", "files", "--only", "tokenizer"]
    files = ["--json", "a.json", "--markdown", "a.md", "--badge", "a.svg"]
    result = CliRunner().invoke(app, [*arguments, *files])
    assert result.exit_code == 3, result.output  # undecided: most checks are left out
    assert result.stdout.startswith("NOT DECIDED: tiny: 2 checks passed")
    (left_out,) = (line for line in result.stdout.splitlines() if line.startswith("  left out"))
    assert left_out.startswith("  left out        values, embeddings, ")
    assert left_out.endswith(": not selected")
    assert json.loads((working_directory / "a.json").read_text())["answer"] == "not decided"
    assert "| files | passed |" in (working_directory / "a.md").read_text()
    assert "not decided</text>" in (working_directory / "a.svg").read_text()
    (folder,) = (path for path in (working_directory / "certify").iterdir() if path.is_dir())
    assert folder.name.startswith("tiny-")
    assert result.stdout.rstrip().endswith(f"report: certify/{folder.name}/report.html")
    page = (folder / "report.html").read_text()
    assert "tiny: not decided. 2 checks passed" in page
    assert page.count('<div class="check passed">') == 2
    assert "http" not in page
    certificate = str(folder / "certificate.json")
    result = CliRunner().invoke(app, ["certify", str(checkpoint), "--verify", certificate])
    assert (result.exit_code, result.stdout.split(":")[0]) == (0, "VALID")
    result = CliRunner().invoke(app, ["certify", str(checkpoint), "--verify", certificate, "--engine", "vllm"])
    assert result.exit_code == 1
    assert "engine: none was checked, not vllm" in result.stdout
    result = CliRunner().invoke(app, ["certify", str(checkpoint), "--verify", certificate, "--badge", "b.svg"])
    assert result.exit_code == 2
    assert "--badge does not apply to --verify" in unframed(result.output)


def test_report_advice_only_for_failed_checks(tmp_path: Path) -> None:
    results = (
        CheckResult(name="padding", status=Status.PASSED, summary="equal", advice="compare the masks"),
        CheckResult(name="packing", status=Status.FAILED, summary="differ", advice="compare the positions"),
    )
    certificate = Certificate.of(
        name="tiny",
        answer=Answer.NOT_READY,
        files={"config.json": "0" * 64},
        options={"engine": ""},
        versions={},
        hardware={},
        results=results,
        not_covered=(),
    )
    write_html(certificate, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "compare the positions" in page
    assert "compare the masks" not in page
    assert '<div class="check failed">' in page


@pytest.mark.parametrize("text", ["10", "ten", "-1m", "1d"])
def test_invalid_budget_exits_with_usage_error(text: str, checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["certify", str(checkpoint), "--budget", text])
    assert result.exit_code == 2


def test_unknown_engine_option_raises(checkpoint: Path, tmp_path: Path) -> None:
    """It is a mistake of the caller, and says nothing about the model."""
    with pytest.raises(EngineOptionError, match=r"no option max_lenght \(did you mean max_length\?\)"):
        certify(
            checkpoint, engine="hf-generate", engine_options={"max_lenght": 8}, only=("engine start",), out=tmp_path
        )
    assert not (tmp_path / "certificate.json").exists()
