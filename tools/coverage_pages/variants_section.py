"""The part of a family's page about tiny models that stand for other published models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nrl_models.onboarding.inspect import ModelKind, kinds_of
from tools.coverage_pages import sharding_outcomes
from tools.coverage_pages.overview import Row, table
from tools.coverage_pages.results import Records, grouped
from tools.variants import SEPARATOR, case_of, with_variants


def variants_of(architectures: Iterable[str]) -> dict[str, list[ModelKind]]:
    """Return the kinds of the variants of architectures, by name."""
    found = {}
    for name in architectures:
        for variant in with_variants([name])[1:]:
            found[variant] = kinds_of(case_of(variant).config)
    return found


def kinds_text(row: Row, variants: Mapping[str, Sequence[str]]) -> str:
    """Return the kinds of an architecture, and those that only variants have."""
    further = grouped(
        (kind, name.partition(SEPARATOR)[2])
        for name, kinds in variants.items()
        for kind in kinds
        if name.partition(SEPARATOR)[0] == row.architecture and kind not in row.kinds
    )
    return ", ".join([*row.kinds, *(f"{kind} ({', '.join(names)})" for kind, names in further.items())])


def variants_lines(variants: Mapping[str, Sequence[str]], records: Records) -> list[str]:
    """Return a table of tiny models that stand for published models with other kinds of layers."""
    if not variants:
        return []
    columns = list(sharding_outcomes.FEATURES.values())
    rows = []
    for name, kinds in variants.items():
        verdicts = sharding_outcomes.verdicts(records, name)
        rows.append((name, ", ".join(kinds), *(verdicts[column] for column in columns)))
    reasons = [f"- {line}" for line in sharding_outcomes.reasons(records, variants)]
    return [
        "Tiny models with the kinds of layers of other published models, in addition to the default configuration:",
        "",
        *table(("variant", "kind", *columns), rows),
        *(["", *reasons] if reasons else []),
    ]
