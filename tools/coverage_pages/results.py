"""What was recorded of every architecture, each outcome with the versions it was obtained with.

One file a family, `docs/model-coverage/results/<family>.json`: `{architecture: {kind: {"versions": {...}, ...}}}`.
An outcome is replaced by a run of its own kind on its own architecture, and by nothing else: the outcomes of other
architectures, of other kinds and of other versions stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from nrl_models import registry
from nrl_models.common.checkpoint.writing import write_whole
from tools.coverage_pages.errors import CoverageError

FOLDER = "results"
"""The folder of the recorded outcomes, beside the pages."""

WIDTH = 110
"""Characters of a line in which a value is written whole."""

Value = TypeVar("Value")


class Kind(StrEnum):
    """What was tried of an architecture."""

    TESTS = "generated tests"
    MUTANTS = "mutants"
    FSDP = "fsdp"
    TP = "tp"
    EP = "ep"
    PP = "pp"
    QLORA = "qlora"
    ENGINE = "engine"
    IMAGES = "engine with images"
    MLX = "mlx"


@dataclass(frozen=True)
class Record:
    """One outcome.

    Args:
        versions: of the packages that decide it, by name.
        outcome: what came out, as JSON.
    """

    versions: Mapping[str, str]
    outcome: Mapping[str, Any]


Records = Mapping[Kind, Mapping[str, Record]]
"""What is recorded, by kind and architecture."""


def family_of(architecture: str) -> str:
    """The family in this repository that serves an architecture, which may be an alias.

    Raises:
        CoverageError: none does.
    """
    name = registry.ALIASES.get(architecture, architecture)
    for family, architectures in registry.FAMILIES.items():
        if name in architectures:
            return family
    raise CoverageError(f"{architecture} belongs to no family of this repository: its outcomes are not recorded here")


def read_records(pages: Path) -> Records:
    """What is recorded beside the pages.

    Args:
        pages: the folder of the pages.

    Raises:
        CoverageError: a file holds something else.
    """
    records: dict[Kind, dict[str, Record]] = {kind: {} for kind in Kind}
    for file in sorted((pages / FOLDER).glob("*.json")):
        for architecture, kinds in _content(file).items():
            for kind, outcome in kinds.items():
                rest = {key: value for key, value in outcome.items() if key != "versions"}
                records[Kind(kind)][architecture] = Record(outcome["versions"], rest)
    return records


def write_record(pages: Path, kind: Kind, architecture: str, record: Record) -> None:
    """Record an outcome in place of the one of its kind and architecture; everything else stays.

    Args:
        pages: the folder of the pages.
        kind: what was tried.
        architecture: of what.
        record: the outcome.
    """
    file = pages / FOLDER / f"{family_of(architecture)}.json"
    content = _content(file) if file.is_file() else {}
    kinds = content.get(architecture, {}) | {kind: {"versions": record.versions, **record.outcome}}
    content[architecture] = {name: kinds[name] for name in Kind if name in kinds}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, as_json(dict(sorted(content.items()))) + "\n")


def _content(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        content = json.loads(file.read_text())
        unknown = {kind for kinds in content.values() for kind in kinds} - set(Kind)
    except (ValueError, AttributeError, TypeError) as error:
        raise CoverageError(f"{file} does not hold recorded outcomes: {error}") from error
    if unknown:
        raise CoverageError(f"{file} has outcomes of unknown kinds: {', '.join(sorted(unknown))}")
    return content


def as_json(content: Any, depth: int = 0) -> str:
    """JSON in which what fits into a line stands in one, so that differences of two versions are short."""
    line = json.dumps(content)
    if (depth and len(line) + depth <= WIDTH) or not content or not isinstance(content, (dict, list)):
        return line
    items = (
        [f"{json.dumps(key)}: {as_json(value, depth + 1)}" for key, value in content.items()]
        if isinstance(content, dict)
        else [as_json(value, depth + 1) for value in content]
    )
    opening, closing = "{}" if isinstance(content, dict) else "[]"
    indent = "\n" + " " * (depth + 1)
    return opening + ",".join(indent + item for item in items) + "\n" + " " * depth + closing


def versions_text(versions: Mapping[str, str]) -> str:
    """Versions as text, without this package's own."""
    return ", ".join(f"{package} {number}" for package, number in versions.items() if package != "nrl_models")


def by_versions(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """The architectures of recorded outcomes by the versions of these, as text; those of most architectures first."""
    found = grouped((versions_text(record.versions), name) for name, record in records.items())
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def versions_summary(records: Mapping[str, Record], *, names: bool = False) -> str:
    """The versions of recorded outcomes; where they differ, of how many architectures each is, or of which.

    Args:
        records: the outcomes, by architecture.
        names: whether to name the architectures.
    """
    versions = by_versions(records)
    if len(versions) == 1:
        return next(iter(versions))
    return "; ".join(
        f"{text} ({', '.join(found) if names else f'{len(found)} architectures'})" for text, found in versions.items()
    )


def grouped(pairs: Iterable[tuple[str, Value]]) -> dict[str, list[Value]]:
    """The second of each pair by the first, in their order."""
    found: dict[str, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
