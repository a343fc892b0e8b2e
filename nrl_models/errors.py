"""Error types. Each message has the cause, the expected value and a remedy."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum, auto
from typing import Any, TypeVar

LONGEST = 2_000
"""Largest number of characters in one line of a message. A name may have millions."""


def visible(text: str) -> str:
    """Return `text` in one line, with control characters escaped, and truncated if it is very long.

    Names of tensors and files are untrusted: an escape sequence could clear the screen or forge a line.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def type_shown(value: object) -> str:
    """Return the type of a value for a message: `a list`, or `the class Adam` if it is a class."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def shown_or_type(value: object) -> str:
    """Return the `repr` of a string, a number or a class for a message, and the type of anything else."""
    return shown(value) if isinstance(value, (str, int, float, type)) else type_shown(value)


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Join names with commas, and add the number of names beyond the first `limit`."""
    names = list(names)
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


MOST_ITEMS = 20
"""Largest number of problems that a message lists."""


def itemised(problems: Sequence[str]) -> list[str]:
    """Return one message line per problem, and the number of problems beyond the first `MOST_ITEMS`."""
    more = [f"  - and {len(problems) - MOST_ITEMS} more"] if len(problems) > MOST_ITEMS else []
    return [*(f"  - {problem}" for problem in problems[:MOST_ITEMS]), *more]


