"""A consistency report as a self-contained HTML page: table, plots, and the worst sequences with their tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.consistency.consistency_report import CELL, ConsistencyReport, described, settings_text
from nrl_models.consistency.measure import Comparison, Measurement, order_by_error
from nrl_models.logprobs.metrics import shown_error, token_mult_prob_error
from nrl_models.parity.worst import last_if_nan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 20_000
"""Maximum number of points in a scatter plot. Beyond that, every n-th point is drawn."""

WORST_SEQUENCES = 2
CONTEXT_TOKENS = 24
"""Number of the prompt's last tokens that are shown before the generated tokens."""

FIGURE_INCHES, DOTS_PER_INCH = (4.6, 3.4), 160
"""Size of a plot. Its text remains legible on a phone."""

FULL_RED = 0.6
"""Opacity of the red background of a token whose probability differs by at least the threshold's factor."""

HOW_TO_READ = (
    "The first plot shows the error by position, and the noise floor: a model in the lower of the two precisions, "
    "compared with itself under other roundings. An error that grows with the position suggests wrong positions or a "
    "wrong cache. An error from the first token on suggests wrong weights or a wrong head. The second plot shows the "
    "log-probability of each token, trainer against engine. Points on the line agree."
)
"""Explanation of the plots, for a page."""


def write_html(report: ConsistencyReport, file: Path, tokenizer: Any | None = None, command: str = "") -> None:
    """Write a report as a self-contained HTML page.

    Args:
        report: The matrix.
        file: File to write.
        tokenizer: Tokenizer to show tokens as text. Without it, token ids are shown.
        command: The command that created the report, for display.

    Without matplotlib, the page has no plots, and explains how to install it.
    """
    full_red = max(log(report.settings.threshold), 1e-9)
    sections = []
    for result in report.results:
        worst = max(
            result.repeats, key=lambda repeat: last_if_nan(repeat.metrics[Comparison.DECODE].token_mult_prob_error)
        )
        plots = plots_of(result.repeats, str(report.engine.get("engine")))
        sections.append((result, plots, _sequences(worst, tokenizer, full_red)))
    write_page(
        file,
        "nrl_models.consistency",
        report=report,
        header=(*CELL, *report.columns, "verdict"),
        rows=list(report.rows()),
        name=Path(report.path).name,
        engine=described(report.engine),
        trainer=settings_text(report.trainer),
        has_plots=has_plots(),
        how_to_read=HOW_TO_READ,
        sections=sections,
        full_red=full_red,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=", ".join(f"{name} {version(name)}" for name in ("nrl_models", "transformers", "torch")),
        command=command,
    )


def write_page(file: Path, package: str, **values: Any) -> None:
    """Write the template `report.html.jinja` of a package, filled with values.

    Args:
        file: File to write. Its directory is created.
        package: Full name of the package with the template.
        values: Variables of the template. Their text is escaped.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader(package, "."), autoescape=True, trim_blocks=True)
    text = environment.get_template("report.html.jinja").render(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)


def has_plots() -> bool:
    """Return whether matplotlib is installed, which draws the plots."""
    return find_spec("matplotlib") is not None


def plots_of(repeats: Sequence[Measurement], engine: str) -> list[tuple[str, str]]:
    """Plot log-probabilities of trainer and engine: the error by position, and both sides as a scatter plot.

    Args:
        repeats: Measurements of one cell.
        engine: Name of the engine, for the axis.

    Returns:
        Two plots, each as its alternative text and a PNG in base64. Empty without matplotlib.
    """
    if not has_plots():
        return []
    return [
        ("error by position", _error_by_position(repeats)),
        ("trainer against engine", _trainer_against_engine(repeats, engine)),
    ]


def _error_by_position(repeats: Sequence[Measurement]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    positions = torch.arange(repeats[0].decode.shape[1]) + repeats[0].prompt_length
    for name, color in (("decode", "tab:red"), ("prefill", "tab:blue")):
        scores = [(repeat.trainer, getattr(repeat, name)) for repeat in repeats]
        differences = [trainer - engine for trainer, engine in scores if engine is not None]
        if differences:
            mean, largest = _by_column(differences)
            axes.plot(positions, mean, color=color, linewidth=1.2, label=f"{name}, mean")
            if differences[0].shape[0] * len(differences) > 1:  # the two curves coincide for one sequence
                axes.plot(positions, largest, color=color, linewidth=0.6, alpha=0.5, label=f"{name}, largest")
    noise, _ = _by_column([rounded - unrounded for rounded, unrounded in (repeat.noise_sides for repeat in repeats)])
    axes.plot(positions, noise, color="0.5", linewidth=0.8, linestyle="--", label="noise floor, mean")
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the sequence")
    axes.set_ylabel("|trainer - engine|, nats")
    figure.legend(fontsize=8, ncols=2, loc="outside upper center", frameon=False)
    return _png(figure)


def _trainer_against_engine(repeats: Sequence[Measurement], engine: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    trainer = torch.cat([repeat.trainer.flatten() for repeat in repeats])
    decode = torch.cat([repeat.decode.flatten() for repeat in repeats])
    finite = trainer.isfinite() & decode.isfinite()
    step = max(1, int(finite.sum()) // MAX_POINTS)
    x, y = decode[finite][::step], trainer[finite][::step]
    axes.scatter(x, y, s=4, alpha=0.4, linewidths=0)
    if len(x):
        low = min(x.min().item(), y.min().item())
        axes.plot([low, 0], [low, 0], color="0.5", linewidth=0.8)
    axes.set_xlabel(f"log-probability, {engine} while sampling")
    axes.set_ylabel("log-probability, trainer")
    return _png(figure)


def _png(figure: Figure) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _by_column(differences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and largest absolute value of each column, ignoring non-finite values."""
    values = torch.cat(differences).abs()
    finite = values.isfinite()
    finite_values = torch.where(finite, values, 0.0)
    return finite_values.sum(0) / finite.sum(0).clamp(min=1), finite_values.amax(0)


def _sequences(
    worst: Measurement, tokenizer: Any | None, full_red: float
) -> Iterator[tuple[str, str, list[tuple[str, float, str]]]]:
    """Yield the sequences with the largest errors: title, end of the prompt, and text, redness and numbers per token.

    Args:
        worst: The measurement.
        tokenizer: Tokenizer to show tokens as text.
        full_red: Difference in nats from which a token is fully red.
    """
    for row in order_by_error(worst.trainer, worst.decode)[:WORST_SEQUENCES]:
        trainer, engine, ids = worst.trainer[row], worst.decode[row], worst.tokens[row].tolist()
        difference = (trainer - engine).abs()
        error, largest = token_mult_prob_error(trainer, engine), difference.nan_to_num(posinf=0.0).max().item()
        redness = (FULL_RED * (difference / full_red).clamp(max=1.0)).nan_to_num(nan=FULL_RED).tolist()
        prompt, generated = ids[: worst.prompt_length], ids[worst.prompt_length :]
        yield (
            f"sequence {row}: {shown_error(error)}, largest difference {largest:.1e} nats",
            "".join(_token(tokenizer, token) for token in prompt[-CONTEXT_TOKENS:]),
            [
                (
                    _token(tokenizer, token),
                    redness[index],
                    f"token {token}: trainer {trainer[index]:.6f}, engine {engine[index]:.6f}",
                )
                for index, token in enumerate(generated)
            ],
        )


def _token(tokenizer: Any | None, token: int) -> str:
    if tokenizer is None:
        return f"{token} "
    return tokenizer.decode([token]).replace("\n", "⏎\n") or "·"
