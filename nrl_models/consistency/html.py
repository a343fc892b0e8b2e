"""The report as one HTML page that needs nothing else: the table, plots, and the worst sequences with their tokens."""

from __future__ import annotations

import base64
import io
import math
from html import escape
from pathlib import Path
from typing import Any

import torch

from nrl_models.consistency.measure import Measurement
from nrl_models.consistency.report import CellResult, ConsistencyReport
from nrl_models.errors import ConsistencyError
from nrl_models.logprobs.metrics import token_mult_prob_error

MAX_POINTS = 20_000
"""Points in a scatter plot; of more, so many are drawn at even distances."""

WORST_SEQUENCES = 2
CONTEXT_TOKENS = 24
"""Tokens of the prompt that are shown before the generated ones."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right; }
th { background: #f2f2f2; } td.text { text-align: left; }
.pass { color: #17692b; } .fail { color: #b00020; font-weight: 600; }
.judgement { border-left: 4px solid #b00020; background: #fdf1f2; padding: .5rem 1rem; }
.tokens { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; }
.tokens span { padding: 2px 0; border-radius: 3px; } .prompt { color: #888; }
img { max-width: 100%; } details > summary { cursor: pointer; }
"""


def require_matplotlib() -> None:
    """Raise unless plots can be drawn.

    Raises:
        ConsistencyError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConsistencyError(
            "the HTML report has plots, which need matplotlib: pip install 'nrl_models[report]'"
        ) from error


def write_html(report: ConsistencyReport, file: Path, tokenizer: Any | None = None) -> None:
    """Write a report as one self-contained page.

    Args:
        report: the matrix.
        file: where to.
        tokenizer: to show tokens as text; ids are shown without.

    Raises:
        ConsistencyError: matplotlib is not installed.
    """
    require_matplotlib()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(report, tokenizer), encoding="utf-8")


def page(report: ConsistencyReport, tokenizer: Any | None) -> str:
    """The page's text."""
    title = escape(report.title)
    described = "".join(
        f"<p>{name}: {escape(', '.join(f'{key} {value}' for key, value in about.items()))}</p>"
        for name, about in (("Engine", report.engine), ("Trainer", report.trainer))
    )
    sections = "".join(_section(report, result, tokenizer) for result in report.results)
    early = f'<p class="fail">The run ended early: {escape(report.error)}</p>' if report.error else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>Verdict: {_verdict(report.verdict == 'pass', report.verdict)}, threshold {report.settings.threshold:g}. "
        "Numbers are <code>token_mult_prob_error</code>, 1 if trainer and engine agree; the largest difference is in "
        f"nats.</p>{early}{_table(report)}{described}{sections}</body></html>"
    )


def _verdict(passed: bool, word: str) -> str:
    return f'<span class="{"pass" if passed else "fail"}">{escape(word)}</span>'


def _table(report: ConsistencyReport) -> str:
    header = "".join(
        f"<th>{escape(name)}</th>" for name in ("length", "data", "mode", "batch", *report.columns, "verdict")
    )
    rows = []
    for result in report.results:
        cell = result.cell
        columns = [f"{cell.length:,}", cell.data, cell.mode, str(cell.batch), *report.numbers(result)]
        shown = "".join(f"<td>{escape(column)}</td>" for column in columns)
        link = f'<a href="#{cell.key}">{_verdict(result.passed, "pass" if result.passed else "FAIL")}</a>'
        rows.append(f'<tr>{shown}<td class="text">{link}</td></tr>')
    for cell, reason in report.skipped.items():
        blank = "<td></td>" * len(report.columns)
        rows.append(
            f"<tr><td>{cell.length:,}</td><td>{cell.data}</td><td>{cell.mode}</td><td>{cell.batch}</td>{blank}"
            f'<td class="text">{escape(reason)}</td></tr>'
        )
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"


