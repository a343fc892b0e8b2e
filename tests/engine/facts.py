"""Facts about a disagreement, recorded with the outcome of an architecture. The coverage pages state them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nrl_models.consistency.consistency_report import CellResult
from nrl_models.consistency.divergence import Divergence
from nrl_models.consistency.measure import Comparison
from nrl_models.consistency.verdict import CauseKind, VerdictCause
from nrl_models.errors import listed
from nrl_models.quirks import Pattern

MAX_NAMES = 2
"""Maximum number of parameters that a page lists."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first module that the engine computes differently.

    Args:
        module: Name of the module in transformers.
        class_name: Class of the module in the engine. Empty if its input is already wrong.
        after: The last module before it that is right, if its input is already wrong. Otherwise empty.
        pattern: Relation of its tensor to the expected one.
    """

    module: str
    class_name: str = ""
    after: str = ""
    pattern: Pattern = Pattern.UNKNOWN

    @classmethod
    def of(cls, divergence: Divergence) -> FirstDifference:
        """Return the fields of a divergence that are recorded."""
        if divergence.between:
            return cls(divergence.module, after=divergence.after, pattern=divergence.pattern)
        return cls(divergence.module, divergence.class_name, pattern=divergence.pattern)

    def __str__(self) -> str:
        if self.after:
            return f"the output of `{self.after}` agrees, and the input of `{self.module}` differs"
        return f"the first difference is in `{self.module}` ({self.class_name})"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a disagreement.

    Args:
        unwritten: Parameters of the engine that the refit does not write.
        nan: Number of NaN log-probabilities of the engine's decoding.
        cause: The bug of the wrong side, if it was identified.
        difference: The first module that diverges, if there is one.
        note: Why the verdict names no module, if it names a wrong side.
    """

    unwritten: tuple[str, ...] = ()
    nan: int = 0
    cause: VerdictCause | None = None
    difference: FirstDifference | None = None
    note: str = ""

    @classmethod
    def of(cls, result: CellResult, unwritten: tuple[str, ...] = ()) -> Facts:
        """Return the facts about a cell that does not pass, or that follows an incomplete refit.

        Args:
            result: The result of the cell.
            unwritten: Parameters of the engine that the refit before it did not write.
        """
        nan = sum(metrics.nan for metrics in result.comparisons[Comparison.DECODE])
        if (verdict := result.verdict) is None:
            return cls(unwritten, nan)
        difference = FirstDifference.of(verdict.divergence) if verdict.divergence else None
        return cls(unwritten, nan, verdict.cause, difference, verdict.note if verdict.at_fault else "")

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Facts:
        """Parse the fields, as `dataclasses.asdict` returns them."""
        cause, difference = content["cause"], content["difference"]
        typed = {
            "unwritten": tuple(content["unwritten"]),
            "cause": cause and VerdictCause(**cause | {"kind": CauseKind(cause["kind"])}),
            "difference": difference and FirstDifference(**difference | {"pattern": Pattern(difference["pattern"])}),
        }
        return cls(**content | typed)

    def sentences(self) -> Iterator[str]:
        """State the facts for a page, without capital letters and periods. `note` is not a fact."""
        if self.unwritten:
            yield f"the refit does not write {listed((f'`{name}`' for name in self.unwritten), MAX_NAMES)}"
        if self.cause:
            yield f"the engine computes as if {self.cause.message}"
        if self.difference:
            yield str(self.difference)
        if self.nan:
            yield f"{self.nan} of the engine's decode log-probabilities are NaN; the error is computed without them"
