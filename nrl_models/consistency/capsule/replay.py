"""The result of a replay: a verdict computed from a capsule, compared with the recorded one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nrl_models.consistency.capsule.capsule_file import CapsuleKind, Contents, json_values
from nrl_models.consistency.capsule.diverging_block import RecordedBlock
from nrl_models.errors import NRLModelsError, one_line
from nrl_models.parity.parity_report import Unit

RELATIVE = 1e-4
"""Relative difference up to which numbers of a replay count as equal, because other processors round differently."""

ABSOLUTE = 1e-9


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """One part of a replay.

    Args:
        name: Name of the part.
        passed: Whether the result equals the recorded one.
        detail: The result.
        different: Number of values that differ from the recorded ones. The bound is 0.
    """

    name: str
    passed: bool
    detail: str
    different: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return `{"name", "passed", "detail", "value", "bound", "unit"}`."""
        number = {"value": self.different, "bound": 0, "unit": Unit.COUNT}
        fields = {"name": self.name, "passed": self.passed, "detail": self.detail}
        return fields | (dict.fromkeys(number) if self.different is None else number)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of replaying a capsule.

    Args:
        kind: The check that wrote the capsule.
        title: The compared sides.
        verdict: The verdict, computed again, as JSON values.
        summary: The verdict in a few sentences.
        checks: Parts that were computed again.
        left_out: Tensors that the capsule does not have.
        versions: Versions of the packages that wrote the capsule.
    """

    kind: CapsuleKind
    title: str
    verdict: Mapping[str, Any]
    summary: str
    checks: tuple[ReplayCheck, ...]
    left_out: tuple[str, ...] = ()
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether something was computed again, and all results equal the recorded ones."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def lines(self) -> list[str]:
        """The result as text."""
        outcome = "REPRODUCED" if self.passed else "NOT REPRODUCED"
        lines = [f"{outcome}: {self.title}", self.summary]
        lines += [
            f"{'as recorded' if check.passed else 'DIFFERS'}: {check.name}: {check.detail}" for check in self.checks
        ]
        lines += [f"not in the capsule: {description}" for description in self.left_out]
        return [*lines, f"written with {', '.join(f'{name} {version}' for name, version in self.versions.items())}"]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "reproduced": self.passed,
            "kind": self.kind,
            "title": self.title,
            "verdict": dict(self.verdict),
            "summary": self.summary,
            "checks": [each.to_json() for each in self.checks],
            "left_out": list(self.left_out),
            "versions": dict(self.versions),
        }


def differences(recorded: Any, replayed: Any, prose: Collection[str] = (), where: str = "") -> list[str]:
    """List differences of two JSON values. Numbers are compared up to rounding, texts exactly.

    Args:
        recorded, replayed: The values. Fields of `replayed` that an earlier version did not record are not compared.
        prose: Names of fields with sentences, which are not compared: they show rounded numbers of other fields.
        where: Name of the values.
    """
    if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        names = [name for name in recorded if name not in prose]
        pairs = [(recorded[name], replayed.get(name), f"{where}.{name}".strip(".")) for name in names]
        return [line for first, second, name in pairs for line in differences(first, second, prose, name)]
    if isinstance(recorded, (list, tuple)) and isinstance(replayed, (list, tuple)) and len(recorded) == len(replayed):
        pairs = [(first, second, where) for first, second in zip(recorded, replayed, strict=True)]
        return [line for first, second, name in pairs for line in differences(first, second, prose, name)]
    return [] if _same(recorded, replayed) else [f"{where} was {recorded}, and is {replayed}"]


def _same(recorded: Any, replayed: Any) -> bool:
    if isinstance(recorded, bool) or isinstance(replayed, bool):
        return recorded is replayed
    if isinstance(recorded, (int, float)) and isinstance(replayed, (int, float)):
        return math.isclose(recorded, replayed, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(recorded == replayed)


def compared(name: str, recorded: Any, replayed: Any, detail: str, prose: Collection[str] = ()) -> ReplayCheck:
    """Compare a result with the recorded one, except fields of `prose`, see `differences`."""
    different = differences(recorded, json_values(replayed), prose)
    return ReplayCheck(name, not different, "; ".join(different) or detail, len(different))


def block_check(contents: Contents) -> list[ReplayCheck]:
    """Rebuild the first diverging block, and compare its output with the recorded one. Empty without a block."""
    values = contents.values
    if values["block"] is None:
        return []
    block = RecordedBlock.from_json(values["block"], contents.tensors)
    recorded: float = values["block_error"]
    try:
        error = block.error()
    except NRLModelsError as failure:
        return [ReplayCheck("block", False, f"{block.name} cannot be rebuilt here: {one_line(failure)}")]
    is_near = error <= block.allowed if recorded <= block.allowed else math.isclose(error, recorded, rel_tol=0.05)
    return [ReplayCheck("block", is_near, block_sentence(block, error))]


def block_sentence(block: RecordedBlock, error: float) -> str:
    """Describe the output of a rebuilt block."""
    detail = f"{block.name} of the trainer, rebuilt from configuration and weights, is off by {error:.1e} of its scale"
    is_near = error <= block.allowed
    return detail if is_near else f"{detail}: the trainer's module does not compute what its configuration says"


def measured_or_note(measure: Callable[[], Any]) -> tuple[Any, str]:
    """Return a measurement, or None and the reason why it failed."""
    try:
        return measure(), ""
    except (NRLModelsError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        return None, one_line(error)
