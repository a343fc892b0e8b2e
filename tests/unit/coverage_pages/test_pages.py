"""The committed coverage pages match the recorded outcomes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nrl_models import registry
from tools.checkout import PAGES
from tools.coverage_pages import pages as coverage
from tools.coverage_pages.__main__ import app
from tools.coverage_pages.errors import CoverageError
from tools.coverage_pages.pages import write_pages
from tools.coverage_pages.results import FOLDER, Kind, Record, read_records, write_record
from tools.ledger.ledger import KeyKind, Ledger, recorded
from tools.mutants import CATALOG
from tools.mutants.campaign import Outcome


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A copy of the recorded outcomes, without pages."""
    shutil.copytree(PAGES / FOLDER, tmp_path / FOLDER)
    return tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("every_family")
def test_pages_are_up_to_date(pages: Path) -> None:
    written = write_pages(pages)
    assert {page.name for page in written} == {path.name for path in PAGES.glob("*.md")}
    for page in written:
        assert page.read_text() == (PAGES / page.name).read_text(), f"{page.name} is stale"


def test_untested_architecture_raises(pages: Path) -> None:
    file = pages / FOLDER / "qwen3.json"
    content = json.loads(file.read_text())
    del content["Qwen3ForCausalLM"]
    file.write_text(json.dumps(content))
    with pytest.raises(CoverageError, match=r"run python -m tools\.coverage_pages Qwen3ForCausalLM"):
        write_pages(pages)
    assert not list(pages.glob("*.md"))


@pytest.fixture
def two_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the registry to two families."""
    families = {name: registry.FAMILIES[name] for name in ("mixtral", "phi3")}
    monkeypatch.setattr(registry, "FAMILIES", families)


@pytest.mark.usefixtures("two_families")
def test_command_records_results_and_writes_pages(pages: Path, tmp_path: Path) -> None:
    rows = [{"architecture": "MixtralForCausalLM", "check": "test_lora", "outcome": "passed", "reason": ""}]
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"versions": {"torch": "99"}, "results": rows}))
    result = CliRunner().invoke(app, ["--results", str(file), "--out", str(pages)])
    assert result.exit_code == 0, result.output
    assert "recorded the generated tests of 1 architectures" in result.output
    assert "wrote 3 pages" in result.output
    assert (
        "| [MixtralForCausalLM](mixtral.md) | mixtral | moe | FSDP2, TP, EP, compiled experts, PP, QLoRA | 1 |"
        in (pages / "index.md").read_text()
    )


@pytest.mark.usefixtures("two_families")
def test_page_lists_versions_of_outcomes(pages: Path) -> None:
    name = "Phi3ForCausalLM"
    before = read_records(pages)[Kind.TESTS][name]
    write_record(pages, Kind.TESTS, name, Record({**before.versions, "torch": "99"}, before.outcome))
    sharded = {"status": "agrees", "reason": ""}
    for other in registry.FAMILIES["phi3"]:
        write_record(pages, Kind.TP, other, Record({"torch": "98"}, sharded))
    write_pages(pages)
    page = (pages / "phi3.md").read_text()
    assert "torch 99" in page
    assert f"({name})" in page
    assert "TP with torch 98" in page
    index = (pages / "index.md").read_text()
    assert re.search(r"with torch [\w.+]+ and 98 and 99, transformers", index)


@pytest.mark.usefixtures("two_families")
def test_page_of_family_with_missing_package_is_kept(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pages / "mixtral.md"
    page.write_text("as it was")
    (pages / "gone.md").write_text("of a family that is gone")
    monkeypatch.setitem(registry._REQUIREMENTS, "MixtralForCausalLM", ("aeons>=1",))
    written = write_pages(pages)
    assert {path.name for path in written} == {"index.md", "phi3.md"}
    assert page.read_text() == "as it was"
    assert not (pages / "gone.md").exists()
    assert "[MixtralForCausalLM](mixtral.md)" in (pages / "index.md").read_text()


@pytest.mark.usefixtures("two_families")
def test_surviving_mutants_are_listed(pages: Path) -> None:
    first, second = (mutant.name for mutant in CATALOG[:2])
    outcome = Outcome({first: "test_lora"}, [second])
    write_record(pages, Kind.MUTANTS, "Phi3ForCausalLM", Record({"torch": "9"}, outcome.to_json()))
    write_pages(pages)
    assert f"- Phi3ForCausalLM: 1 of 2; survived: {second}\n" in (pages / "phi3.md").read_text()
    assert f"Survivors: Phi3ForCausalLM ({second})." in (pages / "index.md").read_text()


@pytest.mark.usefixtures("two_families")
def test_page_lists_config_keys(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"a": KeyKind.SHAPES, "b": KeyKind.TRAINING, "c": KeyKind.INERT, "d": KeyKind.DEFAULT_ONLY}
    ledgers = {**recorded(), "Phi3ForCausalLM": Ledger(kinds, {"d": False}, transformers="4.0")}
    ledgers.pop("MixtralForCausalLM")
    monkeypatch.setattr(coverage, "recorded", lambda: ledgers)
    write_pages(pages)
    page = (pages / "phi3.md").read_text()
    assert "| architecture | keys | consumed | inert | default only |" in page
    assert "| Phi3ForCausalLM | 4 | 2 | 1 | 1 |" in page
    assert "Supported at their default only: `d=False`" in page
    assert "4.0 (Phi3ForCausalLM)" in page
    assert "| MixtralForCausalLM | " not in (pages / "mixtral.md").read_text().partition("## Configuration keys")[2]


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"results": [1]}'])
def test_invalid_results_file_exits_2(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    result = CliRunner().invoke(app, ["--results", str(file), "--out", str(tmp_path / "pages")])
    assert result.exit_code == 2
    assert "results.json" in result.output.replace("\n", "")
    assert not (tmp_path / "pages").exists()
