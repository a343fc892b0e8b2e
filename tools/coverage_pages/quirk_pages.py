"""The quirks of a family's classes, as its coverage page lists them."""

from __future__ import annotations

from nrl_models.family import FamilyModel
from nrl_models.quirks import CATALOGUE, Subject
from nrl_models.testing.case import FamilyCase


def class_subject(model_class: type[FamilyModel]) -> Subject:
    """Every model of a class, represented by a tiny one."""
    return Subject(model_class.from_config(FamilyCase(model_class).config, device="meta"), any_size=True)


def page_lines(subjects: dict[str, Subject]) -> list[str]:
    """A line for each quirk that concerns some of these architectures, but not every model.

    Args:
        subjects: by architecture.
    """
    lines = []
    for quirk in CATALOGUE:
        names = [name for name, subject in subjects.items() if not quirk.every_model and quirk.applies(subject)]
        if names:
            of = "" if len(names) == len(subjects) else f" ({', '.join(names)})"
            lines.append(f"- [{quirk.name}](../quirks.md#{quirk.name}){of}: {quirk.symptom} Expiry: {quirk.expiry}.")
    return lines or ["None but those of every model."]
