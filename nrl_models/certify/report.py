"""A certificate as an HTML page, as Markdown for a model card, and as a badge."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from nrl_models.certify.certificate import Certificate, layers_in_words
from nrl_models.certify.certified import plotted_file
from nrl_models.certify.check_result import Answer, Status
from nrl_models.consistency.html import HOW_TO_READ, has_plots, plots_of, write_page
from nrl_models.consistency.measure import Measurement

SECTIONS = (
    (Status.FAILED, "Failed"),
    (Status.NOT_DECIDED, "Not decided"),
    (Status.LEFT_OUT, "Left out"),
    (Status.NOT_COVERED, "Not covered for lack of time"),
    (Status.PASSED, "Passed"),
    (Status.NOT_APPLICABLE, "Not applicable"),
)
"""Sections of the report, in order."""

OPTIONS = {
    "engine": "engine",
    "engine_options": "engine options",
    "dtype": "dtype",
    "device": "device of the trainer",
    "full": "all 36 cells of the guide",
    "seed": "seed",
    "in_loop": "training loop",
    "layers": "layers",
}
"""Options of a certificate, in words."""

UNSET = {"dtype": "the checkpoint's", "in_loop": "not run", "layers": "all"}
"""Meaning of an option that is not set; "none" for the others."""

COLORS = {Answer.READY: "#17692b", Answer.NOT_READY: "#b00020", Answer.NOT_DECIDED: "#8a6d00"}


def write_html(certificate: Certificate, file: Path) -> None:
    """Write a self-contained page.

    Args:
        certificate: the certificate. Plots need `folder`, and matplotlib.
        file: file to write.
    """
    plotted = {result.name: _plots(certificate, result.name) for result in certificate.results}
    write_page(
        file,
        "nrl_models.certify",
        certificate=certificate,
        sections=[(title, results) for status, title in SECTIONS if (results := certificate.with_status(status))],
        color=COLORS[certificate.answer],
        options={OPTIONS[name]: _shown(name, value) for name, value in certificate.options.items()},
        plotted={name: plots for name, plots in plotted.items() if plots},
        has_plots=has_plots(),
        how_to_read=HOW_TO_READ,
    )


def _shown(name: str, value: Any) -> str:
    """Return an option in words."""
    if value is None:
        return UNSET.get(name, "none")
    if value == {}:
        return "in one process" if name == "in_loop" else "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={setting}" for key, setting in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _plots(certificate: Certificate, name: str) -> list[tuple[str, str]]:
    """Return the plots of a check's log-probabilities; empty if it saved none."""
    if certificate.folder is None:
        return []
    try:
        measurement = Measurement.load(plotted_file(certificate.folder, name))
    except (OSError, SafetensorError):
        return []
    return plots_of([measurement], str(certificate.options["engine"]))


def markdown(certificate: Certificate) -> str:
    """Return the certificate as Markdown for a model card."""
    lines = [f"## nrl_models: {certificate.answer}", "", certificate.sentence, ""]
    lines += ["| check | status | result |", "|---|---|---|"]
    for status, _ in SECTIONS:
        for result in certificate.with_status(status):
            summary = result.summary.replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {result.name} | {result.status} | {summary} |")
    versions = ", ".join(f"{name} {version}" for name, version in certificate.versions.items())
    hardware = ", ".join(f"{name} {value}" for name, value in certificate.hardware.items())
    lines += ["", f"{certificate.created}; {versions}; {hardware}.", ""]
    lines += ["Not covered:", "", *(f"- {text}" for text in certificate.not_covered), ""]
    return "\n".join(lines)


def badge(certificate: Certificate) -> str:
    """Return an SVG image with the answer, and the number of layers if only the first ones were checked."""
    label, answer = "nrl_models", escape(certificate.answer)
    if certificate.options.get("layers") is not None:
        answer += f", {layers_in_words(certificate.options['layers'])}"
    left, right = 78, 14 + 7 * len(answer)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {answer}"><title>{label}: {answer}</title>'
        f'<rect width="{left}" height="20" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{COLORS[certificate.answer]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">'
        f'<text x="{left / 2:g}" y="14">{label}</text><text x="{left + right / 2:g}" y="14">{answer}</text></g></svg>\n'
    )
