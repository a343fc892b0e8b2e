"""Messages of the command line about options and paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

import nrl_models
from nrl_models.cli import app
from nrl_models.common.trust.own_folder import MARKER, claim, default_folder, why_not_claimed
from nrl_models.errors import CheckpointError, DeviceError, EngineError, UnknownArgumentError
from nrl_models.onboarding.plan_table import GIB, MIB, compared
from tests.unit.printed import unframed


@pytest.fixture
def models(tmp_path: Path) -> Path:
    LlamaConfig(max_position_embeddings=64, num_hidden_layers=1).save_pretrained(tmp_path / "checkpoint")
    return tmp_path


def output(*arguments: object, code: int = 2) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return unframed(result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("consistency", "--mode", "samplingg"),
            "'samplingg' (did you mean sampling?): expected one of greedy, sampling",
        ),
        (("consistency", "--data", "reel"), "'reel' (did you mean real?): expected one of real, dummy"),
        (("parity", "--check", "gradient"), "'gradient' (did you mean gradients?): expected one of 1, 2, 3, gradients"),
        (("parity", "--length", "2"), "'--length': 2: expected at least 8"),
        (("parity", "--length", "two"), "'--length': 'two': expected an integer"),
        (("consistency", "--threshold", "x"), "'--threshold': 'x': expected a number"),
        (("consistency", "--engine", "vlm"), "unknown engine 'vlm' (did you mean vllm?)"),
        (("certify", "--only", "weightz"), "'weightz' (did you mean weights?)"),
        (("plan", "--mesh", "fsdp=0"), "'fsdp=0': expected a size of at least 1"),
        (("parity", "--device", "cuda:99"), "'--device': 'cuda:99': "),
    ],
)
def test_invalid_option_lists_expected_values(arguments: tuple[str, ...], message: str, models: Path) -> None:
    text = output(arguments[0], models / "checkpoint", *arguments[1:])
    assert message in text
    assert "Input should be" not in text
    assert "Value error" not in text


def test_suggested_paths_are_valid_for_command(models: Path) -> None:
    folder = models / "checkpoint"
    assert f"did you mean {folder}?" in output("inspect", models / "checkpointz")
    assert f"config.json is missing (did you mean {folder}?)" in output("inspect", models)
    assert "did you mean" not in output("inspect", folder / "config.jsn")
    assert f"did you mean {folder / 'config.json'}?" in output("quirks", folder / "config.jsn")


def test_convert_to_empty_path_raises(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell variable that is not set. The current directory would be written."""
    monkeypatch.chdir(models)
    assert "the path is empty: pass . for the current directory" in output("convert", models / "checkpoint", "")
    assert [path.name for path in models.iterdir()] == ["checkpoint"]


def test_from_pretrained_suggests_paths_and_keywords(models: Path) -> None:
    load, folder = nrl_models.AutoModelForCausalLM.from_pretrained, models / "checkpoint"
    with pytest.raises(CheckpointError, match=rf"no such directory \(did you mean {folder}\?\)"):
        load(models / "checkpointz")
    with pytest.raises(CheckpointError, match=rf"config.json: is missing \(did you mean {folder}\?\)"):
        load(models)
    with pytest.raises(UnknownArgumentError, match='pass attn_implementation="flash_attention_2"'):
        load(folder, use_flash_attention_2=True)  # type: ignore[call-arg]


def test_start_engine_suggests_name_and_checks_device(models: Path) -> None:
    with pytest.raises(EngineError, match=r"unknown engine 'vlm' \(did you mean vllm\?\)"):
        nrl_models.start_engine("vlm", models / "checkpoint")
    with pytest.raises(DeviceError, match=r"device='cuda:99': .*available: cpu"):
        nrl_models.start_engine("hf-generate", models / "checkpoint", device="cuda:99")


def test_plan_uses_one_memory_unit_and_notes_length_limit(models: Path) -> None:
    assert compared(204 * MIB, 154 * MIB) == "needs 204 MiB, a device has 154 MiB"
    assert compared(1200 * MIB, 800 * MIB) == "needs 1,200 MiB, a device has 800 MiB"
    assert compared(204 * MIB, 80 * GIB) == "needs 204 MiB, a device has 80 GiB"
    text = output("plan", models / "checkpoint", "--mesh", "fsdp=1", "--seq-len", 65, code=0)
    assert "--seq-len 65 exceeds the model's limit of 64 tokens" in text
    assert "465M parameters" in text


def test_directory_claimed_by_another_command(tmp_path: Path) -> None:
    claim(tmp_path / "other", "checkpoints of nrl-models demo")
    assert not claim(tmp_path / "other", "results")
    reason = f"belongs to another command: its {MARKER} says 'checkpoints of nrl-models demo'"
    assert reason in why_not_claimed(tmp_path / "other")


def test_results_folder_is_named_after_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc123"
    assert default_folder("consistency", snapshot, "0123456789").name == "Qwen3-8B-01234567"
