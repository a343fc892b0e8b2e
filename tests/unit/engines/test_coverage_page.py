"""The pages of engine coverage: failures first, with the facts of their verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import coverage_page
from tools.coverage_pages.results import Record

VERDICT = (
    "token_mult_prob_error 2.01992 against decode, above 1.0001; At fault: engine decode and engine prefill, "
    "computing as if `sliding_window` were 9 and not 8. First divergence: between model.layers.0.q and "
    "model.layers.0.o, off by 4.1e-01 of its scale; no module computes what lies between."
)


def outcome(status: str, reason: str = "", refitted: float | None = None, **more: object) -> Record:
    return Record({"engine": "1"}, {"status": status, "reason": reason, "refitted": refitted, "stepped": None, **more})


RECORDS = {
    "AForCausalLM": outcome("agrees", refitted=1.000002),
    "BForCausalLM": outcome("not run", "no tiny model: B, which needs transformers>=9; 5 is installed"),
    "CForCausalLM": outcome("disagrees", VERDICT, 2.02, transformers={"status": "agrees", "loaded": 1.0}),
    "DForCausalLM": outcome("not run", "EngineError: vLLM failed: AssertionError; from files: vLLM failed"),
}


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    page = tmp_path / "engine-coverage.md"
    page.write_text("# x\n\n## MLX\n\nkept\n")
    monkeypatch.setattr(coverage_page, "PAGE", page)
    found = coverage_page.pages_with(
        "vLLM", ["How."], RECORDS, [*RECORDS, "EForCausalLM"], causes={"CForCausalLM": "known."}
    )
    coverage_page.write_pages(found)
    return {path.name: path.read_text() for path in found}


def test_summary_has_counts_and_failures_but_not_agreeing_architectures(pages: dict[str, str]) -> None:
    summary = pages["engine-coverage.md"]
    assert "- 1 agree, after both refits\n- 1 disagree" in summary
    assert "- 2 cannot be run here: the engine fails for 1, 1 have no tiny model" in summary
    assert "- not tried yet: EForCausalLM" in summary
    assert "AForCausalLM" not in summary
    assert summary.index("## vLLM") < summary.index("CForCausalLM") < summary.index("BForCausalLM")
    assert summary.endswith("## MLX\n\nkept\n")


def test_summary_states_the_facts_of_a_verdict(pages: dict[str, str]) -> None:
    (row,) = [line for line in pages["engine-coverage.md"].splitlines() if line.startswith("| CForCausalLM")]
    assert row == (
        "| CForCausalLM | 2.0200 | It computes as if `sliding_window` were 9 and not 8. First difference between "
        "`model.layers.0.q` and `model.layers.0.o`. Known. **Agrees with `model_impl=transformers`.** |"
    )
    assert "| BForCausalLM | Needs transformers>=9 |" in pages["engine-coverage.md"]
    assert "| DForCausalLM | vLLM failed: AssertionError |" in pages["engine-coverage.md"]


def test_engine_page_has_every_result(pages: dict[str, str]) -> None:
    page = pages["vllm.md"]
    assert "| AForCausalLM | 1.0000020 |  |  |" in page
    assert (
        "- **CForCausalLM** (disagrees, refitted 2.0200): With `model_impl=transformers`: agrees, 1.0000000. token_mult"
        in page
    )
    assert page.index("CForCausalLM") < page.index("BForCausalLM") < page.index("AForCausalLM")


def test_published_pages_are_short() -> None:
    folder = Path(__file__).parents[3] / "docs"
    for path in [folder / "engine-coverage.md", *(folder / "engine-coverage").glob("*.md")]:
        assert len(path.read_text().splitlines()) <= 200
