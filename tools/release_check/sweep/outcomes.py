"""The records of the sweep over all classes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum, auto
from typing import Any


class Check(StrEnum):
    """The checks, in the order in which they run."""

    LOAD = auto()
    """A checkpoint of transformers' class loads strictly, with equal tensors."""
    DTYPES = auto()
    """Tensors have transformers' dtypes: loaded with "auto" from a bf16 checkpoint that names none, and in fp16."""
    DEQUANTIZED = auto()
    """An FP8 checkpoint loads with the dtypes of the unquantized one."""
    LOGITS = auto()
    MEDIA_LOGITS = auto()
    """Logits with an image or a clip in each sequence."""
    CACHED_STEPS = auto()
    MEDIA_CACHED_STEPS = auto()
    GREEDY = auto()
    MEDIA_GREEDY = auto()
    LEFT_PADDING = auto()
    TOKEN_LOGPROBS = auto()
    """`token_logprobs` with a mask of ones, and with an image or a clip where the class takes any; logits of text with
    holes in its mask."""
    GRADIENTS = auto()


class Outcome(StrEnum):
    """The outcome of a check."""

    EQUAL = auto()
    NOT_APPLICABLE = auto()
    """The class has nothing that the check compares."""
    UNMET = auto()
    """The family needs a package or version that is not installed."""
    DIFFERENT = auto()
    CACHE_IGNORED = auto()
    """A forward accepted the cache but did not read it."""
    RAW_ERROR = auto()
    """Our class raised an error that is not from `nrl_models.errors`, but the reference ran."""
    TYPED_ERROR = auto()
    """Our class raised an error of `nrl_models.errors`, but the reference ran."""
    NO_INPUTS = auto()
    """`nrl_models.inputs` does not support the image or audio format of the class."""
    REFERENCE_ERROR = auto()
    """transformers' class raised an error, and ours raised the same."""
    REFERENCE_INCONSISTENT = auto()
    """Ours equals transformers' cached step, and both differ from transformers' forward without a cache."""
    CRASHED = auto()
    TIMED_OUT = auto()


PASSED = frozenset({Outcome.EQUAL, Outcome.NOT_APPLICABLE, Outcome.UNMET})
"""Outcomes without anything to report."""

REFERENCES_OWN = frozenset({Outcome.REFERENCE_ERROR, Outcome.REFERENCE_INCONSISTENT})
"""Outcomes caused by transformers' own class."""


class Reference(StrEnum):
    """The reference of a comparison."""

    NONE = auto()
    SAME_CALL = auto()
    """transformers' own class, called in the same way."""
    FULL_FORWARD = auto()
    """transformers' own class in one forward without a cache."""
    PLAIN_FORWARD = auto()
    """The plain implementation of a family that transformers lacks, in one forward without a cache."""
    INDEPENDENT = auto()
    """Another implementation of a family that transformers lacks."""


@dataclass(frozen=True)
class SweepOutcome:
    """The outcome of one check of one architecture.

    Args:
        architecture: Its registered name.
        check: The check.
        outcome: The outcome.
        reference: The reference of the comparison.
        max_diff: Largest difference, relative to the largest magnitude of the reference if that is above one. None if
            nothing was compared.
        error_type: Class name of the error. Empty without an error.
        message: The error or the difference on one line.
        function: The function that raised the error, as `module:qualname`. Empty without an error.
        seconds: Wall-clock time.
        versions: Versions of the packages that influence the outcome.
    """

    architecture: str
    check: Check
    outcome: Outcome
    reference: Reference = Reference.NONE
    max_diff: float | None = None
    error_type: str = ""
    message: str = ""
    function: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def part(self) -> Check:
        """The check."""
        return self.check

    def to_json(self) -> dict[str, Any]:
        """The fields, for a line of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SweepOutcome:
        """Read a line of JSON. Raises `ValueError` or `TypeError` if it is not an outcome."""
        enums = {"check": Check, "outcome": Outcome, "reference": Reference}
        return cls(**values | {name: enum(values[name]) for name, enum in enums.items()})
