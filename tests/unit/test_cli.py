import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nrl_models import registry
from nrl_models.cli import app
from nrl_models.common.checkpoint_files import CheckpointFiles
from nrl_models.testing.case import FamilyCase

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
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["architecture"] == "Gemma2ForCausalLM"
    assert found["family"] == "nrl_models.families.gemma2.model"
    assert found["kinds"] == ["dense"]
    assert found["tied"] is True
    assert found["flags"] == ["VLLM_LOAD_FORMAT_AUTO"]
    assert found["groups"] == {"Gemma2Attention: q_proj + k_proj + v_proj": 2, "Gemma2MLP: gate_proj + up_proj": 2}
    reference = FamilyCase(registry.model_class("Gemma2ForCausalLM")).reference()
    assert found["parameters"] == sum(parameter.numel() for parameter in reference.parameters())
    assert found["stored_bytes"] == 4 * found["parameters"]
    assert found["dtypes"] == {"float32": found["stored_tensors"]}


def test_inspect_without_weights(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.glob("*safetensors*"):
        path.unlink()
    result = runner.invoke(app, ["inspect", str(checkpoint)])
    assert result.exit_code == 0, result.output
    assert "no weights here" in result.output


def test_parity(checkpoint: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["parity", str(checkpoint), "--check", "1", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "pass"


def test_parity_exits_non_zero_on_failure(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl_models.parity.noise.TOLERANCE", dict.fromkeys((torch.float32, torch.bfloat16), -1.0))
    monkeypatch.setattr("nrl_models.parity.levels.TOLERANCE", dict.fromkeys((torch.float32, torch.bfloat16), -1.0))
    assert runner.invoke(app, ["parity", str(checkpoint), "--check", "2"]).exit_code == 1


def test_parity_refuses_an_unknown_check(checkpoint: Path) -> None:
    result = runner.invoke(app, ["parity", str(checkpoint), "--check", "9"])
    assert result.exit_code == 2
    assert "expected some of" in result.output


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


@pytest.mark.parametrize("command", [["inspect"], ["parity"], ["convert"]])
def test_errors_have_no_traceback(command: list[str], tmp_path: Path) -> None:
    arguments = [*command, str(tmp_path), *([str(tmp_path / "out")] if command == ["convert"] else [])]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "config.json: is missing" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_convert_refuses_its_own_source(checkpoint: Path) -> None:
    result = runner.invoke(app, ["convert", str(checkpoint), str(checkpoint)])
    assert result.exit_code == 2
    assert "cannot convert in place" in result.output
