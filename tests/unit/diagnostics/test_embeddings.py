"""Diagnostic 3 on checkpoints, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, edit_weights, new_model, stored
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3Config, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.diagnostics.embeddings import diagnose_embeddings, ranges
from nrl_models.errors import CheckpointError, UnknownArgumentError
from nrl_models.testing.tiny import tiny_config

PADDING, ZERO, CONSTANT = 0, [1, 7, 300], [40]
"""The padding token's row 0, which transformers initializes with zeros."""


def spoil(tensors: dict[str, torch.Tensor], key: str = "model.embed_tokens.weight") -> None:
    tensors[key][[PADDING, *ZERO]] = 0.0
    tensors[key][CONSTANT] = 0.25


@pytest.fixture
def untrained(folder: Path) -> Path:
    """A checkpoint with rows of zeros and one constant row in its input embedding."""
    edit_weights(folder, spoil)
    return folder


@pytest.fixture
def healthy(folder: Path) -> Path:
    """A checkpoint without untrained rows."""
    edit_weights(folder, lambda tensors: tensors["model.embed_tokens.weight"][0].normal_(std=0.06))
    return folder


def test_healthy_checkpoint_passes(healthy: Path) -> None:
    result = diagnose_embeddings(healthy)
    assert result.passed
    assert [embedding["kind"] for embedding in result.measured["embeddings"]] == ["input", "output"]
    assert not result.measured["tied"]
    assert result.lines.count("No untrained rows found") == 2


def test_untrained_rows_are_reported_per_embedding(untrained: Path) -> None:
    result = diagnose_embeddings(untrained)
    assert not result.passed
    first, second = result.measured["embeddings"]
    assert first["near_zero"] == ZERO
    assert first["identical"] == sorted(ZERO + CONSTANT)  # rows of zeros are also identical
    assert first["padding"] == PADDING
    assert first["duplicates"] == [], "rows of zeros are counted once"
    assert (second["near_zero"], second["identical"]) == ([], [])
    text = "\n".join(result.lines)
    assert "Near-zero embeddings (abs < 1.00e-10): 3/512 (0.6%)" in text
    assert "Indices: 1,7,40,300" in text
    weight = stored(untrained)["model.embed_tokens.weight"].float()
    assert first["mean_abs"] == pytest.approx(weight.abs().mean().item(), rel=1e-5)
    assert first["max_abs"] == weight.abs().max().item()
    healthy = weight[[row for row in range(512) if row not in (PADDING, *ZERO, *CONSTANT)]]
    assert first["healthy_std"] == pytest.approx(healthy.std(correction=0).item(), rel=1e-4)


def test_thresholds_are_applied(llama_checkpoint: Path) -> None:
    assert len(diagnose_embeddings(llama_checkpoint, near_zero=1e9).measured["embeddings"][0]["near_zero"]) == 511
    assert len(diagnose_embeddings(llama_checkpoint, identical=1e9).measured["embeddings"][0]["identical"]) == 511


