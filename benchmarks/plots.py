"""Plots of the benchmarks' ratios, as SVG files that are readable on light and on dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.reporting import Row

GREY = "#808080"
"""For text and lines: it stands out from white and from black alike."""

COLOURS = ("#4c8bf5", "#e8813a", "#2fa36b")


@dataclass(frozen=True)
class Plot:
    """Bars for some ratios of a benchmark's rows.

    Args:
        labels: the columns whose values name a row.
        ratios: the columns that are drawn, one bar each.
        axis: what a ratio is of.
        caption: what the plot shows, in a sentence.
    """

    labels: tuple[str, ...]
    ratios: tuple[str, ...]
    axis: str
    caption: str


PLOTS = {
    "load": Plot(
        ("checkpoint",),
        ("transformers / ours", "with first forward, ours / transformers"),
        "ratio",
        "Loading alone: how many times longer transformers takes. With the first forward: our share of its time.",
    ),
    "many_keys": Plot(
        ("what",), ("ours / transformers",), "time / transformers'", "Left of the line, nrl_models is faster."
    ),
    "load_sharded": Plot(
        ("checkpoint", "mesh"),
        ("transformers' / ours",),
        "transformers' time / ours, with the first forward",
        "Right of the line, nrl_models is faster.",
    ),
    "save": Plot(
        ("what",),
        ("without waiting / peer", "waiting / peer"),
        "time / the peer's",
        "Left of the line, nrl_models is faster; the second bar includes waiting for the disk.",
    ),
    "combine": Plot(
        ("hidden size", "dtype"),
        ("decode 1 token", "prefill 512", "train 4 x 128"),
        "time combined / separate",
        "Left of the line, one matmul for several projections is faster.",
    ),
    "decode": Plot(
        ("dtype",),
        ("combined / transformers", "separate / transformers", "transformers again / transformers"),
        "speed / transformers'",
        "Right of the line, nrl_models decodes faster; the third bar shows how far two equal runs are apart.",
    ),
    "logprobs": Plot(
        ("way", "pass"),
        ("memory, ratio", "time, ratio"),
        "cost / that of full logits",
        "Left of the line, a way costs less than a log-softmax over all logits.",
    ),
    "refit": Plot(("way",), ("ratio",), "time / one copy of as much memory", "How close a refit is to a bare copy."),
    "train_step": Plot(
        ("shape", "model", "ranks"),
        ("time, ratio",),
        "time of a step / transformers' (under FSDP2: / separate projections)",
        "Left of the line, a step is faster than the one it is compared with.",
    ),
    "rl_step": Plot(
        ("shape", "rollouts", "way"),
        ("time, ratio", "memory, ratio"),
        "cost / that of transformers, a rollout at a time, padded as TRL does",
        "Left of the line, a way costs less. The bars of `again` show how far two equal ways are apart.",
    ),
}
"""What is drawn of each benchmark; one that is not here has only its table."""


def draw(plot: Plot, rows: list[Row], file: Path) -> None:
    """Draw `plot` of the rows that have its ratios."""
    drawn = [row for row in rows if all(isinstance(row[name], float) for name in plot.ratios)]
    labels = [", ".join(str(row[name]) for name in plot.labels).replace("`", "") for row in drawn]
    height = 0.8 / len(plot.ratios)
    style: dict[str, Any] = {
        "svg.hashsalt": file.name,  # the same file for the same figures
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(8, 1.1 + 0.28 * len(drawn) * max(1, len(plot.ratios) * 0.7)))
        for number, name in enumerate(plot.ratios):
            places = [row + height * (number - (len(plot.ratios) - 1) / 2) for row in range(len(drawn))]
            bars = axes.barh(places, [row[name] for row in drawn], height * 0.9, color=COLOURS[number], label=name)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(drawn)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(plot.axis, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if len(plot.ratios) > 1:
            figure.legend(loc="outside upper center", ncols=len(plot.ratios), frameon=False, fontsize=8)
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
