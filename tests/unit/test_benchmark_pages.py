"""The pages of the benchmarks: one conclusion each, computed from the recorded figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import conclusions, run
from benchmarks.plots import PLOTS, draw


def test_pages_match_recorded_figures() -> None:
    for path, text in run.pages(run.recorded()).items():
        assert path.read_text() == text, "run python -m benchmarks.run --pages"
        assert len(text.splitlines()) <= 200


def test_conclusions_match_figures() -> None:
    rows = [
        {"checkpoint": "dense, 1 GB", "ours / transformers": 1.25},
        {"checkpoint": "Mixtral, 1 GB", "ours / transformers": 0.25},
        {"checkpoint": "Qwen3-MoE, 1 GB", "ours / transformers": 0.2},
    ]
    assert conclusions.load(rows) == "MoE checkpoints load in 20 to 25 % of transformers' time, dense ones in 125 %."
    steps = [
        {"way": "transformers", "time, ratio": 1.0, "memory, ratio": 1.0},
        {"way": "ours, packed", "time, ratio": 0.5, "memory, ratio": 2.0},
        {"way": "ours, packed", "time, ratio": 0.25, "memory, ratio": 1.5},
    ]
    assert conclusions.rl_step(steps).endswith(
        "`rollout_logprobs` takes 25 to 50 % of the time and 1.50 to 2.00 times the memory."
    )


def test_watch_conclusion_reports_share_of_step_time() -> None:
    rows = [
        {"step": "no watch", "ratio": 1.0, "in watch, %": 0.0},
        {"step": "watch", "ratio": 0.95, "in watch, %": 0.44},
        {"step": "watch, digests and probes", "ratio": 1.1, "in watch, %": 7.4},
    ]
    assert conclusions.watch(rows) == (
        "`nrl_models.watch` takes 0.4 % of a step's CPU time without probes, and 7.4 % with them."
    )


def test_every_benchmark_has_a_conclusion() -> None:
    assert conclusions.CONCLUSIONS.keys() == set(run.BENCHMARKS)


def test_plots_show_costs_with_a_title(tmp_path: Path) -> None:
    """Relative speeds are inverted, so that lower is better in every plot."""
    rows = [
        {
            "dtype": "float32",
            "combined / transformers": 4.0,
            "separate / transformers": 2.0,
            "transformers again / transformers": 1.0,
        }
    ]
    draw(PLOTS["decode"], "Decodes faster.", rows, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert ">0.25</text>" in text
    assert ">0.50</text>" in text
    assert ">4.00</text>" not in text
    assert "Decodes faster." in text
    assert "lower is better" in text