def test_only_embedding_tensors_are_read(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, shapes = CheckpointFiles.read, []

    def noted(self: CheckpointFiles, *args: object, **kwargs: object) -> torch.Tensor:
        tensor = read(self, *args, **kwargs)
        shapes.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(CheckpointFiles, "read", noted)
    diagnose_embeddings(llama_checkpoint)
    assert shapes == [(512, 256), (512, 256)]


def test_tied_embeddings_of_nested_text_model(tmp_path: Path) -> None:
    model = new_model(tiny_config(Gemma3Config), "ForConditionalGeneration")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 0.0
    model.save_pretrained(tmp_path)
    result = diagnose_embeddings(tmp_path)
    assert result.measured["tied"]
    assert result.measured["embeddings"][0]["near_zero"] == [5]
    assert result.measured["embeddings"][0]["padding"] == 0
    assert "language_model" in result.measured["embeddings"][0]["key"]


def test_reinitialize_changes_only_untrained_rows(untrained: Path, tmp_path: Path) -> None:
    target = tmp_path / "mended"
    result = diagnose_embeddings(untrained, reinitialize=target)
    assert "with 4 rows reinitialized" in "\n".join(result.lines)
    assert diagnose_embeddings(target).passed
    before, after = stored(untrained), stored(target)
    rows = sorted(ZERO + CONSTANT)
    changed = after["model.embed_tokens.weight"]
    deviation = result.measured["embeddings"][0]["healthy_std"]
    assert changed[rows].std().item() == pytest.approx(deviation, rel=0.1)
    before["model.embed_tokens.weight"][rows] = changed[rows]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_reinitialize_copies_no_files_outside(untrained: Path, tmp_path: Path) -> None:
    (untrained / "additional_chat_templates").mkdir()
    (untrained / "additional_chat_templates" / "tools.jinja").write_text("template")
    (untrained / "logs").mkdir()
    diagnose_embeddings(untrained, reinitialize=tmp_path / "copied")
    assert (tmp_path / "copied" / "additional_chat_templates" / "tools.jinja").read_text() == "template"
    assert not (tmp_path / "copied" / "logs").exists()
    (tmp_path / "secret").write_text("secret")
    (untrained / "notes.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"notes\.bin: is a link that leaves the directory"):
        diagnose_embeddings(untrained, reinitialize=tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_reinitialize_in_place_raises(untrained: Path) -> None:
    with pytest.raises(CheckpointError, match="in place"):
        diagnose_embeddings(untrained, reinitialize=untrained, overwrite=True)


def test_reinitialize_requires_overwrite(untrained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model-00001-of-00002.safetensors").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="holds a checkpoint: model-00001"):
        diagnose_embeddings(untrained, reinitialize=other)
    assert [path.name for path in other.iterdir()] == ["model-00001-of-00002.safetensors"]
    diagnose_embeddings(untrained, reinitialize=other, overwrite=True)
    assert diagnose_embeddings(other).passed


def test_reinitialize_expands_home_directory(untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    diagnose_embeddings(untrained, reinitialize="~/mended")
    assert (tmp_path / "home" / "mended" / "config.json").is_file()
    assert not (tmp_path / "~").exists()
    with pytest.raises(UnknownArgumentError, match=r"'~nobody-here' is not a directory to save into"):
        diagnose_embeddings(untrained, reinitialize="~nobody-here")


def test_no_healthy_rows_raise(folder: Path, tmp_path: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["lm_head.weight"].zero_())
    with pytest.raises(CheckpointError, match="no healthy row"):
        diagnose_embeddings(folder, reinitialize=tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_tied_head_counts_once(tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig, {"tie_word_embeddings": True})).save_pretrained(tmp_path)
    result = diagnose_embeddings(tmp_path)
    assert result.measured["tied"]
    first, *rest = result.measured["embeddings"]
    assert first["padding"] == 0
    assert result.passed
    assert all(embedding["key"] == first["key"] for embedding in rest)


def test_tied_tensors_that_are_both_stored(tmp_path: Path) -> None:
    new_model(tiny_config(LlamaConfig, {"tie_word_embeddings": True})).save_pretrained(tmp_path / "tied")

    def store_both(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][ZERO] = 0.0
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_weights(tmp_path / "tied", store_both)
    result = diagnose_embeddings(tmp_path / "tied", reinitialize=tmp_path / "mended")
    assert result.measured["tied"]
    assert {embedding["key"] for embedding in result.measured["embeddings"]} == {"model.embed_tokens.weight"}
    assert "with 3 rows reinitialized" in "\n".join(result.lines)
    after = stored(tmp_path / "mended")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mended")
    assert torch.equal(model.lm_head.weight, after["lm_head.weight"])
    assert diagnose_embeddings(tmp_path / "mended").passed


def test_stored_tensors_with_different_values_are_not_tied(tmp_path: Path) -> None:
    """transformers loads both tensors, although the configuration ties them."""
    new_model(tiny_config(LlamaConfig, {"tie_word_embeddings": True})).save_pretrained(tmp_path / "tied")

    def store_other_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
        tensors["model.embed_tokens.weight"][20] = 0.0
        tensors["lm_head.weight"][30] = 0.0

    edit_weights(tmp_path / "tied", store_other_head)
    before = stored(tmp_path / "tied")
    result = diagnose_embeddings(tmp_path / "tied", reinitialize=tmp_path / "mended")
    assert not result.measured["tied"]
    assert [embedding["near_zero"] for embedding in result.measured["embeddings"]] == [[20], [30]]
    after = stored(tmp_path / "mended")
    changed = {
        name: (after[name] != before[name]).any(1).nonzero().flatten().tolist()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    assert changed == {"model.embed_tokens.weight": [20], "lm_head.weight": [30]}


def test_zero_row_of_shared_padding_token_is_reported(folder: Path) -> None:
    edit_config(folder, pad_token_id=2, eos_token_id=[1, 2])
    edit_weights(folder, lambda tensors: tensors["model.embed_tokens.weight"][2].zero_())
    first = diagnose_embeddings(folder).measured["embeddings"][0]
    assert (first["near_zero"], first["padding"]) == ([PADDING, 2], None)


def test_without_padding_token_zero_rows_are_reported(folder: Path) -> None:
    edit_config(folder, pad_token_id=-1)
    edit_weights(folder, lambda tensors: tensors["model.embed_tokens.weight"][-1].zero_())
    first = diagnose_embeddings(folder).measured["embeddings"][0]
    assert first["padding"] is None
    assert first["near_zero"][-1] == first["shape"][0] - 1


def test_non_finite_rows_are_reinitialized(folder: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][[20, 21], 3] = torch.tensor([torch.nan, torch.inf])

    edit_weights(folder, damage)
    result = diagnose_embeddings(folder, reinitialize=tmp_path / "mended")
    assert not result.passed
    assert result.measured["embeddings"][0]["not_finite"] == [20, 21]
    assert diagnose_embeddings(tmp_path / "mended").measured["embeddings"][0]["not_finite"] == []


def test_tokens_of_untrained_rows_are_listed(folder: Path) -> None:
    vocabulary = {"<pad>": PADDING, "good": 2, "<unused>": 7}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)))
    edit_weights(folder, lambda tensors: tensors["model.embed_tokens.weight"][7::293].zero_())
    assert "  Tokens: '<unused>', 1 without a token" in diagnose_embeddings(folder, tokenizer=tokenizer).lines


def test_ranges_format() -> None:
    assert ranges([0, 1, 3, 4, 5, 9]) == "0-1,3-5,9"
    assert ranges([]) == ""


def test_command_exits_1_for_untrained_rows(untrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["diagnose", "embeddings", str(untrained), "--json", str(file)])
    assert result.exit_code == 1
    assert ": 4 embedding rows look untrained" in result.output
    assert "--reinitialize DIR" in result.output
    content = json.loads(file.read_text())
    assert (content["diagnostic"], content["verdict"]) == ("embeddings", "fail")
