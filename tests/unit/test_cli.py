"""The command line: output, files, and exit status (0: passed, 1: a check failed, 2: could not run)."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.certify import Answer, Certificate
from nrl_models.cli import app, demo
from nrl_models.cli.console import show_warnings
from nrl_models.common.checkpoint.files import INDEX_NAME, CheckpointFiles
from nrl_models.parity import ParityReport, ParityRow
from nrl_models.testing.case import FamilyCase
from tests.unit.printed import unframed

runner = CliRunner()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    FamilyCase(registry.model_class("Gemma2ForCausalLM")).reference().save_pretrained(folder, max_shard_size="1MB")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_inspect(checkpoint: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["inspect", str(checkpoint), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["architecture"] == "Gemma2ForCausalLM"
    assert content["family"] == "nrl_models.families.gemma2.model"
    assert content["kinds"] == ["dense"]
    assert content["tied"] is True
    assert content["flags"] == ["SKIP_DTENSOR_TIED_WEIGHTS_CHECK", "VLLM_LOAD_FORMAT_AUTO"]
    assert content["groups"] == {"Gemma2Attention: q_proj + k_proj + v_proj": 2, "Gemma2MLP: gate_proj + up_proj": 2}
    reference = FamilyCase(registry.model_class("Gemma2ForCausalLM")).reference()
    assert content["parameters"] == sum(parameter.numel() for parameter in reference.parameters())
    assert content["stored_bytes"] == 4 * content["parameters"]
    assert content["dtypes"] == {"float32": content["stored_tensors"]}


def test_inspect_without_weights(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.glob("*safetensors*"):
        path.unlink()
    result = runner.invoke(app, ["inspect", str(checkpoint)])
    assert result.exit_code == 0, result.output
    assert "no weights in this directory" in result.output


def test_parity(checkpoint: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["parity", str(checkpoint), "--check", "1", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["verdict"] == "pass"
    assert [(row["value"], row["bound"], row["unit"]) for row in report["checks"]] == [(0.0, 0.0, "count")] * 4
    assert result.output.startswith("PASS: 4 of 4 checks passed")
    assert "level 1:" not in result.output  # passing checks are shown only on request
    result = runner.invoke(app, ["parity", str(checkpoint), "--check", "1", "--verbose"])
    assert result.output.count("level 1:") == 4


def test_parity_exits_non_zero_on_failure(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.parity.noise.TOLERANCE", dict.fromkeys((torch.float32, torch.bfloat16), -1.0))
    monkeypatch.setattr("nrl_models.parity.levels.TOLERANCE", dict.fromkeys((torch.float32, torch.bfloat16), -1.0))
    result = runner.invoke(app, ["parity", str(checkpoint), "--check", "2"])
    assert result.exit_code == 1
    assert result.output.startswith("FAIL: ")
    assert "level 2: Gemma2" in result.output


def test_parity_unknown_check_exits_2(checkpoint: Path) -> None:
    result = runner.invoke(app, ["parity", str(checkpoint), "--check", "9"])
    assert result.exit_code == 2
    assert "'9': expected one of 1, 2, 3, gradients" in unframed(result.output)


def test_convert(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    result = runner.invoke(app, ["convert", str(checkpoint), str(out), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    before, after = CheckpointFiles(checkpoint), CheckpointFiles(out)
    assert before.tensors.keys() == after.tensors.keys()
    for key, tensor in before.tensors.items():
        assert torch.equal(after.read(after.tensors[key]), before.read(tensor).bfloat16())
    assert (out / "tokenizer_config.json").is_file()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_convert_requires_overwrite_for_existing_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    out.mkdir()
    (out / "notes.txt").write_text("mine")  # not a checkpoint, so it may be overwritten
    assert runner.invoke(app, ["convert", str(checkpoint), str(out), "--dtype", "bf16"]).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    result = runner.invoke(app, ["convert", str(checkpoint), str(out), "--dtype", "fp32"])
    assert result.exit_code == 2
    assert "holds a checkpoint: config.json" in unframed(result.output)
    assert "--overwrite" in unframed(result.output)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert runner.invoke(app, ["convert", str(checkpoint), str(out), "--dtype", "fp32", "--overwrite"]).exit_code == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", [["inspect"], ["parity"], ["convert"]])
def test_errors_have_no_traceback(command: list[str], tmp_path: Path) -> None:
    arguments = [*command, str(tmp_path), *([str(tmp_path / "out")] if command == ["convert"] else [])]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "config.json is missing" in unframed(result.output)
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_convert_in_place_exits_2(checkpoint: Path) -> None:
    result = runner.invoke(app, ["convert", str(checkpoint), str(checkpoint)])
    assert result.exit_code == 2
    assert "is the checkpoint itself, which cannot be written in place" in result.output


# inspect


def test_inspect_counts_tensors_of_index(checkpoint: Path, tmp_path: Path) -> None:
    weight_map = json.loads((checkpoint / INDEX_NAME).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    assert runner.invoke(app, ["inspect", str(checkpoint), "--json", str(tmp_path / "out.json")]).exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["stored_tensors"] == len(weight_map)


def test_inspect_names_damaged_shard(checkpoint: Path, tmp_path: Path) -> None:
    shard = sorted(checkpoint.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    result = runner.invoke(app, ["inspect", str(checkpoint), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 2
    assert "CheckpointError" in result.output
    assert shard.name in result.output
    assert not (tmp_path / "out.json").exists()


def test_path_with_brackets_is_printed_verbatim(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "a[b]c")
    assert "a[b]c" in runner.invoke(app, ["inspect", str(folder)]).output.replace("\n", "")
    result = runner.invoke(app, ["convert", str(folder), str(tmp_path / "d[e]f")])
    assert "d[e]f" in result.output.replace("\n", "")


# Errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose", "embeddings", "--near-zero-threshold", "nan"],
        ["diagnose", "embeddings", "--identical-threshold", "inf"],
        ["diagnose", "decode-vs-prefill", "--threshold", "nan"],
        ["plan", "--mesh", "fsdp=2", "--memory", "inf"],
        ["refit-check", "--threshold", "nan"],
    ],
    ids=lambda arguments: arguments[-2],
)
def test_non_finite_thresholds_exit_2(arguments: list[str], checkpoint: Path) -> None:
    result = runner.invoke(app, [*arguments, str(checkpoint)])
    assert result.exit_code == 2
    assert re.search(rf"{arguments[-1]}(: expected at least 0| is not a finite number)", unframed(result.output))


@pytest.mark.parametrize("command", ["inspect", "parity", "convert"])
def test_missing_path_exits_2(command: str, tmp_path: Path) -> None:
    arguments = [command, str(tmp_path / "nowhere"), *([str(tmp_path / "out")] if command == "convert" else [])]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "no such directory" in unframed(result.output)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "unknown dtype 'int8': expected one of float32 (fp32), bfloat16 (bf16)"),
        (["--max-shard-size", "huge"], "max_shard_size='huge': expected bytes, or a size such as '5GB'"),
        (["--max-shard-size", "-5MB"], "max_shard_size='-5MB': expected bytes, or a size such as '5GB'"),
    ],
)
def test_convert_invalid_options_exit_2(arguments: list[str], message: str, checkpoint: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["convert", str(checkpoint), str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in unframed(result.output)
    assert not (tmp_path / "out").exists()


def test_convert_into_file_exits_2(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    result = runner.invoke(app, ["convert", str(checkpoint), str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "is a file, expected a directory" in unframed(result.output)
    assert (tmp_path / "file").read_text() == "kept"


def test_unknown_device_exits_2(checkpoint: Path) -> None:
    result = runner.invoke(app, ["parity", str(checkpoint), "--device", "nonesuch"])
    assert result.exit_code == 2
    assert "Invalid value for '--device': 'nonesuch': expected a device" in unframed(result.output)


def test_unwritable_json_path_exits_before_running(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.onboarding.inspect.inspect", None)
    result = runner.invoke(app, ["inspect", str(checkpoint), "--json", str(checkpoint / "config.json" / "out.json")])
    assert result.exit_code == 2
    assert "Invalid value for '--json'" in result.output
    assert "cannot be written" in result.output


def test_errors_are_printed_to_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nrl_models", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "500"})
    assert done.returncode == 2
    assert "config.json is missing" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_peft_adapter_logs_no_deprecation(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        show_warnings()
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        warnings.warn("shown", FutureWarning, stacklevel=1)
    printed = capsys.readouterr().err
    assert "is_gradient_checkpointing" not in printed
    assert "warning: shown" in printed


def test_json_option_creates_parent_directory(checkpoint: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["inspect", str(checkpoint), "--json", str(tmp_path / "made" / "out.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "made" / "out.json").read_text())["architecture"] == "Gemma2ForCausalLM"


# parity


def test_parity_report_lists_requested_checks(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--check", "1", "--check", "gradients", "--length", "8", "--json", str(tmp_path / "out.json")]
    result = runner.invoke(app, ["parity", str(checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    checks = [row["check"] for row in json.loads((tmp_path / "out.json").read_text())["checks"]]
    assert "level 1: weights" in checks
    assert "gradients, float32" in checks
    assert not [name for name in checks if name.startswith(("level 2", "level 3"))]


def test_parity_table_prints_brackets_verbatim() -> None:
    report = ParityReport("a[b]", [ParityRow("generated text", True, "x[i]", "[/y]", "'z[bold]'")])
    shown = io.StringIO()
    Console(file=shown, width=200).print(report.table())
    assert all(text in shown.getvalue() for text in ("a[b]", "x[i]", "[/y]", "'z[bold]'"))


# demo


@pytest.mark.parametrize(("passed", "answer"), [(True, "ready"), (False, "ready"), (True, "not ready")])
def test_demo_exit_status_matches_verdict(
    passed: bool, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run_demo(folder: Path, *, steps: int, broken: bool) -> ParityReport:
        calls.append((folder, steps))
        return ParityReport("demo", [ParityRow("a", True, "1", "1"), ParityRow("b", passed, "2", "2")])

    certificate = Certificate.of(
        name="checkpoint", answer=Answer(answer), files={}, options={"engine": "hf-generate"}, versions={}, hardware={},
        results=(), not_covered=(), folder=tmp_path,
    )  # fmt: skip
    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(demo, "certify_demo", lambda folder: certificate)
    arguments = ["--out", str(tmp_path), "--steps", "7", "--json", str(tmp_path / "out.json")]
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == (0 if passed and answer == "ready" else 1)
    assert result.stdout.splitlines()[-3:] == [
        f"{answer.upper()}: checkpoint with hf-generate: 0 checks passed.",
        f"certificate: {tmp_path / 'certificate.json'}",
        f"report: {tmp_path / 'report.html'}",
    ]
    assert ("FAIL" in result.output) is not passed
    assert calls == [(tmp_path, 7)]
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == ("pass" if passed else "fail")
