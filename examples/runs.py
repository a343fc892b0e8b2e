"""The record of a GRPO run, and a table and a plot of several runs.

python examples/runs.py docs/rl-run/*.json --page docs/rl-run.md --plot docs/assets/rl-run.svg
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import arithmetic

BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
"""The lines of a page between which the table stands."""

ERROR = "token_mult_prob_error"

RESAMPLES = 10_000


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that the loop and TRL's trainer share."""
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=4, help="in a step")
    parser.add_argument("--group", type=int, default=8, help="completions to each question")
    parser.add_argument("--new-tokens", type=int, default=20, help="of a completion at most")
    parser.add_argument("--learning-rate", type=float, default=3e-5, help="of the first step; it falls to zero")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", type=Path, help="write the metrics of each step to this file, as JSON")


class History:
    """The results of a run so far, written to the `--history` file after each step.

    Attributes:
        content: `trainer`, `settings`, `steps` and `evaluations` (each with its `step`), `seconds`, `cpu_seconds`.
    """

    def __init__(self, trainer: str, options: argparse.Namespace) -> None:
        self.file: Path | None = options.history
        left_out = ("history", "out", "checkpoint")
        settings = {name: value for name, value in vars(options).items() if name not in left_out}
        self.content: dict[str, Any] = {
            "trainer": trainer,
            "checkpoint": Path(options.checkpoint).name,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "settings": settings,
            "steps": [],
            "evaluations": [],
        }
        self.started, self.used = time.perf_counter(), time.process_time()

    def stepped(self, found: dict[str, float]) -> None:
        """Add a step."""
        self._add("steps", {"step": len(self.content["steps"])} | found)

    def evaluated(self, found: dict[str, Any]) -> None:
        """Add an evaluation, after the steps so far."""
        self._add("evaluations", {"step": len(self.content["steps"])} | found)

    def _add(self, what: str, entry: dict[str, Any]) -> None:
        self.content[what].append(entry)
        self.content["seconds"] = time.perf_counter() - self.started
        self.content["cpu_seconds"] = time.process_time() - self.used
        shown = {name: value for name, value in entry.items() if not isinstance(value, list)}
        print(what, "  ".join(f"{name} {value:.7g}" for name, value in shown.items()), flush=True)
        if self.file is not None:
            self.file.write_text(json.dumps(self.content, indent=1) + "\n")


def gain(before: list[float], after: list[float], alike: Sequence[Hashable]) -> tuple[float, float, float]:
    """Return how much a reward rose on the same questions: the mean, and a 95 % bootstrap interval.

    Args:
        before, after: The reward of each question.
        alike: Questions with the same value here are resampled together, because their rewards are correlated.
    """
    clusters: dict[Hashable, list[float]] = {}
    for name, first, second in zip(alike, before, after, strict=True):
        clusters.setdefault(name, []).append(second - first)
    generator, drawn = random.Random(0), list(clusters.values())
    means = []
    for _ in range(RESAMPLES):
        sample = generator.choices(drawn, k=len(drawn))
        means.append(sum(map(sum, sample)) / sum(map(len, sample)))
    means.sort()
    mean = statistics.fmean(second - first for first, second in zip(before, after, strict=True))
    return mean, means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each run."""
    lines = [
        "| trainer | seed | steps | reward before | reward after | increase, 95 % interval | correct before "
        "| correct after | token_mult_prob_error, range | minutes | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    sums = [frozenset((question.first, question.second)) for question in arithmetic.questions()[1]]
    for run in runs:
        first, last = run["evaluations"][0], run["evaluations"][-1]
        mean, low, high = gain(first["rewards"], last["rewards"], sums)
        errors = [entry[ERROR] for entry in run["steps"] + run["evaluations"] if ERROR in entry]
        cells = [
            run["trainer"],
            run["settings"]["seed"],
            len(run["steps"]),
            f"{first['reward']:.3f} ± {first['standard_error']:.3f}",
            f"{last['reward']:.3f} ± {last['standard_error']:.3f}",
            f"{mean:+.3f} ({low:+.3f} to {high:+.3f})",
            f"{first['right']:.0%}",
            f"{last['right']:.0%}",
            f"{min(errors):.7f} to {max(errors):.7f}" if errors else "n/a",
            f"{run['seconds'] / 60:.0f}",
            f"{run['cpu_seconds'] / 60:.0f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """Plot the reward of each step and each evaluation, and below it the error between engine and trainer."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    gray = "#808080"  # visible on both white and black
    style = {"svg.hashsalt": "runs", "svg.fonttype": "none", "text.color": gray, "axes.labelcolor": gray}
    style |= {"xtick.color": gray, "ytick.color": gray, "axes.edgecolor": gray, "legend.frameon": False}
    with plt.rc_context(style):
        figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
        for run, color in zip(runs, ("#4c8bf5", "#e8813a", "#2fa36b", "#b05cc8"), strict=False):
            name = f"{run['trainer']}, seed {run['settings']['seed']}"
            steps, held_out = run["steps"], run["evaluations"]
            above.plot([step["step"] for step in steps], [step["reward"] for step in steps], color=color, alpha=0.35)
            above.errorbar(
                [found["step"] for found in held_out], [found["reward"] for found in held_out],
                [1.96 * found["standard_error"] for found in held_out],
                color=color, marker="o", capsize=3, label=name,
            )  # fmt: skip
            errors = [(step["step"], step[ERROR] - 1) for step in steps if ERROR in step]
            if errors:
                below.plot(*zip(*errors, strict=True), color=color)
        above.set_ylabel("reward")
        above.legend(loc="upper left")
        below.set_ylabel("token_mult_\nprob_error - 1")
        below.set_yscale("log")
        below.axhline(1e-4, color=gray, linestyle="--")
        below.set_xlabel("steps")
        below.xaxis.get_major_locator().set_params(integer=True)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Write the table into a page, and the plot to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("histories", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, help="replace the table in this Markdown file; printed by default")
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    options = parser.parse_args(arguments)
    runs = [json.loads(file.read_text()) for file in options.histories]
    if options.plot is not None:
        plot(runs, options.plot)
    if options.page is None:
        print(table(runs))
        return
    text = options.page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{options.page} has no lines {BEGIN} and {END}, between which the table goes")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    options.page.write_text(f"{text[:start]}\n\n{table(runs)}\n\n{text[end:]}")


if __name__ == "__main__":
    main()
