"""The overview: a table a kind, and the rows that a reader asks for."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.devtools import overview
from nrl_models.devtools.overview import OverviewError, Row, chosen, sections

ROWS = [
    Row("nova", "NovaForCausalLM", "nova", ("dense",), {"generate": "yes", "TP": "yes"}, 3),
    Row("nova", "NovaForTokenClassification", "nova", ("dense",), {"generate": "n/a", "TP": "yes"}, 2),
    Row("pulsar", "PulsarForCausalLM", "pulsar_vl", ("moe", "vlm"), {"generate": "yes", "TP": "refused"}, 4),
    Row("quasar", "QuasarForCausalLM", "", (), {}, 0),
]  # fmt: skip


def names(rows: list[Row]) -> list[str]:
    return [row.architecture for row in rows]


def test_each_architecture_is_in_the_table_of_its_kind() -> None:
    text = "\n".join(sections(ROWS, ["generate", "TP"]))
    assert "- [moe, vlm](#moe-vlm): 1\n" in text
    before, _, after = text.partition("\n## moe, vlm\n")
    assert "| [nova](nova.md) | NovaForTokenClassification | nova | n/a | yes | 2 |" in before.partition("## dense")[2]
    assert "| [pulsar](pulsar.md) | PulsarForCausalLM | pulsar_vl | yes | refused | 4 |" in after
    assert "| [quasar](quasar.md) | QuasarForCausalLM |" in after.partition("\n## not tested\n")[2]


@pytest.mark.parametrize(
    ("kinds", "features", "found"),
    [
        (["dense"], [], ["NovaForCausalLM", "NovaForTokenClassification"]),
        (["vlm", "moe"], [], ["PulsarForCausalLM"]),
        (["dense", "moe"], [], []),
        ([], ["generate"], ["NovaForCausalLM", "PulsarForCausalLM"]),
        ([], ["generate", "tp"], ["NovaForCausalLM"]),
        ([], ["TP=refused"], ["PulsarForCausalLM"]),
    ],
)
def test_rows_are_chosen_that_are_of_all_kinds_and_have_all_features(
    kinds: list[str], features: list[str], found: list[str]
) -> None:
    assert names(chosen(ROWS, kinds, features)[0]) == found


def test_what_no_row_knows_is_refused_with_what_there_is() -> None:
    with pytest.raises(OverviewError) as caught:
        chosen(ROWS, ["dens"], ["generation", "tp=maybe"])
    assert "no kind 'dens': there are dense, moe, vlm" in str(caught.value)
    assert "no feature 'generation': there are generate, TP" in str(caught.value)
    assert "no verdict 'maybe': there are n/a, refused, yes" in str(caught.value)


def test_the_command_prints_what_is_asked_for_and_writes_nothing(tmp_path: Path) -> None:
    overview.write(ROWS, tmp_path / overview.FILE)
    assert overview.read(tmp_path / overview.FILE) == ROWS
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(
        app, ["dev", "coverage", "--out", str(tmp_path), "--kind", "dense", "--feature", "generate"]
    )
    assert result.exit_code == 0, result.output
    assert "1 architecture" in result.output
    assert "NovaForCausalLM" in result.output
    assert "NovaForTokenClassification" not in result.output
    assert sorted(tmp_path.iterdir()) == before


def test_without_an_overview_the_command_says_what_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["dev", "coverage", "--out", str(tmp_path), "--kind", "dense"])
    assert result.exit_code == 2
    assert "run nrl-models dev coverage" in " ".join(result.output.split())
