"""The report as one HTML page that needs nothing else: the table, plots, and the worst sequences with their tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nrl_models.consistency.measure import Measurement, order_by_error
from nrl_models.consistency.report import CELL, CellResult, ConsistencyReport, in_a_line, last_if_nan, shown
from nrl_models.errors import ConsistencyError
from nrl_models.logprobs.metrics import token_mult_prob_error

MAX_POINTS = 20_000
"""Points in a scatter plot; of more, so many are drawn at even distances."""

WORST_SEQUENCES = 2
CONTEXT_TOKENS = 24
"""Tokens of the prompt that are shown before the generated ones."""

PAGE = """
{%- macro verdict(word) %}<span class="{{ 'pass' if word == 'pass' else 'fail' }}">{{ word }}</span>{% endmacro -%}
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{{ report.title }}</title>
<style>
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
</style></head>
<body>
<h1>{{ report.title }}</h1>
<p>Verdict: {{ verdict(report.verdict) }}, threshold {{ "%g" % report.settings.threshold }}. Numbers are
<code>token_mult_prob_error</code>, 1 if trainer and engine agree; the largest difference is in nats.</p>
{% if report.error %}<p class="fail">The run ended early: {{ report.error }}</p>{% endif %}
<table>
<tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for cells, key, word in rows %}
<tr>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}
<td class="text">{% if key %}<a href="#{{ key }}">{{ verdict(word) }}</a>{% else %}{{ word }}{% endif %}</td></tr>
{% endfor %}
</table>
<p>Engine: {{ engine }}</p><p>Trainer: {{ trainer }}</p>
{% for result, image, sequences in sections %}
<h2 id="{{ result.cell.key }}">{{ result.cell }}: {{ verdict("pass" if result.passed else "FAIL") }}</h2>
{% if not result.passed %}
<div class="judgement">{% for line in result.explanation %}<p>{{ line }}</p>{% endfor %}</div>
{% endif %}
{# Plots of cells that pass are there, but folded: a page of 36 cells stays readable. #}
<details{{ "" if result.passed else " open" }}><summary>plots and worst sequences</summary>
<img alt="error by position; trainer against engine" src="data:image/png;base64,{{ image }}">
{% for title, before, tokens in sequences %}
<h3>{{ title }}</h3>
<p class="tokens"><span class="prompt">{{ before }}</span>
{%- for text, redness, numbers in tokens -%}
<span style="background: rgba(200, 0, 30, {{ '%.2f' % redness }})" title="{{ numbers }}">{{ text }}</span>
{%- endfor %}</p>
{% endfor %}
</details>
{% endfor %}
</body>
</html>
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
    from jinja2 import Environment

    rows = [
        ([*shown(result.cell), *report.numbers(result)], result.cell.key, "pass" if result.passed else "FAIL")
        for result in report.results
    ]
    rows += [([*shown(cell), *[""] * len(report.columns)], "", reason) for cell, reason in report.skipped.items()]
    sections = []
    for result in report.results:
        worst = max(result.repeats, key=lambda repeat: last_if_nan(repeat.metrics["decode"].token_mult_prob_error))
        sections.append((result, _plots(result, str(report.engine.get("engine"))), _sequences(worst, tokenizer)))
    page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = page.render(
        report=report,
        header=(*CELL, *report.columns, "verdict"),
        rows=rows,
        engine=in_a_line(report.engine),
        trainer=in_a_line(report.trainer),
        sections=sections,
    )
    file.write_text(text, encoding="utf-8")


def _plots(result: CellResult, engine: str) -> str:
    """Error by position, and trainer against engine, side by side: a PNG in base64."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    by_position, scatter = figure.subplots(1, 2)
    repeats = result.repeats
    positions = torch.arange(repeats[0].decode.shape[1]) + repeats[0].prompt_length
    for name, colour in (("decode", "tab:red"), ("prefill", "tab:blue")):
        told = [(repeat.trainer, getattr(repeat, name)) for repeat in repeats if getattr(repeat, name) is not None]
        if told:
            mean, largest = _by_column([trainer - engine for trainer, engine in told])
            by_position.plot(positions, mean, color=colour, linewidth=1.2, label=f"{name}, mean")
            by_position.plot(positions, largest, color=colour, linewidth=0.6, alpha=0.5, label=f"{name}, largest")
    noise, _ = _by_column([repeat.rounded - repeat.trainer[: len(repeat.rounded)] for repeat in repeats])
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
    """Mean and largest absolute value of each column, of what is finite."""
    values = torch.cat(differences).abs()
    finite = values.isfinite()
    kept = torch.where(finite, values, 0.0)
    return kept.sum(0) / finite.sum(0).clamp(min=1), kept.amax(0)


def _sequences(worst: Measurement, tokenizer: Any | None) -> Iterator[tuple[str, str, list[tuple[str, float, str]]]]:
    """The sequences with the largest errors: title, end of the prompt, tokens; the redder a token, the further off."""
    for row in order_by_error(worst.trainer, worst.decode)[:WORST_SEQUENCES]:
        trainer, engine, ids = worst.trainer[row], worst.decode[row], worst.tokens[row].tolist()
        difference = (trainer - engine).abs()
        scale = max(1e-12, difference.nan_to_num(posinf=0.0).max().item())
        redness = (0.6 * difference / scale).nan_to_num(nan=0.6, posinf=0.6).tolist()
        prompt, generated = ids[: worst.prompt_length], ids[worst.prompt_length :]
        yield (
            f"sequence {row}: {token_mult_prob_error(trainer, engine):.7f}, largest difference {scale:.1e} nats",
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
