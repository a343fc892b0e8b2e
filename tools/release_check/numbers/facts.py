"""The records of `numbers` for a class, and the changes between two records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum, auto
from typing import Any

import torch


class Section(StrEnum):
    """The sections, in order of execution. An error in one section does not affect the others."""

    LOADING = auto()
    FILES = auto()
    DTYPES = auto()
    INITIALIZATION = auto()
    CONFIG = auto()
    EAGER = auto()
    SDPA = auto()
    BF16 = auto()
    MEDIA = auto()
    PADDING = auto()
    PACKED = auto()
    CACHED_STEPS = auto()
    MEDIA_CACHED_STEPS = auto()
    GREEDY = auto()
    STATIC_CACHE = auto()
    GRADIENTS = auto()
    CHECKPOINTING = auto()
    RESIZE = auto()
    PADDED_ALONE = auto()
    CACHED_CHUNK = auto()
    SMALL_WINDOW = auto()
    BIDIRECTIONAL = auto()
    ASSISTED = auto()
    VIDEO = auto()
    OTHER_CLASS = auto()
    NEW_FILES = auto()
    DRAFTED = auto()
    SHARED_STATES = auto()
    EXPERT_PARALLEL = auto()
    INT4_EXPERTS = auto()
    FP4_EXPERTS = auto()


class Kind(StrEnum):
    """Kind of a fact or of a change."""

    CLASS = auto()
    """The class exists or does not."""
    ERROR = auto()
    """The section raises an error, or no longer does."""
    NAMES = auto()
    """Names and shapes of parameters and buffers in memory."""
    LOADING = auto()
    """Names that are missing or unexpected when the checkpoint is loaded."""
    DTYPES = auto()
    TIES = auto()
    FILES = auto()
    """Names, shapes, dtypes and contents of the tensors that `save_pretrained` writes."""
    NUMBERS = auto()
    """Logits and losses in fp32."""
    LOW_PRECISION = auto()
    """Logits in bf16."""
    GRADIENTS = auto()
    TOKENS = auto()
    """Tokens that greedy generation picks."""
    FIELDS = auto()
    """Fields, shapes and dtypes of a forward's output."""
    CONFIG_KEYS = auto()
    """Keys that the configuration writes to `config.json`."""
    CONFIG_DEFAULTS = auto()
    INITIALIZATION = auto()
    """Values of new weights under a seed. They also change if random numbers are drawn in another order."""
    INITIALIZATION_SCALE = auto()
    """Mean and standard deviation of new weights."""


Facts = dict[Kind, dict[str, Any]]
"""Facts by kind and key: numbers as lists of floats, the rest as JSON values."""

TOLERANCES: Mapping[Kind, float] = {
    Kind.NUMBERS: 3e-5,
    Kind.LOW_PRECISION: 3e-2,
    Kind.GRADIENTS: 3e-4,
    Kind.INITIALIZATION_SCALE: 0.2,
}
"""By kind of numbers, the largest difference due to rounding, relative to the largest number of the fact."""

SMALLEST_SCALE = 1e-3
"""If all numbers are smaller, differences are relative to this value."""


@dataclass(frozen=True)
class SectionRecord:
    """The result of one section for one class.

    Args:
        architecture: Name of transformers' class.
        section: The section.
        facts: The facts.
        error_type: Class name of the error that ended the section. Empty without an error.
        message: The error on one line.
        seconds: Wall-clock time.
        versions: Versions of the packages that influence the record.
    """

    architecture: str
    section: Section
    facts: Facts = field(default_factory=dict)
    error_type: str = ""
    message: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def part(self) -> Section:
        """The section."""
        return self.section

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a line of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SectionRecord:
        """Read a line of JSON. Raises `ValueError` or `TypeError` if it is not a record."""
        facts = {Kind(kind): found for kind, found in values["facts"].items()}
        return cls(**{**values, "section": Section(values["section"]), "facts": facts})


@dataclass(frozen=True)
class Change:
    """One change of a class between two records.

    Args:
        architecture: Name of transformers' class.
        section: The section.
        kind: Kind of the fact.
        key: Key of the fact.
        before: Its earlier value. None if there was none.
        after: Its later value. None if there is none.
        max_diff: For numbers, the largest difference relative to the largest number. Otherwise None.
    """

    architecture: str
    section: Section
    kind: Kind
    key: str
    before: Any
    after: Any
    max_diff: float | None = None

    def __str__(self) -> str:
        found = f"{self.max_diff:.3g}" if self.max_diff is not None else f"{self.before!s:.80} -> {self.after!s:.80}"
        return f"{self.architecture}: {self.section}: {self.kind}: {self.key}: {found}"


