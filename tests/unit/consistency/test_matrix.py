"""The matrix: measuring cells, storing them, resuming, and reporting."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from completions_server import serving
from rich.console import Console
from small_cell import SETTINGS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.cli.consistency_command import shown_command
from nrl_models.consistency import matrix
from nrl_models.consistency.cells import GUIDE_BATCHES, GUIDE_LENGTHS, Cell, Settings
from nrl_models.consistency.consistency_report import ConsistencyReport
from nrl_models.consistency.html import write_html
from nrl_models.consistency.matrix import check_consistency, run_matrix
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.references import References
from nrl_models.consistency.store import Store
from nrl_models.consistency.verdict import Party
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ConsistencyError, EngineError
from nrl_models.logprobs import Sampling
from nrl_models.quirks import VerdictKind

Run = Callable[..., ConsistencyReport]


@pytest.fixture
def run(checkpoint: Path, engine: HFEngine, trainer: HFEngine, prompts: Prompts, tmp_path: Path) -> Run:
    """Return a function that runs the matrix on the two models, with one store for all measurements."""

    def run(settings: Settings = SETTINGS, **options: Any) -> ConsistencyReport:
        meter = Meter(engine, trainer, prompts, settings, Store(tmp_path / "store", {}))
        return run_matrix(str(checkpoint), meter, References(checkpoint), **options)

    return run


def test_default_matrix_matches_guide() -> None:
    cells = Settings(lengths=GUIDE_LENGTHS, batches=GUIDE_BATCHES).cells()
    assert len(cells) == 36
    assert {cell.length for cell in cells} == {100, 1_000, 10_000}
    assert {cell.batch for cell in cells} == {1, 8, 32}
    assert {(cell.data, cell.mode) for cell in cells} == {
        ("real", "greedy"),
        ("real", "sampling"),
        ("dummy", "greedy"),
        ("dummy", "sampling"),
    }


def test_settings_error_lists_all_problems() -> None:
    with pytest.raises(ConsistencyError) as caught:
        Settings(lengths=(3,), data=("fake",), modes=("beam",), batches=(0,), repeats=0, threshold=0.5)
    for part in ("length 3", "data 'fake'", "mode 'beam'", "batch 0", "repeats 0", "threshold 0.5"):
        assert part in str(caught.value)


def test_equal_models_pass_in_every_cell(run: Run) -> None:
    settings = replace(SETTINGS, lengths=(16,), modes=("greedy", "sampling"), batches=(1, 3), repeats=2, strict=True)
    report = run(settings)
    assert report.verdict == "pass", report.markdown()
    content = report.to_json()
    assert len(content["cells"]) == 4
    for cell in content["cells"]:
        errors = [repeat[kind]["token_mult_prob_error"] for repeat in cell["repeats"] for kind in ("decode", "prefill")]
        errors += [repeat["strict"]["token_mult_prob_error"] for repeat in cell["repeats"]]
        assert (cell["value"], cell["unit"]) == (max(errors), "token_mult_prob_error")
        assert cell["value"] <= cell["bound"]
        assert 1.0 <= cell["token_mult_prob_error"] < 1.0001
        assert 1.0 <= cell["token_mult_prob_error_strict"] < 1.0001
        assert 1.0 <= cell["noise_floor"] < 1.0001
        assert len(cell["repeats"]) == 2
        # A batch of n sequences. Half of the tokens, at most 8, are generated.
        assert cell["repeats"][0]["decode"]["tokens"] == cell["batch"] * min(8, cell["length"] // 2)
    # Repeats use other prompts and seeds.
    first, second = report.results[-1].repeats
    assert not torch.equal(first.tokens, second.tokens)


def test_interrupted_run_resumes(run: Run, engine: HFEngine, tmp_path: Path) -> None:
    settings = replace(SETTINGS, lengths=(16, 24, 32))
    generate, calls = engine.generate, []

    def dies(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise EngineError("the engine died")
        return generate(*args, **kwargs)

    engine.generate = dies
    report = run(settings)
    assert report.verdict == "incomplete"
    assert report.error == "the engine died"
    assert [result.cell.length for result in report.results] == [16, 24]
    assert json.loads((tmp_path / "store" / "report.json").read_text())["error"] == "the engine died"
    before = [result.to_json() for result in report.results]
    report = run(settings)
    assert len(calls) == 4  # only the third cell was generated
    assert report.verdict == "pass"
    assert [result.to_json() for result in report.results[:2]] == before


def test_measurements_with_other_settings_raise(checkpoint: Path, tmp_path: Path) -> None:
    options = {"engine": "hf-generate", "out": tmp_path, "dtype": torch.float32}
    assert check_consistency(checkpoint, settings=SETTINGS, **options).passed
    with pytest.raises(ConsistencyError, match="seed: 0 before, 1 now"):
        check_consistency(checkpoint, settings=replace(SETTINGS, seed=1), **options)
    # More cells or another threshold do not invalidate measurements.
    assert check_consistency(checkpoint, settings=replace(SETTINGS, batches=(2, 3), threshold=1.5), **options).passed
    assert check_consistency(checkpoint, settings=replace(SETTINGS, seed=1), fresh=True, **options).passed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("versions", "versions.transformers: '[^']+' before, '99.0' now"),
        ("device", "device: 'cpu' before, 'cpu:0' now"),
        ("engine", "engine.vllm: None before, '99.0' now"),
    ],
)
def test_measurements_of_other_versions_or_devices_raise(
    changed: str, message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"engine": "hf-generate", "out": tmp_path, "dtype": torch.float32, "settings": SETTINGS}
    assert check_consistency(checkpoint, **options).passed
    described, installed = HFEngine.describe, matrix.versions()
    if changed == "versions":
        monkeypatch.setattr(matrix, "versions", lambda: installed | {"transformers": "99.0"})
    elif changed == "engine":  # from another environment
        monkeypatch.setattr(HFEngine, "describe", lambda self: described(self) | {"vllm": "99.0"})
    else:
        options["device"] = "cpu:0"
    with pytest.raises(ConsistencyError, match=message):
        check_consistency(checkpoint, **options)
    assert check_consistency(checkpoint, fresh=True, **options).passed


def test_reused_measurements_are_announced(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"engine": "hf-generate", "out": tmp_path, "settings": SETTINGS}
    assert check_consistency(checkpoint, **options).passed
    assert "reused" not in caplog.text
    assert check_consistency(checkpoint, **options).passed
    assert "measurements of hf-generate with the same settings, which are reused" in caplog.text
    caplog.clear()
    assert check_consistency(checkpoint, fresh=True, **options).passed
    assert "reused" not in caplog.text


def test_reusing_server_measurements_warns(
    checkpoint: Path, engine: HFEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, sampling=Sampling())
    with serving(engine) as (address, served):
        options = {"engine": address, "out": tmp_path, "dtype": torch.float32, "settings": settings}
        assert check_consistency(checkpoint, **options).passed
        assert "reused" not in caplog.text
        assert check_consistency(checkpoint, **options).passed
        assert f"measurements of {address} with the same settings, which are reused. A server does not" in caplog.text
        served.models = ["other"]
        with pytest.raises(ConsistencyError, match=r"engine.model: 'tiny' before, 'other' now"):
            check_consistency(checkpoint, **options)


def test_settings_without_measurements_are_replaced(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="unknown engine"):
        check_consistency(checkpoint, settings=SETTINGS, out=tmp_path, engine="tgi", dtype=torch.float32)
    assert check_consistency(
        checkpoint, settings=SETTINGS, out=tmp_path, engine="hf-generate", dtype=torch.float32
    ).passed


def test_verdict_round_trip(run: Run, engine: HFEngine) -> None:
    with torch.no_grad():
        engine.model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
    verdict = run().results[0].verdict
    assert verdict.divergence is not None
    assert run().results[0].verdict == verdict


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("names", [("thesis.tex",), ("settings.json",), ("settings.json", "thesis.tex", "report.json")])
def test_unrelated_output_directory_raises(tmp_path: Path, names: tuple[str, ...], fresh: bool) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConsistencyError, match=r"has no file \.nrl_models that marks a directory of this command"):
        Store(tmp_path, {"a": 1}, fresh=fresh)
    assert {file.name for file in tmp_path.iterdir()} == set(names)
    assert all((tmp_path / name).read_text() == "{}" for name in names)


def test_fresh_deletes_only_files_of_store(tmp_path: Path) -> None:
    cell = SETTINGS.cells()[0]
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    folder = tmp_path / "store"
    store = Store(folder, {"a": 1})
    store.save(cell, 0, {"tokens": torch.ones(2)})
    for note in ("report", f"verdict-{cell.key}"):
        store.save_note(note, {})
    (folder / "settings.json").write_text("damaged")
    unrelated = {"thesis.tex", "model-1.safetensors", "my-report.json", "verdict-mine.json", "8-a-b-2.safetensors"}
    for name in unrelated:
        (folder / name).write_text("unrelated")
    (folder / "report.json").unlink()
    (folder / "report.json").symlink_to(outside)
    (folder / "8-real-greedy-2-0.safetensors").mkdir()
    store = Store(folder, {"a": 2}, fresh=True)
    assert store.load(cell, 0) == {}
    assert store.load_note("report") is None
    assert outside.read_text() == "{}"
    left = {file.name for file in folder.iterdir()}
    assert left == unrelated | {".nrl_models", "settings.json", "8-real-greedy-2-0.safetensors"}


@pytest.mark.parametrize("content", [b"damaged", b"[" * 10**5, b"\xff"])
def test_damaged_settings_error_suggests_fresh(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path / "store", {"a": 1}).save(SETTINGS.cells()[0], 0, {"tokens": torch.ones(2)})
    (tmp_path / "store" / "settings.json").write_bytes(content)
    with pytest.raises(ConsistencyError, match=r"settings\.json is damaged .*--fresh"):
        Store(tmp_path / "store", {"a": 1})


def test_report_with_nan_fails_and_is_valid_json(run: Run, engine: HFEngine) -> None:
    score = engine.score
    engine.score = lambda *args, **kwargs: [[math.nan] * len(row) for row in score(*args, **kwargs)]
    report = run()
    assert report.verdict == "fail"
    verdict = report.results[0].verdict
    assert (verdict.kind, verdict.at_fault) == (VerdictKind.NOT_FINITE, (Party.PREFILL,))
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["cells"][0]["repeats"][0]["prefill"]["nan"] == 16
    assert json.loads(json.dumps(run().to_json())) == content  # the stored measurements give the same report


def test_strict_mode_finds_never_sampled_tokens(run: Run, engine: HFEngine) -> None:
    # An engine that does not sample as requested, but reports correct log-probabilities for its samples.
    settings = replace(SETTINGS, sampling=replace(SETTINGS.sampling, top_p=1.0), new_tokens=12)
    score = engine.score

    def without_some(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        scores = score(sequences, *args, **kwargs)
        for row, tokens in zip(scores, sequences, strict=True):
            for position in range(12, len(tokens)):
                if tuple(tokens) not in sampled and tokens[position] % 2:
                    row[position] = -math.inf
        return scores

    generate, sampled = engine.generate, set()

    def record_samples(*args: Any, **kwargs: Any) -> Any:
        samples = generate(*args, **kwargs)
        sampled.update(sample.sequence for sample in samples)
        return samples

    engine.score, engine.generate = without_some, record_samples
    report = run(replace(settings, strict=True))
    assert report.verdict == "fail"
    assert any(
        "log-probabilities of strict are infinite in the engine" in problem for problem in report.results[0].problems
    )


def test_verdict_names_trainer_that_excludes_sampled_token(run: Run, trainer: HFEngine) -> None:
    score = trainer.score

    def without_last(*args: Any, **kwargs: Any) -> Any:
        return [[*row[:-1], -math.inf] for row in score(*args, **kwargs)]

    trainer.score = without_last
    report = run(replace(SETTINGS, sampling=Sampling()))
    assert report.verdict == "fail"
    assert (report.results[0].verdict.kind, report.results[0].verdict.at_fault) == ("trainer", (Party.TRAINER,))


def test_engine_without_scoring_compares_decode_only(run: Run, engine: HFEngine) -> None:
    known = engine.capabilities()
    engine.capabilities = lambda: replace(known, score=False, processed_scores=False)
    report = run()
    assert report.verdict == "pass"
    assert report.results[0].comparisons.keys() == {"decode"}
    assert next(report.rows()).numbers[1] == "-"


def test_markdown_report(run: Run) -> None:
    text = run().markdown()
    assert "| Sequence Length | Data Type | Generation Method | Batch Size | trainer vs hf-generate, decode |" in text
    assert "| 24 | dummy | sampling | 2 | 1.000" in text
    assert f"\nEngine: hf-generate, transformers {version('transformers')}, class " in text
    assert f"\nTrainer: transformers {version('transformers')}, class " in text


def test_html_report_is_self_contained(run: Run, engine: HFEngine, tmp_path: Path) -> None:
    with torch.no_grad():
        engine.model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
    report = run()
    write_html(report, tmp_path / "report.html", command="nrl-models consistency demo")
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    assert report.results[0].verdict.summary.replace("'", "&#x27;") in page
    assert f"token {report.results[0].repeats[0].tokens[0, -1]}: trainer" in page
    assert f"torch {torch.__version__.partition('+')[0]}" in page
    assert 'by this command: <code class="command">nrl-models consistency demo</code>' in page


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/qwen/checkpoint-100/", "qwen/checkpoint-100"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/b968826d", "Qwen/Qwen3-8B"),
    ],
)
def test_page_title_is_the_model_name(run: Run, tmp_path: Path, path: str, name: str) -> None:
    write_html(replace(run(), path=path), tmp_path / "report.html")
    assert f"<h1>{name}: consistency with " in (tmp_path / "report.html").read_text()


def test_html_colors_use_absolute_scale(run: Run, engine: HFEngine, tmp_path: Path) -> None:
    """The color depends on a token's absolute difference, so a difference of 1e-6 is white on every page."""

    def reds() -> set[str]:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        write_html(run(), tmp_path / "report.html")
        return set(re.findall(r"rgba\(200, 0, 30, ([0-9.]+)\)", (tmp_path / "report.html").read_text()))

    assert reds() == {"0.00"}
    with torch.no_grad():
        engine.model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
    assert "0.60" in reds()


