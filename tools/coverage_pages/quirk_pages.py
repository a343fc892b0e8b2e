"""The quirks of a family's classes, as listed on its coverage page."""

from __future__ import annotations

from nrl_models.family import FamilyModel
from nrl_models.quirks import CATALOG, Subject
from nrl_models.testing.case import FamilyCase


def class_subject(model_class: type[FamilyModel]) -> Subject:
    """Return a quirk subject for a class, represented by a tiny model."""
    return Subject(model_class.from_config(FamilyCase(model_class).config, device="meta"), any_size=True)


def page_lines(subjects: dict[str, Subject]) -> list[str]:
    """Format a line for each quirk that affects some of these architectures, but not every model.

    Args:
        subjects: The subjects by architecture.
    """
    lines = []
    for quirk in CATALOG:
        names = [name for name, subject in subjects.items() if not quirk.every_model and quirk.applies(subject)]
        if names:
            of = "" if len(names) == len(subjects) else f" ({', '.join(names)})"
            lines.append(f"- [{quirk.name}](../quirks.md#{quirk.name}){of}: {quirk.symptom} {quirk.expiry}.")
    return lines
