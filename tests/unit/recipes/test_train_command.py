"""`nrl-models train`: its output, its files, and its exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from printed import unframed
from recipe_inputs import save_with_tokenizer
from transformers import PreTrainedModel
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.errors import ConsistencyError, NRLModelsError
from nrl_models.inputs.processors import load_processor
from nrl_models.recipes import read_recipe, recipes, train

runner = CliRunner()


@pytest.fixture
def small(llama: PreTrainedModel, rows_file: Path, tmp_path: Path) -> list[str]:
    """Return small overrides of `llama/sft`."""
    checkpoint = save_with_tokenizer(llama, tmp_path / "checkpoint")
    return [
        f"model.pretrained_model_name_or_path={checkpoint}", f"data.path={rows_file}",
        "training.steps=2", "training.batch=2", "training.max_length=32", "training.compute=float32",
    ]  # fmt: skip


def test_train_passes_gates(small: list[str], tmp_path: Path) -> None:
    file, out = tmp_path / "run.json", tmp_path / "out"
    arguments = ["--json", str(file), "--out", str(out), "gates=[max(loss) < 100, last(tokens) > 0]"]
    result = runner.invoke(app, ["train", "llama/sft", *small, *arguments])
    assert result.exit_code == 0, result.output
    assert "last(gradient_norm)" in unframed(result.output)
    assert unframed(result.output).count("last(tokens)") == 1, "the table has one line for this metric"
    printed = result.output.splitlines()
    (heading,) = (number for number, line in enumerate(printed) if "measured" in line)
    assert printed.index("PASS: 2 of 2 gates passed") < heading
    assert printed[-1] == f"saved: {out}"
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert [gate["gate"] for gate in report["gates"]] == ["max(loss) < 100", "last(tokens) > 0"]
    assert len(report["steps"]) == 2
    assert (out / "model.safetensors").is_file()
    assert (out / "tokenizer.json").is_file()


def test_failed_gate_fails_command(small: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    result = runner.invoke(
        app, ["train", "llama/sft", *small, "gates=[last(loss) < 0.1, last(loss) > 0]", "--json", str(file)]
    )
    assert result.exit_code == 1, result.output
    assert "FAIL: 1 of 2 gates passed" in result.output
    assert [gate["passed"] for gate in json.loads(file.read_text())["gates"]] == [False, True]


def test_out_requires_overwrite(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(checkpoint, out)
    before = [(folder / "model.safetensors").read_bytes() for folder in (checkpoint, out)]
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # the error is raised before anything loads
        for folder, options, message in (
            (out, [], "pass --overwrite"),
            (checkpoint, [], "is the checkpoint itself"),
            (checkpoint, ["--overwrite"], "is the checkpoint itself"),
        ):
            result = runner.invoke(app, ["train", "llama/sft", *small, "--out", str(folder), *options])
            assert result.exit_code == 2
            assert "error: CheckpointError" in result.output
            assert message in unframed(result.output)
    assert [(folder / "model.safetensors").read_bytes() for folder in (checkpoint, out)] == before
    result = runner.invoke(app, ["train", "llama/sft", *small, "--out", str(out), "--overwrite", "gates=[]"])
    assert result.exit_code == 0, result.output
    assert (out / "model.safetensors").read_bytes() != before[1]
    assert result.output.splitlines()[-1] == f"saved: {out}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template, which rows with messages need What to do: add chat_template.jinja"),
        ("{{ raise_exception('no system message') }}", "TemplateError: no system message"),
        ("{{ 'a' + messages }}", "the chat template cannot be applied to [{'role': 'user', 'content': "),
    ],
)
def test_chat_template_errors_before_model_loads(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, message: str
) -> None:
    file = tmp_path / "checkpoint" / "chat_template.jinja"
    file.unlink() if template is None else file.write_text(template)
    monkeypatch.setattr("nrl_models.recipes.recipe_run.resolve_folder", None)
    chats = "data.columns={completion: $messages, prompt: []}"
    result = runner.invoke(app, ["train", "llama/sft", *small, chats])
    assert result.exit_code == 2
    assert f"file: {tmp_path / 'checkpoint'}: " in unframed(result.output)
    assert message in unframed(result.output)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_activation_checkpointing_logs_no_deprecation(small: list[str]) -> None:
    result = runner.invoke(app, ["train", "llama/sft", *small, "training.activation_checkpointing=true", "gates=[]"])
    assert result.exit_code == 0, result.output


def test_rows_without_prompt_fail(small: list[str], rows_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}')
    overrides = [small[0], f"data.path={file}", "data.columns=null", "engine.name=hf-generate"]
    result = runner.invoke(app, ["train", "llama/grpo", *overrides])
    assert result.exit_code == 2
    assert "a row: has question, answer: expected prompt" in unframed(result.output)


def test_truncated_rows_are_logged(small: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for length, count in ((32, 0), (8, 1)):
        result = runner.invoke(app, ["train", "llama/sft", *small, f"training.max_length={length}"])
        assert result.exit_code in (0, 1), result.output
        assert sum("longer than max_length: they are truncated" in message for message in caplog.messages) == count


def test_list_option() -> None:
    result = runner.invoke(app, ["train", "--list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in recipes())
    assert "DAPO on mathematics for Gemma 4 E2B" in unframed(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`nrl-models train --list` shows the bundled recipes"),
        (["llama/grpp"], "did you mean llama/grpo"),
        (["llama/grpo", "training.steps"], "expected KEY=VALUE"),
        (["llama/grpo", ""], "'' (grpo.yaml): expected KEY=VALUE"),
        (["llama/grpo", "loss.name=ppo"], "expected one of sft, dpo, reward, grpo, dr_grpo, dapo"),
        (["llama/grpo", "training.stepz=1", "engin.name=vllm"], "(2 problems)"),
        (["gemma4/dapo_e2b", "loss.correction.type=null"], "Invalid truncated importance sampling type: None"),
        (["llama/sft", "model.pretrained_model_name_or_path=./nowhere"], "nowhere"),
        (["llama/sft", "model.path=./nowhere"], "model.path (sft.yaml): nothing reads it (did you mean pretrained_"),
    ],
)
def test_invalid_arguments_fail_before_training(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["train", *arguments])
    assert result.exit_code == 2
    assert message in unframed(result.output)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no tokenizer files"),
        (
            {"tokenizer.json": "{", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
            "does not load",
        ),
    ],
    ids=["missing", "damaged"],
)
def test_tokenizer_that_does_not_load_is_a_typed_error(
    files: dict[str, str], words: str, small: list[str], tmp_path: Path
) -> None:
    for file in (tmp_path / "checkpoint").glob("*token*"):
        file.unlink()
    for name, content in files.items():
        (tmp_path / "checkpoint" / name).write_text(content)
    with pytest.raises(NRLModelsError, match=words):
        train(read_recipe(recipes()["llama/sft"], small))


def test_tokenizer_of_a_subfolder_is_used(small: list[str], tmp_path: Path) -> None:
    (tmp_path / "checkpoint").rename(tmp_path / "part")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "part").rename(tmp_path / "checkpoint/part")
    run = train(read_recipe(recipes()["llama/sft"], [*small, "model.subfolder=part", "gates=[]"]))
    assert len(run.steps) == 2


def test_processor_that_does_not_load_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConsistencyError, match=r"the processor in .* does not load"):
        load_processor(tmp_path)


def test_unreachable_repository_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before transformers requests the tokenizer, six times with pauses."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    def request_tokenizer(*_: object, **__: object) -> None:
        raise AssertionError("the tokenizer was requested")

    monkeypatch.setattr("nrl_models.common.checkpoint.resolve_folder.snapshot_download", fail)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", request_tokenizer)
    result = runner.invoke(app, ["train", "llama/sft"])
    assert result.exit_code == 2
    printed = unframed(result.output)
    assert "error: CheckpointError" in printed
    assert "cannot be fetched as a hub repository: OSError: Name or service not known" in printed
    assert "What to do: check the path; for a hub repository check its name, your token and the network" in printed
