"""The GPU kit: runs without a GPU only with `--cpu`, records failures, resumes, and its checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import benchmarks.gpu.__main__ as kit
from benchmarks.gpu import (
    export,
    generated_tests,
    hardware,
    level_three,
    loading,
    models,
    policy_step,
    reruns,
    training,
)
from benchmarks.gpu.context import Context, run_cases
from benchmarks.gpu.outcomes import CheckError, Outcome, Results, digest
from benchmarks.gpu.page import page, table
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.wheels import unpack

CPU = Context(torch.device("cpu"), tiny=True)
MACHINE = {"accelerator": "none", "torch": "2.13", "transformers": "5.24"}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "gpu.json", MACHINE)


def reread(results: Results, **changes: str) -> Results:
    return Results(results.path, MACHINE | changes)


# Start


def test_without_gpu_exits_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kit, "run_until", lambda *arguments: pytest.fail("a section ran"))
    assert kit.main(["--out", str(tmp_path / "out")]) == kit.NO_GPU
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("no GPU: torch ")
    assert output.err.count("\n") == 1
    assert "make gpu CPU=1" in output.err
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kit.wheels, "missing", lambda: ["lazy-loader", "pytest"])
    monkeypatch.setattr(kit, "run_until", lambda *arguments: pytest.fail("a section ran"))
    assert kit.main(["--cpu", "--wheels", "nowhere"]) == kit.NO_GPU
    assert "not installed: lazy-loader, pytest; run `make gpu-wheels`" in capsys.readouterr().err


def test_wheels_of_missing_packages_are_unpacked(tmp_path: Path) -> None:
    for name in ("pytest", "absent_package"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    assert unpack(tmp_path, tmp_path / "site") == ["absent_package"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["absent_package"]
    assert unpack(tmp_path / "nowhere", tmp_path / "site") == []


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
    ],
)
def test_peak_tflops_by_device_name(name: str, peak: float | None) -> None:
    assert hardware.peak_tflops(name) == peak


def test_description_includes_peak_tflops(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert hardware.describe(cpu=False, peak=None)["bf16 peak"] == "989 TFLOPS"
    assert hardware.describe(cpu=False, peak=500.0)["bf16 peak"] == "500 TFLOPS"
    properties.name = "NVIDIA X1"
    assert hardware.describe(cpu=False, peak=None)["bf16 peak"] == "unknown"


def test_make_passes_options() -> None:
    command = ["make", "-n", "gpu", "CPU=1", "ONLY=load refit", "LIMIT=60", "PEAK=500", "OUT=x", "GPU_PYTHON=python"]
    # Within `make test`, the variables of that make would be inherited, and directories printed.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=kit.ROOT, env=environment, capture_output=True, text=True, check=True)
    arguments = done.stdout.split("-m benchmarks.gpu ")[1].split()
    options = kit.parse(arguments)
    assert (options.cpu, options.only, options.limit, options.peak) == (True, ["load", "refit"], 60, 500)
    assert options.out == Path("x")
    assert " gpu CPU=1 " in (kit.ROOT / ".ci" / "run").read_text()


# Outcomes


def boom() -> Any:
    raise RuntimeError("CUDA error: an illegal memory access\nmore lines")


def wrong() -> Any:
    raise CheckError("losses differ", [{"loss": 2.0}])


@pytest.mark.long
def test_failing_case_does_not_stop_other_cases(results: Results) -> None:
    results.begin("rl", digest())
    run_cases(results, "rl", {"first": boom, "second": wrong, "third": lambda: [{"loss": float("nan")}]})
    section = reread(results).sections["rl"]
    assert section.is_finished
    assert section.failures == [
        "first: RuntimeError: CUDA error: an illegal memory access",
        "second: check failed: losses differ",
    ]
    assert section.cases["second"].rows == [{"loss": 2.0}]
    assert section.cases["third"].rows == [{"loss": None}]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_only_missing_cases_run_again(results: Results, workers: int) -> None:
    results.begin("load", digest())
    results.plan("load", ["first", "second", "third"])
    results.add("load", "first", Outcome([{"GB": 1.0}]))
    again = reread(results)
    kit.resume(again, ["load"], again=True)
    again.begin("load", digest())
    ran: list[str] = []

    def case(name: str) -> list[dict[str, Any]]:
        ran.append(name)
        return [{"GB": 2.0}]

    run_cases(again, "load", {name: partial(case, name) for name in ("first", "second", "third")}, workers)
    assert sorted(ran) == ["second", "third"]
    assert reread(results).sections["load"].cases["first"].rows == [{"GB": 1.0}]


def finished(results: Results, names: list[str], sources: str) -> Results:
    for name in names:
        results.begin(name, sources)
        results.plan(name, ["only"])
        results.add(name, "only", Outcome())
    return reread(results)


def test_interrupted_run_keeps_finished_sections(results: Results) -> None:
    loaded = finished(results, ["parity"], digest())
    kit.resume(loaded, ["parity", "rl"])
    assert list(loaded.sections) == ["parity"]


@pytest.mark.parametrize(
    ("names", "sources", "options"),
    [
        pytest.param(["parity"], "other sources", {}, id="other sources"),
        pytest.param(["parity"], digest(), {"fresh": True}, id="fresh"),
        pytest.param(["parity"], digest(), {"again": True}, id="named sections"),
        pytest.param(["parity", "rl"], digest(), {}, id="finished run"),
    ],
)
def test_resume_discards_stale_outcomes(
    results: Results, names: list[str], sources: str, options: dict[str, bool]
) -> None:
    loaded = finished(results, [*names, "load"], sources)
    kit.resume(loaded, ["parity", "rl"], **options)
    assert list(loaded.sections) == ["load"]


@pytest.mark.parametrize("key", Results.IDENTITY)
def test_results_of_another_machine_are_discarded(results: Results, key: str) -> None:
    assert finished(results, ["parity"], digest()).sections
    assert not reread(results, **{key: "another"}).sections
    assert not Results(results.path, MACHINE, "tiny").sections


def options_for(results: Results, limit: float = 60.0) -> Any:
    return SimpleNamespace(cpu=True, limit=limit, peak=None)


def run_as(
    results: Results, code: str, monkeypatch: pytest.MonkeyPatch, *, left: float = 60.0, seconds: int = 60
) -> Results:
    """Run the section `rl` with a subprocess that runs `code`."""
    actual = kit.run_until

    def run(command: Any, *others: Any) -> int | None:
        return actual([sys.executable, "-c", code, *command[3:]], *others)

    monkeypatch.setattr(kit, "run_until", run)
    section = next(section for section in SECTIONS if section.name == "rl")
    section = type(section)(**(vars(section) | {"seconds": seconds}))
    return kit.run_section(
        section, results, results.path.with_name("log"), time.monotonic() + left, options_for(results, left)
    )


PLANS = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.outcomes import Outcome, Results
results = Results(Path(sys.argv[sys.argv.index("--results") + 1]))
results.plan("rl", ["first", "second"])
results.add("rl", "first", Outcome())
"""


