"""The recorded outcomes of every architecture, with the package versions of each outcome.

Each family has a file `docs/model-coverage/results/<family>.json`: `{architecture: {kind: {"versions": {...}, ...}}}`.
A run replaces only the outcome of the same kind and architecture. Outcomes of other architectures, kinds and versions
remain unchanged.
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
from tools.variants import SEPARATOR

FOLDER = "results"
"""The folder of the recorded outcomes, inside the folder of the pages."""

WIDTH = 110
"""Maximum line width for a JSON value on one line."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Kind(StrEnum):
    """The kind of a recorded outcome."""

    TESTS = "generated tests"
    MUTANTS = "mutants"
    FSDP = "fsdp"
    TP = "tp"
    EP = "ep"
    COMPILED = "compiled"
    PP = "pp"
    QLORA = "qlora"
    ENGINE = "engine"
    IMAGES = "engine with images"
    MLX = "mlx"


@dataclass(frozen=True)
class Record:
    """One outcome.

    Args:
        versions: Versions of the packages that influence it, by name.
        outcome: The result, as JSON.
    """

    versions: Mapping[str, str]
    outcome: Mapping[str, Any]


Records = Mapping[Kind, Mapping[str, Record]]
"""Recorded outcomes, by kind and architecture."""


def family_of(architecture: str) -> str:
    """Return the family in this repository that serves an architecture, which may be an alias or a variant.

    Raises:
        CoverageError: No family serves it.
    """
    name = architecture.partition(SEPARATOR)[0]
    name = registry.ALIASES.get(name, name)
    for family, architectures in registry.FAMILIES.items():
        if name in architectures:
            return family
    raise CoverageError(f"{architecture} belongs to no family of this repository: its outcomes are not recorded here")


def read_records(pages: Path) -> Records:
    """Read all recorded outcomes.

    Args:
        pages: The folder of the pages.

    Raises:
        CoverageError: A file has other contents.
    """
    records: dict[Kind, dict[str, Record]] = {kind: {} for kind in Kind}
    for file in sorted((pages / FOLDER).glob("*.json")):
        for architecture, kinds in _content(file).items():
            for kind, outcome in kinds.items():
                rest = {key: value for key, value in outcome.items() if key != "versions"}
                records[Kind(kind)][architecture] = Record(outcome["versions"], rest)
    return records


def write_record(pages: Path, kind: Kind, architecture: str, record: Record) -> None:
    """Replace the outcome of one kind and architecture. All other outcomes remain.

    Args:
        pages: The folder of the pages.
        kind: The kind of the outcome.
        architecture: The architecture.
        record: The outcome.
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
    """Format JSON with each value on one line if it fits, to keep diffs short."""
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
    """Format versions as text, without the version of nrl_models."""
    return ", ".join(f"{package} {number}" for package, number in versions.items() if package != "nrl_models")


def by_versions(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """Group the architectures of recorded outcomes by versions, as text. The largest group comes first."""
    found = grouped((versions_text(record.versions), name) for name, record in records.items())
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def versions_summary(records: Mapping[str, Record], *, names: bool = False) -> str:
    """Format the versions of recorded outcomes. Versions that all outcomes share come first, once. For the others, add
    the number or the names of the architectures of each.

    Args:
        records: The outcomes by architecture.
        names: Whether to list the architectures by name.
    """
    every = [record.versions for record in records.values()]
    shared = {name: number for name, number in every[0].items() if all(each.get(name) == number for each in every)}
    varying = {
        architecture: Record({name: number for name, number in record.versions.items() if name not in shared}, {})
        for architecture, record in records.items()
    }
    groups = [
        f"{text} ({', '.join(found) if names else f'{len(found)} architectures'})"
        for text, found in by_versions(varying).items()
        if text
    ]
    return ", ".join(text for text in (versions_text(shared), " and ".join(groups)) if text)


def all_versions(records: Iterable[Record]) -> str:
    """List every version of every package that outcomes were recorded with."""
    found = grouped((name, number) for record in records for name, number in record.versions.items())
    return versions_text({name: " and ".join(sorted(set(numbers))) for name, numbers in found.items()})


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group the second items of pairs by the first items, in their order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