def did_you_mean(name: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """Return ` (did you mean ...?)` with the `count` most similar names, or an empty string if none is similar."""
    close = get_close_matches(name, list(known), n=count, cutoff=cutoff) if isinstance(name, str) else []
    return suggestion(close)


def suggestion(names: Sequence[str]) -> str:
    """Return ` (did you mean ...?)` with all `names`, or an empty string if there are none."""
    return f" (did you mean {' or '.join(names)}?)" if names else ""


class NRLModelsError(Exception):
    """Base class of all errors that this library raises intentionally.

    Args:
        lines: Lines of the message. Control characters are escaped, see `visible`.
    """

    def __init__(self, *lines: object) -> None:
        super().__init__()
        self.args = tuple(visible(str(line)) for line in lines)  # OSError would read them as a number and a file

    def __str__(self) -> str:
        return "\n".join(self.args)


def one_line(error: BaseException) -> str:
    """Return another library's error in one line, to quote it in a message.

    If the error has no message, like many assertions, return the line of code that raised it.
    """
    text = " ".join(str(error).split()).rstrip(".")
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = frames[-1].line or ""
    return f"{type(error).__name__}: {text}"


class ProblemKind(StrEnum):
    """Kind of a problem."""

    MISSING = auto()
    UNEXPECTED = auto()
    DUPLICATED = auto()
    PARTIAL = auto()
    SHAPE = auto()
    DTYPE = auto()
    TIED = auto()
    FILE = auto()
    REPLACED = auto()
    """A file that another process replaced while the checkpoint was read."""
    INDEX = auto()
    FORMAT = auto()
    CONFIG = auto()
    UNKNOWN = auto()
    """A configuration key that no code reads, and that is similar to a known one."""
    UNSUPPORTED = auto()
    """A configuration value that the model does not honor."""
    MESH = auto()
    PLAN = auto()
    INDIVISIBLE = auto()
    """A size that is not divisible by the number of ranks."""
    PIPELINE = auto()
    """A model whose layers cannot be split into pipeline stages."""
    RANK = auto()
    """A rank has different facts than the others, or an error."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A single problem of a checkpoint, a state dict, a configuration or a mesh.

    Args:
        kind: Kind of the problem.
        subject: The key, file or rank that has the problem.
        detail: Found and expected values.
        file: The file that has the problem, if there is one.
        advice: A remedy. If several problems share it, an error lists it once.
    """

    kind: ProblemKind
    subject: str
    detail: str
    file: str | None = None
    advice: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file else ""
        return visible(f"{self.kind}: {self.subject}{where}: {self.detail}")


def details_of(problems: Iterable[Problem]) -> str:
    """Join subjects and details of problems, for a message of one line."""
    return "; ".join(f"{problem.subject} {problem.detail}" for problem in problems)


class StateDictError(NRLModelsError, ValueError, RuntimeError):
    """Tensors do not fit the model. Nothing has been written.

    Also a `RuntimeError`, which torch and transformers raise for mismatched shapes.

    Attributes:
        problems: All problems, not only the first.
    """

    def __init__(self, summary: str, problems: Iterable[Problem], advice: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        self._arguments = summary, self.problems, tuple(advice)
        lines = [f"{summary} ({len(self.problems)} problem{'s' if len(self.problems) != 1 else ''})"]
        lines += [f"  - {problem}" for problem in self.problems]
        own_advice = (problem.advice for problem in self.problems if problem.advice)
        lines += [f"  What to do: {line}" for line in dict.fromkeys((*advice, *own_advice))]
        super().__init__(*lines)

    def __reduce__(self) -> Any:
        return type(self), self._arguments


class CheckpointError(StateDictError, OSError):
    """A checkpoint's files are missing, damaged, unsafe, in an unsupported format, or do not fit the model.

    Also an `OSError`, which transformers raises for missing folders and files.
    """


class SaveError(NRLModelsError, OSError):
    """Files cannot be saved: the disk is full or read-only, or another process does not make way."""


class ConfigurationError(StateDictError):
    """A configuration has misspelled keys, or values that the model does not honor."""


class RecipeError(StateDictError):
    """A recipe has unknown keys, lacks required ones, or has invalid values. Nothing was started."""


class UnknownArchitectureError(NRLModelsError, ValueError):
    """An architecture is unknown, or not of the requested kind."""


class FamilyImportError(NRLModelsError, ImportError):
    """A registered family could not be imported: it needs another version of a package, or is broken."""


class UnmetRequirementError(FamilyImportError):
    """A package that a registered family needs is missing, or of another version."""


class PackageVersionError(NRLModelsError, ValueError):
    """The installed versions of two packages do not work together. A `ValueError`, as transformers raises."""


class TrainerError(NRLModelsError, ImportError):
    """A trainer is not installed, or not in a version that its adapter was written for."""


class RegistrationError(NRLModelsError, ValueError):
    """A registration is malformed or would shadow another one."""


class RemoteCodeError(NRLModelsError, ValueError):
    """A checkpoint comes with its own code, and `trust_remote_code` is not set."""


class UnknownArgumentError(NRLModelsError, TypeError):
    """A keyword is neither an option nor a configuration value, or has an invalid value."""


class UnknownOptionError(UnknownArgumentError, ValueError):
    """A string is not one of the values of an option."""


Option = TypeVar("Option", bound=StrEnum)


def parse_option(kind: type[Option], value: object, name: str, also: str = "") -> Option:
    """Return the member of an enum for a string.

    Args:
        kind: The enum.
        value: A member or its value.
        name: Name of the option, for the error.
        also: Other accepted values, for the error.

    Raises:
        UnknownOptionError: If there is no such member.
    """
    if isinstance(value, str) and value in list(kind):
        return kind(value)
    known = ", ".join(kind) + (f", {also}" if also else "")
    close = did_you_mean(value, [str(member) for member in kind])
    raise UnknownOptionError(f"{name}={shown(value)}{close}: expected {known}")


class NonFiniteError(NRLModelsError, ValueError):
    """A reward, an advantage or a log-probability is not a finite number. No weight has been changed."""


class ShardingError(StateDictError):
    """A mesh or plan does not fit the model, or ranks disagree; raised on every rank, before memory is allocated."""


class DeviceError(NRLModelsError, RuntimeError):
    """Weights are on meta, or cannot be loaded to a device, because it is meta or does not exist."""


class HeadError(NRLModelsError, ValueError):
    """A model's head is not an output embedding with an optional scale or soft cap."""


class DownloadError(NRLModelsError, RuntimeError):
    """Weights cannot be downloaded, or may not before their terms are accepted."""


class EngineError(NRLModelsError, RuntimeError):
    """An inference engine is missing, rejected a request, returned no log-probabilities, timed out or died."""


class EngineOptionError(EngineError):
    """An inference engine does not have an option, or the option has an invalid value."""


class EngineUnavailableError(EngineError):
    """An inference engine's package is not installed, or its server cannot be reached."""


class RefitUnsupportedError(EngineError):
    """An inference engine does not accept new weights with its current options."""


class MixedWeightsError(EngineError):
    """An inference engine has weights of two versions. It raises on every call until a complete refit succeeds."""


class SamplingError(NRLModelsError, ValueError):
    """A sampling parameter has the wrong type or is out of range."""


class ConsistencyError(NRLModelsError, ValueError):
    """A consistency check cannot run as requested: lengths, tokens, text or earlier results do not fit."""


class CapsuleError(NRLModelsError, ValueError):
    """A capsule is damaged, has another format version, or lacks a measurement."""


class DriftError(NRLModelsError, RuntimeError):
    """During training, trainer and engine are no longer the same model.

    Args:
        message: step and version of the weights.
        findings: causes with evidence (`nrl_models.watch.Finding`).
    """

    def __init__(self, message: str, findings: Sequence[Any]) -> None:
        super().__init__(message, *itemised([str(finding) for finding in findings]))
        self.findings = tuple(findings)