def _section(report: ConsistencyReport, result: CellResult, tokenizer: Any | None) -> str:
    worst = max(result.repeats, key=lambda one: _last_if_nan(one.against_decode.token_mult_prob_error))
    judgement = ""
    if not result.passed:
        lines = [*result.problems, *([result.verdict.summary] if result.verdict else [])]
        judgement = '<div class="judgement">' + "".join(f"<p>{escape(line)}</p>" for line in lines) + "</div>"
    plots = _plots(result, worst, str(report.engine.get("engine")))
    sequences = _sequences(worst, tokenizer)
    # Plots of cells that pass are there, but folded: a page of 36 cells stays readable.
    opened = "" if result.passed else " open"
    return (
        f'<h2 id="{result.cell.key}">{escape(str(result.cell))}: '
        f"{_verdict(result.passed, 'pass' if result.passed else 'FAIL')}</h2>{judgement}"
        f"<details{opened}><summary>plots and worst sequences</summary>{plots}{sequences}</details>"
    )


def _last_if_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _plots(result: CellResult, worst: Measurement, engine: str) -> str:
    """Error by position, and trainer against engine, side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    by_position, scatter = figure.subplots(1, 2)
    generated = worst.decode.shape[1]
    positions = torch.arange(generated) + worst.prompt_length
    series = [("decode", worst.decode, "tab:red"), ("prefill", worst.prefill, "tab:blue")]
    for name, engine_logprobs, colour in series:
        if engine_logprobs is None:
            continue
        difference = torch.cat([(one.trainer - _of(one, name)).abs() for one in result.repeats])
        mean, largest = _by_column(difference)
        by_position.plot(positions, mean, color=colour, linewidth=1.2, label=f"{name}, mean")
        by_position.plot(positions, largest, color=colour, linewidth=0.6, alpha=0.5, label=f"{name}, largest")
    noise, _ = _by_column(torch.cat([(one.rounded - one.trainer[: len(one.rounded)]).abs() for one in result.repeats]))
    by_position.plot(positions, noise, color="0.5", linewidth=0.8, linestyle="--", label="noise floor, mean")
    by_position.set_yscale("symlog", linthresh=1e-7)
    by_position.set_ylim(bottom=0)
    by_position.set_xlabel("position in the sequence")
    by_position.set_ylabel("|trainer - engine|, nats")
    by_position.legend(fontsize=7, ncols=2)
    trainer = torch.cat([one.trainer.flatten() for one in result.repeats])
    decode = torch.cat([one.decode.flatten() for one in result.repeats])
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
    image = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="error by position; trainer against engine" src="data:image/png;base64,{image}">'


def _of(one: Measurement, name: str) -> torch.Tensor:
    found = one.decode if name == "decode" else one.prefill
    return torch.full_like(one.trainer, math.nan) if found is None else found


def _by_column(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and largest of each column, of what is finite."""
    finite = values.isfinite()
    kept = torch.where(finite, values, 0.0)
    return kept.sum(0) / finite.sum(0).clamp(min=1), kept.amax(0)


def _sequences(worst: Measurement, tokenizer: Any | None) -> str:
    """The sequences with the largest errors; the redder a token, the further off."""
    difference = (worst.trainer - worst.decode).abs()
    order = difference.nan_to_num(nan=math.inf).mean(1).argsort(descending=True)[:WORST_SEQUENCES].tolist()
    parts = []
    for row in order:
        error = token_mult_prob_error(worst.trainer[row], worst.decode[row])
        ids = worst.tokens[row].tolist()
        start = max(0, worst.prompt_length - CONTEXT_TOKENS)
        before = "".join(_token(tokenizer, one) for one in ids[start : worst.prompt_length])
        scale = max(1e-12, difference[row].nan_to_num(posinf=0.0).max().item())
        spans = []
        for place, one in enumerate(ids[worst.prompt_length :]):
            off = difference[row, place].item()
            share = 1.0 if not math.isfinite(off) else off / scale
            numbers = f"token {one}: trainer {worst.trainer[row, place]:.6f}, engine {worst.decode[row, place]:.6f}"
            spans.append(
                f'<span style="background: rgba(200, 0, 30, {0.6 * share:.2f})" title="{numbers}">'
                f"{_token(tokenizer, one)}</span>"
            )
        parts.append(
            f"<h3>sequence {row}: {error:.7f}, largest difference {scale:.1e} nats</h3>"
            f'<p class="tokens"><span class="prompt">{before}</span>{"".join(spans)}</p>'
        )
    return "".join(parts)


def _token(tokenizer: Any | None, token: int) -> str:
    if tokenizer is None:
        return f"{token} "
    return escape(tokenizer.decode([token]).replace("\n", "⏎\n")) or "·"
