"""Messages of the command line about options and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import LlamaConfig
from typer.testing import CliRunner

import nrl_models
from nrl_models.cli import app
from nrl_models.common.checkpoint.local_path import CACHE_VARIABLE, cache_directory
from nrl_models.common.trust.own_folder import MARKER, claim, default_folder, why_not_claimed
from nrl_models.engines.processes.environment import interpreter_of
from nrl_models.errors import (
    CheckpointError,
    DeviceError,
    EngineError,
    EngineUnavailableError,
    RecipeError,
    UnknownArgumentError,
)
from nrl_models.onboarding.plan_table import GIB, MIB, compared
from nrl_models.recipes import recipe_file
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
    assert "the path is empty: pass '.' for the current directory" in output("convert", models / "checkpoint", "")
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


UNKNOWN_USER, NO_HOME = "~nobody-here/x", "'~nobody-here/x' is not a path: Could not determine home directory"

PATH_ARGUMENTS = (
    ("inspect", "{}"),
    ("quirks", "{}"),
    ("new", "{}"),
    ("convert", "checkpoint", "{}"),
    ("inspect", "checkpoint", "--json", "{}"),
    ("demo", "--out", "{}"),
    ("train", "demo/sft", "--out", "{}"),
    ("consistency", "checkpoint", "--text", "{}"),
    ("consistency", "checkpoint", "--out", "{}"),
    ("certify", "checkpoint", "--markdown", "{}"),
    ("replay", "{}"),
    ("diagnose", "embeddings", "checkpoint", "--reinitialize", "{}"),
    ("diagnose", "prefix-caching", "checkpoint", "--engine-python", "{}"),
)


@pytest.mark.parametrize("arguments", PATH_ARGUMENTS, ids=" ".join)
def test_impossible_path_raises_before_command_runs(
    arguments: tuple[str, ...], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    Path("loop").symlink_to("loop")
    before = sorted(models.rglob("*"))
    assert NO_HOME in output(*(argument.format(UNKNOWN_USER) for argument in arguments))
    loop = output(*(argument.format("loop") for argument in arguments))
    assert "'loop' is not a path: Too many levels of symbolic links" in loop
    assert sorted(models.rglob("*")) == before


def test_every_path_argument_has_a_parser() -> None:
    """Only parsers of this library expand `~`."""
    command: Any = typer.main.get_command(app)
    commands = [*command.commands.values(), *command.commands["diagnose"].commands.values()]
    descriptors = {f"{each.name} {param.name}": param.type_descriptor for each in commands for param in each.params}
    paths = {name: each for name, each in descriptors.items() if "Path" in str(each.annotation)}
    assert "consistency images" in paths
    assert not [name for name, each in paths.items() if each.parameter_info.parser is None]


def test_home_directory_is_expanded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(models))
    monkeypatch.chdir(models)
    output("inspect", "~/checkpoint", "--json", "~/written.json", code=0)
    assert (models / "written.json").is_file()
    assert not (models / "~").exists()


def test_link_to_missing_config_is_reported(models: Path) -> None:
    (models / "copied").mkdir()
    (models / "copied" / "config.json").symlink_to("../blobs/0123")
    assert "config.json cannot be read: FileNotFoundError" in output("inspect", models / "copied")


def test_directory_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is a directory, expected a YAML file"):
        recipe_file(str(tmp_path))


@pytest.mark.parametrize("name", [UNKNOWN_USER, "x" * 300, "loop/x"])
def test_impossible_path_of_recipe_interpreter_or_cache_raises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(RecipeError, match=r"no such recipe .*\n.*is not a path"):
        recipe_file(name)
    with pytest.raises(EngineUnavailableError, match=r"no Python: .* is not a path"):
        interpreter_of(name)
    monkeypatch.setenv(CACHE_VARIABLE, name)
    with pytest.raises(CheckpointError, match=rf"cannot use {CACHE_VARIABLE} .*\n.*is not a path"):
        cache_directory()