def test_crash_is_recorded_for_unfinished_cases(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    code = PLANS + "print('out of memory', file=sys.stderr, flush=True); os.abort()"
    section = run_as(results, code, monkeypatch).sections["rl"]
    assert not section.cases["first"].error
    assert section.cases["second"].error == "ended with status -6: out of memory"
    assert section.is_finished


def test_section_start_failure_is_recorded(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    section = run_as(results, "raise ImportError('No module named x')", monkeypatch).sections["rl"]
    assert section.failures == ["ended with status 1: ImportError: No module named x"]
    assert kit.summarize(Results(results.path, MACHINE), ["rl"], results.path, results.path) == 1


@pytest.mark.long
def test_section_timeout_kills_subprocesses(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    code = PLANS + "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, file=sys.stderr, flush=True)\n"
    section = run_as(results, code + "time.sleep(300)", monkeypatch, seconds=3).sections["rl"]
    assert section.cases["second"].error == "stopped after 3 s"
    pid = int(results.path.with_name("log").read_text().split()[-1])
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_run_past_time_limit_resumes(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, the process needs 3 seconds to start.
    loaded = run_as(results, PLANS + "time.sleep(300)", monkeypatch, left=10)
    assert loaded.sections["rl"].missing == ["second"]
    assert kit.summarize(loaded, ["rl"], results.path, results.path) == 1
    loaded = run_as(loaded, "raise AssertionError('no time left')", monkeypatch, left=-1)
    assert loaded.sections["rl"].missing == ["second"]


# Page


def test_committed_page_matches_committed_figures() -> None:
    assert kit.PAGE.read_text() == page(Results(kit.JSON))


def test_page_without_results(tmp_path: Path) -> None:
    text = page(Results(tmp_path / "gpu.json"))
    assert "**Not yet measured.**" in text
    assert all(section.title in text for section in SECTIONS)


def test_page_lists_figures_failures_and_missing_cases(results: Results) -> None:
    results.begin("rl", digest())
    results.plan("rl", ["first", "second", "third"])
    results.add("rl", "first", Outcome([{"way": "packed", "time / TRL": 0.51234}]))
    results.add("rl", "second", Outcome(error="OutOfMemoryError: <tried> [to] allocate | 2 GiB"))
    text = page(reread(results))
    assert "| packed | 0.512 |" in text
    assert "**Failed**: second: OutOfMemoryError: &lt;tried> \\[to] allocate \\| 2 GiB" in text
    assert "Not yet measured: third." in text
    assert "accelerator: none" in text
    assert text.count("\nNot yet measured.\n") == len(SECTIONS) - 1


def test_table_with_different_columns_per_row() -> None:
    assert table([{"a": 1}, {"a": None, "b": "x"}])[:4] == ["| a | b |", "|---|---|", "| 1 |  |", "|  | x |"]


# Checks


def test_operation_count_matches_torch_flop_counter() -> None:
    config = models.config_of("Llama 1B", CPU)
    model, tokens = models.contender(models.UPSTREAM, config, CPU), models.random_tokens(config, CPU, 1, 32)
    model.set_attn_implementation("eager")  # torch does not count the CPU's fused attention
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    attention = 6 * 32 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    # torch counts attention without the causal mask: twice as much. Older transformers multiply matrices for rope.
    expected = 32 * (training.operations_per_token(model, 32) + attention)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_mfu_is_relative_to_the_peak() -> None:
    rows = training._steps("Llama 1B", Context(torch.device("cpu"), tiny=True, peak=1e12))
    model = models.contender(models.UPSTREAM, models.config_of("Llama 1B", CPU), CPU)
    for row in rows:
        assert row["MFU"] == pytest.approx(training.operations_per_token(model, 64) * row["tokens/s"] / 1e12)


@pytest.mark.long
def test_wrong_loss_fails_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def unclipped(output: Any, *, old: Any, advantages: Any, weights: Any) -> torch.Tensor:
        return -((output.logprobs - old).exp() * advantages[:, None] * weights).sum()

    assert len(policy_step._compare("Llama 1B", CPU)) >= 4
    monkeypatch.setattr(policy_step, "_loss", unclipped)
    with pytest.raises(CheckError, match=r"token_logprobs, padded: loss .* expected") as failure:
        policy_step._compare("Llama 1B", CPU)
    assert len(failure.value.rows) >= 4


def test_wrong_refit_fails_check(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = export._stream

    def loses_one(model: Any, received: dict[str, torch.Tensor], max_bytes: int | None) -> None:
        actual(model, received, max_bytes)
        if max_bytes:
            received["model.norm.weight"].zero_()

    monkeypatch.setattr(export, "_stream", loses_one)
    with pytest.raises(CheckError, match=r"1 of 20 received tensors differ, first model\.norm\.weight"):
        export._compare("Llama 1B", "device", CPU)


def test_differing_rerun_fails_check(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(100))

    def run() -> reruns.Result:
        return [1.0], {"weight": torch.tensor(float(next(counts)))}

    with pytest.raises(CheckError, match="1 of 1 tensors differ") as failure:
        reruns._compare("steps", run)
    assert [row["mode"] for row in failure.value.rows] == ["default", "deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_wrong_model_fails_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(model: Any) -> None:
        with torch.no_grad():
            model.model.norm.weight.mul_(1.1)

    monkeypatch.setattr(level_three, "check_parity", partial(level_three.check_parity, after_load=scale))
    with pytest.raises(CheckError, match="level 3: logits, bfloat16") as failure:
        level_three._family("LlamaForCausalLM", CPU)
    assert "no" in [row["passed"] for row in failure.value.rows]


@pytest.mark.long
def test_wrong_load_fails_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def from_pretrained(folder: Path, **options: Any) -> Any:
            model = models.AutoModelForCausalLM.from_pretrained(folder, **options)
            with torch.no_grad():
                model.model.norm.weight[0] += 1
            return model

    monkeypatch.setattr(loading, "AutoModelForCausalLM", Wrong)
    with pytest.raises(CheckError, match=r"tensors differ from those that transformers loads: model\.norm\.weight"):
        loading._compare("Llama 1B", CPU)


def test_pinned_copies_read_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CHUNK", 1000)
    contents = [os.urandom(2500), os.urandom(1000)]
    files = [tmp_path / name for name in "ab"]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    copied = loading.PinnedCopies(files, torch.device("cpu"))()
    assert b"".join(chunk.numpy().tobytes() for chunk in copied) == b"".join(contents)


def test_parse_pytest_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        "<testsuites><testsuite><testcase name='a'><properties/></testcase><testcase name='b'><failure/></testcase>"
        "<testcase name='c'><error/></testcase><testcase name='d'><skipped/></testcase></testsuite></testsuites>"
    )
    assert generated_tests.outcomes(tmp_path / "report.xml") == {
        "a": "passed",
        "b": "failed",
        "c": "failed",
        "d": "skipped",
    }


def test_pytest_start_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_tests.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="pytest ended with status 1: no output"):
        generated_tests._run("LlamaForCausalLM")


@pytest.mark.parametrize(("passed", "failed"), [(1, 1), (0, 0)])
def test_generated_tests_section_fails_on_failure_or_no_tests(
    passed: int, failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = "<testcase name='good'/>" * passed + "<testcase name='bad'><failure/></testcase>" * failed

    def run(command: list[str], **options: Any) -> Any:
        report = next(word for word in command if word.startswith("--junitxml=")).partition("=")[2]
        Path(report).write_text(f"<testsuites>{cases}</testsuites>")
        return SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(generated_tests.subprocess, "run", run)
    with pytest.raises(CheckError, match=f"{failed} of {passed + failed} tests failed") as failure:
        generated_tests._run("LlamaForCausalLM")
    assert failure.value.rows[0]["passed"] == passed


# Complete runs


@pytest.mark.long  # the gate runs `make gpu CPU=1`
def test_dry_run_on_a_cpu(tmp_path: Path) -> None:
    """Two sections; `.ci/run` runs all. A second run of one section keeps the other's outcomes."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--out", str(tmp_path), "--only"]
    done = subprocess.run([*command, "refit", "projections"], cwd=kit.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 cases passed" in done.stdout
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["size"] == "tiny"
    assert list(content["sections"]) == ["projections", "refit"]
    assert "**Tiny sizes:**" in (tmp_path / "gpu.md").read_text()
    done = subprocess.run(
        [*command, "refit", "--limit", "0"], cwd=kit.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "not finished: refit; run again to resume" in done.stdout
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert list(content["sections"]) == ["projections"]
