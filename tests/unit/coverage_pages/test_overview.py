"""The overview: one row per architecture, and filters."""

from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools.coverage_pages.__main__ import app
from tools.coverage_pages.generated_tests import GeneratedTests
from tools.coverage_pages.overview import OverviewError, Row, chosen, limits_table, overview_table
from tools.coverage_pages.results import Kind, Record, write_record

ROWS = [
    Row("nova", "NovaForCausalLM", "nova", ("dense",), {"generate": "yes", "TP": "yes"}, 3),
    Row("nova", "NovaForTokenClassification", "nova", ("dense",), {"generate": "n/a", "TP": "yes"}, 2),
    Row("pulsar", "PulsarForCausalLM", "pulsar_vl", ("moe", "vlm"), {"generate": "yes", "TP": "raises"}, 4),
    Row("quasar", "QuasarForCausalLM", "", (), {}, 0),
]  # fmt: skip


def names(rows: list[Row]) -> list[str]:
    return [row.architecture for row in rows]


def test_overview_lists_trainers_and_limits_of_each_architecture() -> None:
    rows = [*ROWS, Row("nova", "NovaLMHeadModel", "nova", ("dense",), {"logits": "limited", "LoRA": "fails"}, 1)]
    lines = overview_table(rows, ["TP"])
    assert lines[0] == "| architecture | model type | kind | trains with | tests passed |"
    assert lines[2:] == [
        "| [NovaForCausalLM](nova.md) | nova | dense | TP | 3 |",
        "| [NovaForTokenClassification](nova.md) | nova | dense | TP | 2 |",
        "| [PulsarForCausalLM](pulsar.md) | pulsar_vl | moe, vlm |  | 4 |",
        "| [QuasarForCausalLM](quasar.md) |  | not tested | not tested | 0 |",
        "| [NovaLMHeadModel](nova.md) | nova | dense | not tested | 1 |",
    ]
    assert limits_table(rows)[4:-1] == [
        "| logits | limited | [NovaLMHeadModel](nova.md) |",
        "| LoRA | fails | [NovaLMHeadModel](nova.md) |",
    ]
    assert limits_table(ROWS) == []


@pytest.mark.parametrize(
    ("kinds", "features", "expected"),
    [
        (["dense"], [], ["NovaForCausalLM", "NovaForTokenClassification"]),
        (["vlm", "moe"], [], ["PulsarForCausalLM"]),
        (["dense", "moe"], [], []),
        ([], ["generate"], ["NovaForCausalLM", "PulsarForCausalLM"]),
        ([], ["generate", "tp"], ["NovaForCausalLM"]),
        ([], ["TP=raises"], ["PulsarForCausalLM"]),
    ],
)
def test_filter_by_kinds_and_features(kinds: list[str], features: list[str], expected: list[str]) -> None:
    assert names(chosen(ROWS, kinds, features)[0]) == expected


def test_unknown_filters_raise_with_alternatives() -> None:
    with pytest.raises(OverviewError) as caught:
        chosen(ROWS, ["dens"], ["generation", "tp=maybe"])
    assert "no kind 'dens': there are dense, moe, vlm" in str(caught.value)
    assert "no feature 'generation': there are generate, TP" in str(caught.value)
    assert "no verdict 'maybe': there are n/a, raises, yes" in str(caught.value)


def test_filter_command_prints_rows_and_writes_nothing(tmp_path: Path) -> None:
    for name, features in (("LlamaForCausalLM", ["generate"]), ("LlamaForTokenClassification", ["LoRA"])):
        tests = GeneratedTests("llama", ["dense"], 3, {"yes": features}, {}, {})
        write_record(tmp_path, Kind.TESTS, name, Record({}, asdict(tests)))
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--kind", "dense", "--feature", "generate"])
    assert result.exit_code == 0, result.output
    assert "1 architecture" in result.output
    assert "LlamaForCausalLM" in result.output
    assert "LlamaForTokenClassification" not in result.output
    assert sorted(tmp_path.rglob("*")) == before
