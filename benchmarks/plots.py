"""Plots of the benchmarks' ratios, as SVG files that are readable on light and dark pages.

Every bar is a cost relative to a peer: left of the dashed line, nrl_models costs less.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.reporting import Row

GRAY = "#808080"
"""Color of text and lines, visible on both white and black."""

COLORS = ("#4c8bf5", "#e8813a", "#2fa36b")

WIDTH = 6.5
"""Width in inches. Small, so that text is readable where the page is narrow."""


@dataclass(frozen=True)
class Plot:
    """Bars for ratios in the rows of a benchmark.

    Args:
        labels: Columns whose values label a row, and their formats.
        ratios: Columns to draw, one bar each, and their names in the legend.
        axis: Label of the axis.
        inverse: Columns that have the peer's cost above. Their inverse is drawn.
        only: Text that one of a row's labels contains. Other rows are not drawn. Empty: all.
    """

    labels: Mapping[str, str]
    ratios: Mapping[str, str]
    axis: str
    inverse: frozenset[str] = frozenset()
    only: str = ""


PLOTS = {
    "load": Plot(
        {"checkpoint": "{}"},
        {"ours / transformers": "load", "with first forward, ours / transformers": "load and first forward"},
        "time / transformers'",
    ),
    "many_keys": Plot({"what": "{}"}, {"ours / transformers": ""}, "CPU time / transformers'"),
    "load_sharded": Plot(
        {"checkpoint": "{}", "mesh": "{}"},
        {"with first forward, ours / transformers": ""},
        "time with the first forward / transformers'",
    ),
    "save": Plot(
        {"what": "{}"},
        {"without fsync / peer": "without fsync", "with fsync / peer": "with fsync"},
        "time / transformers' or torch.save's",
    ),
    "combine": Plot(
        {"hidden size": "width {}", "dtype": "{}"},
        {"decode 1 token": "decode 1 token", "prefill 512": "prefill 512", "train 4 x 128": "train 4 x 128"},
        "time of fused / separate projections",
    ),
    "decode": Plot(
        {"dtype": "{}"},
        {
            "combined / transformers": "fused",
            "separate / transformers": "separate",
            "transformers again / transformers": "transformers again (noise)",
        },
        "time / transformers'",
        inverse=frozenset(
            {"combined / transformers", "separate / transformers", "transformers again / transformers"},
        ),
    ),
    "logprobs": Plot(
        {"way": "{}", "pass": "{}"},
        {"memory, ratio": "memory", "time, ratio": "time"},
        "cost / that of full logits",
        only="nrl_models",
    ),
    "refit": Plot({"way": "{}"}, {"ratio": ""}, "time / one copy of as much memory", only="iter_export"),
    "refit_engine": Plot({"way": "{}"}, {"time / vLLM's reload": ""}, "time / vLLM's reload from memory"),
    "train_step": Plot(
        {"shape": "{}", "model": "{}", "ranks": "ranks: {}"},
        {"time, ratio": ""},
        "time / transformers' (under FSDP2: / separate projections)",
        only="combined",
    ),
    "rl_step": Plot(
        {"shape": "{}", "rollouts": "{} rollouts", "way": "{}"},
        {"time, ratio": "time", "memory, ratio": "memory"},
        "cost / that of transformers, padded as in TRL",
        only="ours",
    ),
}
"""The plot of each benchmark. Benchmarks without an entry have only a table."""


def draw(plot: Plot, title: str, rows: list[Row], file: Path) -> None:
    """Draw `plot` of the rows that have its ratios.

    Args:
        plot: The columns to draw, and their labels.
        title: The title, above the plot.
        rows: The rows of the benchmark.
        file: The SVG file to write.
    """
    drawn = [
        row
        for row in rows
        if all(isinstance(row[name], float) for name in plot.ratios)
        and any(plot.only in str(row[name]) for name in plot.labels)
    ]
    labels = [label(", ".join(form.format(row[name]) for name, form in plot.labels.items())) for row in drawn]
    height = 0.8 / len(plot.ratios)
    ratios = {name: [1 / row[name] if name in plot.inverse else row[name] for row in drawn] for name in plot.ratios}
    longest = max(value for values in ratios.values() for value in values)
    style = {
        "svg.hashsalt": file.name,  # identical figures give identical files
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    }
    with plt.rc_context(cast("Any", style)):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.6 + len(drawn) * (0.25 + 0.25 * len(plot.ratios))))
        for number, (name, legend) in enumerate(plot.ratios.items()):
            places = [row + height * (number - (len(plot.ratios) - 1) / 2) for row in range(len(drawn))]
            values = ratios[name]
            axes.barh(places, values, height * 0.9, color=COLORS[number], label=legend)
            for place, value in zip(places, values, strict=True):
                beside_line = 1 - 0.12 * longest < value < 1  # else the dashed line would cross the number
                at = (1.0 if beside_line else value, place)
                axes.annotate(f"{value:.2f}", at, (4, 0), textcoords="offset points", va="center", fontsize=10)
        axes.axvline(1.0, color=GRAY, linestyle="--", linewidth=1, zorder=0)
        axes.set_yticks(range(len(drawn)), labels, fontsize=10)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(f"{plot.axis}  (lower is better)", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(
            textwrap.fill(title.replace("`", ""), 60), loc="left", fontsize=11, pad=30 if len(plot.ratios) > 1 else 10
        )
        if len(plot.ratios) > 1:
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 1.0),
                bbox_transform=axes.transAxes,
                ncols=len(plot.ratios),
                frameon=False,
                fontsize=10,
                borderaxespad=0.3,
            )
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


def label(text: str) -> str:
    """Return a row's label in lines of up to 34 characters."""
    text = text.replace("`", "").replace("ours", "nrl_models").replace("combined", "fused")
    return textwrap.fill(text, 34)
