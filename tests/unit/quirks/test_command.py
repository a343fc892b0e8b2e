"""`nrl-models quirks` for a checkpoint, for a configuration, or for everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nrl_models import registry
from nrl_models.cli import app
from nrl_models.quirks import CATALOG
from nrl_models.testing.case import FamilyCase
from tools.coverage_pages.quirk_pages import class_subject, page_lines


def listed(path: Path | None, at: Path) -> dict:
    """Return the JSON output of the command, after checking that its table lists the same quirks."""
    words = ["quirks", *([] if path is None else [str(path)]), "--json", str(at / "quirks.json")]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words)
    assert result.exit_code == 0, result.output
    content = json.loads((at / "quirks.json").read_text())
    for quirk in content["quirks"]:
        assert quirk["name"][:12] in result.output
    return content


def names(content: dict) -> set[str]:
    return {quirk["name"] for quirk in content["quirks"]}


def test_quirks_lists_complete_catalog(tmp_path: Path) -> None:
    content = listed(None, tmp_path)
    assert [quirk["name"] for quirk in content["quirks"]] == [quirk.name for quirk in CATALOG]
    assert content["architecture"] is None
    for quirk in content["quirks"]:
        assert all(quirk[key] for key in ("where", "symptom", "handling", "code", "off", "expiry"))


def test_quirks_of_checkpoint(llama_checkpoint: Path, tmp_path: Path) -> None:
    content = listed(llama_checkpoint, tmp_path)
    assert content["architecture"] == "LlamaForCausalLM"
    assert {"fp32-masters", "packed-documents"} <= names(content)
    assert not names(content) & {"token-types", "routing-flips", "engine-dummy-buffers", "tied-weights-under-tp"}


@pytest.mark.parametrize("file", ["config.json", ""])
def test_quirks_of_config_file(file: str, tmp_path: Path) -> None:
    FamilyCase(registry.model_class("Gemma3ForConditionalGeneration")).config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"architectures": ["Gemma3ForConditionalGeneration"]}))
    quirk_names = names(listed(tmp_path / file, tmp_path))
    assert {"token-types", "engine-dummy-buffers", "engine-tokenizer"} <= quirk_names
    assert not quirk_names & {"shared-kv-without-cache", "mrope-stale-offsets"}


@pytest.mark.parametrize(("layers", "concerned"), [(0, False), (1, True)])
def test_quirks_depend_on_config_values(layers: int, concerned: bool, tmp_path: Path) -> None:
    config = FamilyCase(registry.model_class("Gemma3nForCausalLM")).config
    config.num_kv_shared_layers = layers
    config.architectures = ["Gemma3nForCausalLM"]
    config.save_pretrained(tmp_path)
    assert ("shared-kv-reentrant-checkpointing" in names(listed(tmp_path, tmp_path))) is concerned


def test_missing_config_exits_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quirks", str(tmp_path / "nothing")])
    assert result.exit_code == 2


def test_family_page_lists_quirks_with_expiry() -> None:
    names = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    lines = page_lines({name: class_subject(registry.model_class(name)) for name in names})
    (types,) = [line for line in lines if line.startswith("- [token-types](../quirks.md#token-types)")]
    assert "(Gemma3ForConditionalGeneration):" in types
    assert types.endswith(
        "A test checks that this quirk still exists: transformers computes a batch with images differently if token "
        "types are missing."
    )
    assert any(
        line.startswith("- [engine-dummy-buffers](../quirks.md#engine-dummy-buffers): ")
        and "Fixed in vllm>=0.9.2" in line
        for line in lines
    )
    assert not any("fp32-masters" in line for line in lines)
    plain = page_lines({"LlamaForCausalLM": class_subject(registry.model_class("LlamaForCausalLM"))})
    assert plain == []