# The command


def test_shown_command_hides_secrets() -> None:
    arguments = ["consistency", "demo", "--engine", "http://me:hunter2@host:1", "--engine-option", "api_key=hunter2"]
    command = shown_command([*arguments, "--engine-option=api_key=hunter2", "--new-tokens=8"])
    assert "hunter2" not in command
    assert "//...@host:1" in command
    assert "--new-tokens=8" in command


def test_command_writes_requested_files(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--engine", "hf-generate", "--dtype", "float32", "--new-tokens", "8"]
    arguments += ["--length", "24", "--data", "dummy", "--batch", "2"]
    files = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["consistency", str(checkpoint), *arguments, *files])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["verdict"] == "pass"
    assert {(cell["length"], cell["data"], cell["mode"], cell["batch"]) for cell in content["cells"]} == {
        (24, "dummy", "greedy", 2),
        (24, "dummy", "sampling", 2),
    }
    assert "**pass**" in (tmp_path / "a.md").read_text()
    assert (tmp_path / "out" / "report.html").is_file()
    assert "PASS: 2 of 2 cells passed" in result.output
    assert result.output.rstrip().endswith(f"report: {tmp_path / 'out' / 'report.html'}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "tgi"], "unknown engine 'tgi'"),
        (["--engine", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--data", "real"], "no tokenizer"),
        (["--length", "5000"], "5,000"),
        (["--temperature", "0"], "choose mode greedy"),
        (["--engine-option", "device"], "expected KEY=VALUE"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
    ],
    ids=["engine", "server", "tokenizer", "length", "temperature", "option", "dtype"],
)
def test_invalid_arguments_fail_without_traceback(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    base = ["consistency", str(checkpoint), "--out", str(tmp_path / "out")]
    base += [] if "--engine" in arguments else ["--engine", "hf-generate"]
    base += [] if "--length" in arguments else ["--length", "24"]
    base += [] if "--data" in arguments else ["--data", "dummy"]
    result = CliRunner().invoke(app, [*base, *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join((result.output + result.stderr).replace("│", " ").split())


def test_missing_engine_error_suggests_installation(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if vLLM were not installed
    arguments = ["consistency", str(checkpoint), "--length", "24", "--data", "dummy", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "make engine" in result.output + result.stderr


@pytest.mark.parametrize("existing", [(), ("notes.txt",)], ids=["empty", "other files"])
def test_engine_start_error_leaves_no_directory(
    existing: tuple[str, ...], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise EngineError("no memory")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matrix, "start_engine", fails)
    for name in existing:
        (tmp_path / "consistency").mkdir()
        (tmp_path / "consistency" / name).write_text("")
    with pytest.raises(EngineError, match="no memory"):
        check_consistency(checkpoint, engine="hf-generate", settings=SETTINGS)
    assert [path.name for path in tmp_path.rglob("*")] == (["consistency", *existing] if existing else [])


def words(count: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the numbers below `count`."""
    known = Tokenizer(models.WordLevel({str(number): number for number in range(count)}, unk_token="0"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known)


def test_tokenizer_without_pre_tokenizer_raises() -> None:
    known = Tokenizer(models.WordLevel({"<0>": 0, "a": 1}, unk_token="<0>"))  # without a pre-tokenizer
    prompts = Prompts(PreTrainedTokenizerFast(tokenizer_object=known), 512)
    cell = replace(SETTINGS, data=("dummy",)).cells()[0]
    with pytest.raises(ConsistencyError, match="encodes 32 numbers as 1 tokens, the same as half of them"):
        prompts.make(cell, 16, seed=0)


def test_tokens_outside_vocabulary_raise_only_if_used() -> None:
    """Gemma 3's tokenizer, for example, has an image token."""
    text = " ".join(map(str, range(2_000)))
    prompts = Prompts(words(600), 512, text)
    cell = replace(SETTINGS, data=("real",)).cells()[0]
    with pytest.raises(ConsistencyError, match=r"the tokenizer returns token 599 \('599'\), .* has 512 rows"):
        prompts.make(cell, 16, seed=0)
    with pytest.raises(ConsistencyError, match="the tokenizer returns token 599"):
        prompts.counting(3_000)
    fine = Prompts(words(600), 512, text.partition(" 512 ")[0] * 2)
    assert max(map(max, fine.make(cell, 16, seed=0))) < 512
    assert fine.counting(40) == list(range(1, 41))


def test_default_output_directories(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(
        checkpoint, tmp_path / "other" / checkpoint.name
    )  # the same directory name with other files
    (other / "config.json").touch()
    options = {"engine": "hf-generate", "dtype": torch.float32}
    reports = [check_consistency(path, settings=SETTINGS, **options) for path in (checkpoint, other, checkpoint)]
    first, second, again = (report.out for report in reports)
    assert first == again != second
    assert {folder.parent for folder in (first, second)} == {Path("consistency")}
    assert Path("consistency/.gitignore").read_text() == "*\n"


@pytest.mark.parametrize("error", [1.0, 1.0000025, 1.05, 17.25])
def test_table_fits_100_columns_without_truncation(error: float, run: Run) -> None:
    report = run()
    report.results[0] = replace(report.results[0], cell=Cell(10_000, "dummy", "sampling", 32))
    metrics = report.results[0].repeats[0].metrics
    for name, value in metrics.items():
        metrics[name] = replace(value, token_mult_prob_error=error, worst_sequence=error)
    shown = io.StringIO()
    Console(file=shown, width=100).print(report.table())
    assert max(map(len, shown.getvalue().splitlines())) <= 100
    assert "…" not in shown.getvalue()
    assert f"{error:.7f}" in shown.getvalue()


def test_table_in_narrow_terminal(run: Run) -> None:
    report, shown = run(), io.StringIO()
    Console(file=shown, width=80).print(report.table())
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    for result in report.results:
        cell = result.cell
        heading = f"length {cell.length:,}, data {cell.data}, mode {cell.mode}, batch {cell.batch}: pass"
        assert lines[lines.index(heading) + 1] == f"decode          {result.errors[0]:.7f}"
