"""The report as a self-contained HTML page: the table, plots, and the worst sequences with their tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.consistency.consistency_report import CELL, CellResult, ConsistencyReport, described, last_if_nan
from nrl_models.consistency.measure import Comparison, Measurement, order_by_error
from nrl_models.errors import ConsistencyError
from nrl_models.logprobs.metrics import token_mult_prob_error

MAX_POINTS = 20_000
"""Points in a scatter plot; if there are more, every n-th is drawn."""

WORST_SEQUENCES = 2
CONTEXT_TOKENS = 24
"""Tokens of the prompt that are shown before the generated ones."""

FULL_RED = 0.6
"""Opacity of the red behind a token whose probability is off by the threshold's factor, or more."""


def require_matplotlib() -> None:
    """Raise unless plots can be drawn.

    Raises:
        ConsistencyError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConsistencyError("the HTML report has plots, which need matplotlib: pip install 'nrl_models[report]'")


def write_html(report: ConsistencyReport, file: Path, tokenizer: Any | None = None, command: str = "") -> None:
    """Write a report as one self-contained page.

    Args:
        report: the matrix.
        file: where to write it.
        tokenizer: to show tokens as text; without one, ids are shown.
        command: the command that made the report, to be shown.

    Raises:
        ConsistencyError: matplotlib is not installed.
    """
    require_matplotlib()
    from jinja2 import Environment, PackageLoader

    full_red = max(log(report.settings.threshold), 1e-9)
    sections = []
    for result in report.results:
        worst = max(
            result.repeats, key=lambda repeat: last_if_nan(repeat.metrics[Comparison.DECODE].token_mult_prob_error)
        )
        plots = _plots(result, str(report.engine.get("engine")))
        sections.append((result, plots, _sequences(worst, tokenizer, full_red)))
    environment = Environment(loader=PackageLoader("nrl_models.consistency", "."), autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html.jinja")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = page.render(
        report=report,
        header=(*CELL, *report.columns, "verdict"),
        rows=list(report.rows()),
        engine=described(report.engine),
        trainer=described(report.trainer),
        sections=sections,
        full_red=full_red,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=", ".join(f"{name} {version(name)}" for name in ("nrl_models", "transformers", "torch")),
        command=command,
    )
    write_whole(file, text)


def _plots(result: CellResult, engine: str) -> str:
    """Error by position, and trainer against engine, side by side: a PNG in base64."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    by_position, scatter = figure.subplots(1, 2)
    repeats = result.repeats
    positions = torch.arange(repeats[0].decode.shape[1]) + repeats[0].prompt_length
    for name, colour in (("decode", "tab:red"), ("prefill", "tab:blue")):
        scores = [(repeat.trainer, getattr(repeat, name)) for repeat in repeats]
        differences = [trainer - engine for trainer, engine in scores if engine is not None]
        if differences:
            mean, largest = _by_column(differences)
            by_position.plot(positions, mean, color=colour, linewidth=1.2, label=f"{name}, mean")
            by_position.plot(positions, largest, color=colour, linewidth=0.6, alpha=0.5, label=f"{name}, largest")
    noise, _ = _by_column([rounded - unrounded for rounded, unrounded in (repeat.noise_sides for repeat in repeats)])
    by_position.plot(positions, noise, color="0.5", linewidth=0.8, linestyle="--", label="noise floor, mean")
    by_position.set_yscale("symlog", linthresh=1e-7)
    by_position.set_ylim(bottom=0)
    by_position.set_xlabel("position in the sequence")
    by_position.set_ylabel("|trainer - engine|, nats")
    by_position.legend(fontsize=7, ncols=2)
    trainer = torch.cat([repeat.trainer.flatten() for repeat in repeats])
    decode = torch.cat([repeat.decode.flatten() for repeat in repeats])
    finite = trainer.isfinite() & decode.isfinite()
    step = max(1, int(finite.sum()) // MAX_POINTS)
    x, y = decode[finite][::step], trainer[finite][::step]
    scatter.scatter(x, y, s=4, alpha=0.4, linewidths=0)
    if len(x):
        low = min(x.min().item(), y.min().item())
        scatter.plot([low, 0], [low, 0], color="0.5", linewidth=0.8)
    scatter.set_xlabel(f"log-probability, {engine} as it sampled")
    scatter.set_ylabel("log-probability, trainer")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _by_column(differences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and largest absolute value of each column, of its finite values."""
    values = torch.cat(differences).abs()
    finite = values.isfinite()
    kept = torch.where(finite, values, 0.0)
    return kept.sum(0) / finite.sum(0).clamp(min=1), kept.amax(0)


def _sequences(
    worst: Measurement, tokenizer: Any | None, full_red: float
) -> Iterator[tuple[str, str, list[tuple[str, float, str]]]]:
    """The sequences with the largest errors: title, end of the prompt, and of each token text, redness and numbers.

    Args:
        worst: the measurement.
        tokenizer: to show tokens as text.
        full_red: the difference in nats from which on a token is fully red.
    """
    for row in order_by_error(worst.trainer, worst.decode)[:WORST_SEQUENCES]:
        trainer, engine, ids = worst.trainer[row], worst.decode[row], worst.tokens[row].tolist()
        difference = (trainer - engine).abs()
        largest = difference.nan_to_num(posinf=0.0).max().item()
        redness = (FULL_RED * (difference / full_red).clamp(max=1.0)).nan_to_num(nan=FULL_RED).tolist()
        prompt, generated = ids[: worst.prompt_length], ids[worst.prompt_length :]
        yield (
            f"sequence {row}: {token_mult_prob_error(trainer, engine):.7f}, largest difference {largest:.1e} nats",
            "".join(_token(tokenizer, token) for token in prompt[-CONTEXT_TOKENS:]),
            [
                (
                    _token(tokenizer, token),
                    redness[place],
                    f"token {token}: trainer {trainer[place]:.6f}, engine {engine[place]:.6f}",
                )
                for place, token in enumerate(generated)
            ],
        )


def _token(tokenizer: Any | None, token: int) -> str:
    if tokenizer is None:
        return f"{token} "
    return tokenizer.decode([token]).replace("\n", "⏎\n") or "·"