def compare(before: Iterable[SectionRecord], after: Iterable[SectionRecord]) -> list[Change]:
    """Return the changes between two records. Sections that only one of them has are skipped; see `uncompared`.

    A class that only one version has is one change, in its first section.

    Args:
        before: Record of the earlier version.
        after: Record of the later version, with the same fixtures.
    """
    earlier = {(record.architecture, record.section): record for record in before}
    changes: list[Change] = []
    appeared: set[str] = set()
    for record in after:
        old = earlier.get((record.architecture, record.section))
        if old is None or record.architecture in appeared:
            continue
        found = _changes(old, record)
        appeared.update(change.architecture for change in found if change.kind is Kind.CLASS)
        changes += found
    return changes


def uncompared(before: Iterable[SectionRecord], after: Iterable[SectionRecord]) -> dict[Section, list[str]]:
    """Return the sections that only one of two records has, with their classes."""
    missing = {(one.section, one.architecture) for one in before} ^ {(one.section, one.architecture) for one in after}
    found: dict[Section, list[str]] = {}
    for section, architecture in sorted(missing):
        found.setdefault(section, []).append(architecture)
    return found


def _changes(before: SectionRecord, after: SectionRecord) -> list[Change]:
    def change(kind: Kind, key: str, old: Any, new: Any, max_diff: float | None = None) -> Change:
        return Change(after.architecture, after.section, kind, key, old, new, max_diff)

    presence = [record.facts.get(Kind.CLASS, {}).get("present", True) for record in (before, after)]
    if presence != [True, True]:
        return [] if presence[0] == presence[1] else [change(Kind.CLASS, "present", *presence)]
    found: list[Change] = []
    if before.error_type != after.error_type:
        old, new = (f"{record.error_type} {record.message}".strip() or None for record in (before, after))
        found.append(change(Kind.ERROR, "error", old, new))
    if before.error_type or after.error_type:
        return found
    for kind in Kind:
        old_facts, new_facts = before.facts.get(kind, {}), after.facts.get(kind, {})
        for key in sorted(old_facts.keys() | new_facts.keys()):
            old, new = old_facts.get(key), new_facts.get(key)
            if old == new:
                continue
            if kind in TOLERANCES and old is not None and new is not None:
                distance = relative_difference(old, new)
                if distance > TOLERANCES[kind]:
                    found.append(change(kind, key, old, new, distance))
            else:
                found.append(change(kind, key, old, new))
    return found


def relative_difference(before: list[float | None], after: list[float | None]) -> float:
    """Return the largest difference of two lists of numbers, relative to the largest number of the first.

    None represents nonfinite numbers. Returns infinity if lengths or positions of None differ.
    """
    if len(before) != len(after) or [one is None for one in before] != [one is None for one in after]:
        return float("inf")
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one is not None and other is not None]
    if not pairs:
        return 0.0
    scale = max(max(abs(one) for one, _ in pairs), SMALLEST_SCALE)
    return max(abs(one - other) for one, other in pairs) / scale


ROWS = 64
MASKED_ABOVE = 1e30
"""Larger numbers are masks, such as the lowest of a dtype. They are excluded because they would dominate the result."""


def fingerprint(tensor: torch.Tensor) -> list[float | None]:
    """Return at most 64 numbers that change if any element of the tensor does: projections of its rows on a fixed
    vector.

    A projection of a row has the scale of its elements.
    """
    values = tensor.detach().double()
    values = torch.where(values.abs() > MASKED_ABOVE, 0.0, values)  # keeps NaNs
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    if len(rows) > ROWS:
        count = -(-len(rows) // ROWS)
        padded = torch.cat([rows, rows.new_zeros(count * ROWS - len(rows), rows.shape[1])])
        rows = padded.reshape(ROWS, -1)
    # A vector from a formula, because random generators may change between versions of torch.
    direction = torch.sin(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64) ** 2) * 2**0.5
    projections = (rows @ direction) / max(1, rows.shape[1]) ** 0.5
    return [number(value) for value in projections.tolist()]


def number(value: float) -> float | None:
    """Round a number to seven digits. None if it is not finite."""
    return float(f"{value:.7g}") if value == value and abs(value) != float("inf") else None
