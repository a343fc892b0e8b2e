"""The committed coverage pages are those of the committed results, and the results are of what is registered."""

import json
from pathlib import Path

import pytest
from families import test_families

from nrl_models import registry
from nrl_models.common.config.ledger import DEFAULT_ONLY, INERT, Ledger, Ledgers, recorded
from nrl_models.devtools import coverage
from nrl_models.devtools.coverage import CoverageError, mutants_section, mutants_summary, verdict, write_pages
from nrl_models.devtools.mutants.campaign import Outcome
from nrl_models.testing.features import FEATURES, generated_tests

DOCS = Path(__file__).parents[3] / "docs" / "model-coverage"


@pytest.mark.usefixtures("every_family")
def test_pages_are_up_to_date(tmp_path: Path) -> None:
    pages = write_pages(DOCS / "results.json", tmp_path)
    assert {page.name for page in pages} == {path.name for path in DOCS.glob("*.md")}
    for page in pages:
        assert page.read_text() == (DOCS / page.name).read_text(), f"{page.name} is stale: run nrl-models dev coverage"


def test_every_architecture_passed_every_test() -> None:
    results = json.loads((DOCS / "results.json").read_text())["results"]
    assert {result["architecture"] for result in results} == {
        name for names in registry.FAMILIES.values() for name in names
    }
    assert [result for result in results if result["outcome"] == "failed"] == []


def test_every_generated_test_proves_a_feature_and_every_feature_has_a_test() -> None:
    assert set(generated_tests()) == {name for name in vars(test_families) if name.startswith("test_")}
    assert set(generated_tests().values()) == set(FEATURES)


def test_the_worst_outcome_is_the_verdict() -> None:
    results = [
        {"check": "test_packing[None]", "outcome": "passed"},
        {"check": "test_packing[ones]", "outcome": "failed"},
        {"check": "test_left_padding", "outcome": "skipped"},
        {"check": "test_attention_equivalence[float32]", "outcome": "passed"},
        {"check": "test_mlp_equivalence[float32]", "outcome": "limited"},
        {"check": "test_greedy_generation", "outcome": "passed"},
    ]
    assert verdict(results, "packed sequences") == "no"
    assert verdict(results, "left padding") == "n/a"
    assert verdict(results, "layers") == "limited"
    assert verdict(results, "generate") == "yes"


def test_survivors_of_the_mutation_run_are_listed() -> None:
    outcomes = {"LlamaForCausalLM": Outcome({"bias dropped": "test_lora"}, ["never tied"], ["no cache"])}
    section = mutants_section(["LlamaForCausalLM", "LlamaForTokenClassification"], outcomes)
    assert "- LlamaForCausalLM: 1 of 2; survived: never tied\n" in section
    assert "- LlamaForTokenClassification: not tried\n" in section
    assert "found 1. Survivors: LlamaForCausalLM (never tied)." in mutants_summary(outcomes)[0]
    assert (mutants_section(["LlamaForCausalLM"], {}), mutants_summary({})) == ("", [])


def test_an_untested_architecture_is_an_error(tmp_path: Path) -> None:
    content = json.loads((DOCS / "results.json").read_text())
    content["results"] = [one for one in content["results"] if one["architecture"] != "Qwen3ForCausalLM"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(CoverageError, match="Qwen3ForCausalLM"):
        write_pages(tmp_path / "results.json", tmp_path)
    assert not list(tmp_path.glob("*.md"))


@pytest.mark.usefixtures("every_family")
def test_what_needs_a_missing_package_is_not_tested_and_says_so(tmp_path: Path) -> None:
    # No class of these can be imported there, so the pages have to do without.
    missing = {"Phi3ForTokenClassification", *registry.FAMILIES["mixtral"]}
    content = json.loads((DOCS / "results.json").read_text())
    ran = {result["architecture"] for result in content["results"] if result["outcome"] != "skipped"}
    already = {name for names in registry.FAMILIES.values() for name in names} - ran
    for result in content["results"]:
        if (name := result["architecture"]) in missing:
            result |= {"outcome": "skipped", "reason": f"Skipped: {name} needs aeons, which is not installed"}
    (tmp_path / "results.json").write_text(json.dumps(content))
    write_pages(tmp_path / "results.json", tmp_path)
    section = (tmp_path / "index.md").read_text().partition("\n## not tested\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| [")]
    assert {row.split(" | ")[1] for row in rows} == missing | already
    assert all(row.endswith("| 0 |") for row in rows)
    reason = "- not tested: {} needs aeons, which is not installed"
    assert reason.format("Phi3ForTokenClassification") in (tmp_path / "phi3.md").read_text()
    mixtral = (tmp_path / "mixtral.md").read_text()
    assert all(reason.format(name) in mixtral for name in registry.FAMILIES["mixtral"])


@pytest.mark.usefixtures("every_family")
def test_a_page_says_what_the_keys_of_the_configuration_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger({"a": "shapes", "b": "training", "c": INERT, "d": DEFAULT_ONLY}, {"d": False})
    of = {**recorded().of, "Phi3ForCausalLM": ledger}
    of.pop("MixtralForCausalLM")
    monkeypatch.setattr(coverage, "recorded", lambda: Ledgers("5", of))
    write_pages(DOCS / "results.json", tmp_path)
    page = (tmp_path / "phi3.md").read_text()
    assert "| architecture | keys | consumed | inert | default only |" in page
    assert "| Phi3ForCausalLM | 4 | 2 | 1 | 1 |" in page
    assert "Supported at their default only: `d=False`" in page
    assert "| MixtralForCausalLM | " not in (tmp_path / "mixtral.md").read_text().partition("## Configuration keys")[2]
