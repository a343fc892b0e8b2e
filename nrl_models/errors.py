"""What goes wrong, as types. Every message says what was wrong, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class NRLModelsError(Exception):
    """Base of every error this library raises on purpose."""


def in_words(error: BaseException) -> str:
    """An error of someone else's in one line, to be quoted in one's own."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


class ProblemKind(StrEnum):
    """What is wrong, in a word."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    DUPLICATED = "duplicated"
    PARTIAL = "partial"
    SHAPE = "shape"
    DTYPE = "dtype"
    TIED = "tied"
    FILE = "file"
    INDEX = "index"
    FORMAT = "format"
    CONFIG = "config"
    UNKNOWN = "unknown"
    """A configuration key that nothing reads."""
    UNSUPPORTED = "unsupported"
    """A configuration value that the model does not honour."""
    MESH = "mesh"
    PLAN = "plan"
    DIVIDE = "divide"
    """A size that ranks do not divide."""
    CONTEXT = "context"
    """What context parallelism does not compute."""
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint, a state dict, a configuration or a mesh.

    Args:
        kind: what sort of problem it is.
        subject: the key or file it is about.
        detail: what was found and what was expected.
        file: the file it was found in, where there is one.
        advice: what to do about it, where that is known; an error says it once for all problems that share it.
    """

    kind: ProblemKind
    subject: str
    detail: str
    file: str | None = None
    advice: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file else ""
        return f"{self.kind}: {self.subject}{where}: {self.detail}"


class StateDictError(NRLModelsError, ValueError):
    """Tensors do not fit the model. Nothing has been written.

    Attributes:
        problems: everything that is wrong, not only the first.
    """

    def __init__(self, summary: str, problems: Iterable[Problem], advice: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        lines = [f"{summary} ({len(self.problems)} problem{'s' if len(self.problems) != 1 else ''})"]
        lines += [f"  - {problem}" for problem in self.problems]
        own_advice = (problem.advice for problem in self.problems if problem.advice)
        lines += [f"  What to do: {line}" for line in dict.fromkeys((*advice, *own_advice))]
        super().__init__("\n".join(lines))


class CheckpointError(StateDictError):
    """A checkpoint's files are damaged, unsafe, of another format or of another model."""


class ConfigurationError(StateDictError):
    """A configuration has keys that nobody reads, or values that the model does not honour."""


class UnknownArchitectureError(NRLModelsError, ValueError):
    """No class is known for an architecture, or it is not of the kind asked for."""


class FamilyImportError(NRLModelsError, ImportError):
    """A registered family could not be imported: it needs another version, or it is broken."""


class RegistrationError(NRLModelsError, ValueError):
    """A registration is malformed or would shadow another one."""


class RemoteCodeError(NRLModelsError, ValueError):
    """A checkpoint brings its own code, and running it was not allowed."""


class UnknownArgumentError(NRLModelsError, TypeError):
    """A keyword that neither the call nor the model's configuration knows."""


class ShardingError(StateDictError):
    """A mesh, a plan or a rank does not fit: raised on every rank, before memory is spent."""


class DeviceError(NRLModelsError, RuntimeError):
    """Weights are to be loaded to meta, where none can be."""


class HeadError(NRLModelsError, ValueError):
    """A model ends with something else than an output embedding with a scale or a soft cap."""


class EngineError(NRLModelsError, RuntimeError):
    """An inference engine is missing, refuses, gives no log-probabilities, times out or has died."""


class ConsistencyError(NRLModelsError, ValueError):
    """A consistency check cannot be run as asked for: lengths, tokens, text or earlier results do not fit."""
