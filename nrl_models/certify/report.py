"""A certificate as an HTML page, as Markdown for a model card, and as a badge."""

from __future__ import annotations

from html import escape
from pathlib import Path

from nrl_models.certify.certificate import Certificate
from nrl_models.certify.check_result import Answer, Status
from nrl_models.consistency.html import write_page

SECTIONS = (
    (Status.FAILED, "Failed"),
    (Status.NOT_DECIDED, "Not decided"),
    (Status.LEFT_OUT, "Left out"),
    (Status.NOT_COVERED, "Not covered for lack of time"),
    (Status.PASSED, "Passed"),
    (Status.NOT_APPLICABLE, "Not applicable"),
)
"""Sections of the report, in order."""

COLORS = {Answer.READY: "#17692b", Answer.NOT_READY: "#b00020", Answer.NOT_DECIDED: "#8a6d00"}


def write_html(certificate: Certificate, file: Path) -> None:
    """Write a self-contained page."""
    sections = [(title, found) for status, title in SECTIONS if (found := certificate.with_status(status))]
    color = COLORS[certificate.answer]
    write_page(file, "nrl_models.certify", certificate=certificate, sections=sections, color=color)


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
    """Return an SVG image with the answer."""
    label, answer = "nrl_models", escape(certificate.answer)
    left, right = 78, 14 + 7 * len(answer)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {answer}"><title>{label}: {answer}</title>'
        f'<rect width="{left}" height="20" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{COLORS[certificate.answer]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">'
        f'<text x="{left / 2:g}" y="14">{label}</text><text x="{left + right / 2:g}" y="14">{answer}</text></g></svg>\n'
    )
