"""The manifest of a resume checkpoint: its files with size and hash, and the training state.

The manifest is JSON and has a hash of itself. The hashes are xxh3, which takes much less time than writing the files.
They detect errors of disks, networks and copies. They do not protect against a forged manifest, so every field is also
validated.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from nrl_models.common.checkpoint.json_reading import parse_object, read_bytes
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, MANIFEST_NAME
from nrl_models.common.config.types import is_same_value
from nrl_models.common.value_checks import is_number
from nrl_models.distributed.resume_checkpoints.scalars import Scalar
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown

FORMAT = 2
"""Format of checkpoints that this version writes. It also reads format 1, which has scalars without types."""


class StatePart(StrEnum):
    """Contents of a file of tensors, and the prefix of its name."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"


_FILE_NAME = re.compile(rf"({'|'.join(StatePart)})-\d{{5,9}}-\d{{5,9}}\.safetensors|{re.escape(CONFIG_NAME)}")
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file at the time it was written.

    Args:
        bytes: Size of the file.
        xxh3_128: Hash of its contents, as hexadecimal digits.
    """

    bytes: int
    xxh3_128: str

    @staticmethod
    def of(file: Path) -> WrittenFile:
        """Return size and hash of a file.

        Raises:
            OSError: If it cannot be read.
        """
        import xxhash  # only saving needs it

        with open(file, "rb", buffering=0) as handle:
            digest = hashlib.file_digest(handle, xxhash.xxh3_128)
            return WrittenFile(handle.tell(), digest.hexdigest())


@dataclass(frozen=True, slots=True)
class States:
    """State of an optimizer for a parameter.

    Args:
        scalars: Numbers by name.
        tensors: Names of tensors with the parameter's shape.
    """

    scalars: dict[str, Scalar]
    tensors: list[str]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of an optimizer.

    Args:
        options: Learning rate and other options.
        parameters: Sorted names of its parameters.
    """

    options: dict[str, Any]
    parameters: list[str]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """An optimizer without its tensors.

    Args:
        groups: Parameter groups.
        states: State of each parameter that has one.
    """

    groups: list[ParameterGroup]
    states: dict[str, States]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a resume checkpoint.

    Args:
        files: All files except the manifest, by name.
        progress: Progress passed by the caller.
        optimizer: State of the optimizer; None if it was not saved.
        format: Format of the checkpoint.
    """

    files: dict[str, WrittenFile]
    progress: dict[str, Any]
    optimizer: OptimizerFacts | None
    format: int = FORMAT

    def files_of(self, *parts: StatePart) -> list[str]:
        """Return the names of all files with these parts."""
        return sorted(name for name in self.files if name.startswith(tuple(f"{part}-" for part in parts)))

    def checked(self) -> Manifest:
        """Return a copy, as it will be read again.

        Raises:
            CheckpointError: If JSON cannot represent a value, or changes it. Lists all such values.
        """
        try:
            manifest = Manifest.parse(self.rendered())
            if problems := list(_changed_by_json(self.progress, manifest.progress, "progress")):
                raise _refused(problems)
            return manifest
        except CheckpointError as error:
            raise CheckpointError("cannot save this in a checkpoint", error.problems) from error
        except (TypeError, ValueError, RecursionError) as error:
            detail = f"cannot be represented in JSON: {error}"
            problem = Problem(ProblemKind.FORMAT, "progress, or the optimizer's options and numbers", detail)
            advice = ["give finite numbers, text, lists and dictionaries; `tensor.tolist()` of a tensor"]
            raise CheckpointError("cannot save this in a checkpoint", [problem], advice) from error

    def rendered(self) -> bytes:
        """Return a manifest from `checked` or `parse` as JSON bytes."""
        return _rendered(self)

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            CheckpointError: If it is damaged, or fields have invalid types or values. Lists all of them.
        """
        content = parse_object(data, MANIFEST_NAME, "a checkpoint").get("manifest")
        try:
            is_intact = _rendered(content) == data
        except ValueError:  # numbers that JSON lacks
            is_intact = False
        if not is_intact:
            raise _refused(
                [Problem(ProblemKind.FILE, MANIFEST_NAME, "is damaged: its hash differs from the recorded one")]
            )
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            if not is_same_value(content["format"], 1):
                detail = f"is {shown(content['format'])}; this version of the library reads 1 and {FORMAT}"
                raise _refused([Problem(ProblemKind.FORMAT, "format", detail, MANIFEST_NAME)])
            content = _upgraded(content)
        problems: list[Problem] = []
        manifest = _as(Manifest, content, "", problems)
        if problems or (problems := list(_out_of_range(manifest))):
            raise _refused(problems)
        return manifest


def read_manifest(version: Path) -> Manifest:
    """Read the manifest of a version.

    Raises:
        CheckpointError: If there is none. See also `Manifest.parse`.
    """
    try:
        data = read_bytes(version / MANIFEST_NAME)
    except OSError as error:
        raise _refused([Problem(ProblemKind.FILE, MANIFEST_NAME, f"cannot be read: {error}")]) from error
    manifest = Manifest.parse(data)
    if CONFIG_NAME not in manifest.files or not manifest.files_of(StatePart.WEIGHTS):
        raise _refused([Problem(ProblemKind.FORMAT, "files", f"lacks {CONFIG_NAME} or weights", MANIFEST_NAME)])
    return manifest


def _rendered(content: Any) -> bytes:
    """Render `content` in the only form that `parse` accepts, so that any changed byte is detected."""
    import xxhash  # only saving needs it

    text = json.dumps(content, allow_nan=False, indent=1, default=_fields)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{{"xxh3_128": "{digest}", "manifest": {text}}}\n'.encode()


_hints_of = cache(get_type_hints)


def _fields(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} {shown(value)}")
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _refused(problems: list[Problem]) -> CheckpointError:
    return CheckpointError("not a manifest of a checkpoint", problems)


def _as(kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    """Convert a JSON value to an instance of `kind`: a dataclass, `dict[str, ...]`, `list[...]` or a plain type.

    A value of another type is added to `problems`. Do not use the result if there are problems.
    """

    def wrong(expected: str) -> Any:
        actual = "null" if value is None else f"{type(value).__name__} {shown(value)}"
        problems.append(
            Problem(ProblemKind.FORMAT, where or "the manifest", f"is {actual}, expected {expected}", MANIFEST_NAME)
        )

    origin, args = get_origin(kind) or kind, get_args(kind)
    if NoneType in args:
        return None if value is None else _as(args[0], value, where, problems)
    if kind is Any:
        return value
    if is_dataclass(kind) or origin is dict:
        if not isinstance(value, dict):
            return wrong("an object")
        inside = {key: f"{where}.{key}" if where else key for key in value}
        if origin is dict:
            return {key: _as(args[1], inner, inside[key], problems) for key, inner in value.items()}
        hints = _hints_of(kind)
        for key in sorted(hints.keys() ^ value.keys()):
            detail = "is missing" if key in hints else "is not a field"
            problems.append(Problem(ProblemKind.FORMAT, f"{where}.{key}" if where else key, detail, MANIFEST_NAME))
        known = {key: _as(hints[key], inner, inside[key], problems) for key, inner in value.items() if key in hints}
        return known if problems else kind(**known)
    if origin is list:
        if not isinstance(value, list):
            return wrong("a list")
        return [_as(args[0], inner, f"{where}[{index}]", problems) for index, inner in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        return wrong({int: "a whole number", float: "a number", str: "text"}[kind])
    return value


def _changed_by_json(value: Any, read: Any, where: str) -> Iterator[Problem]:
    """Find values that JSON changes, except tuples, which become lists."""
    if isinstance(value, dict) and isinstance(read, dict) and value.keys() == read.keys():
        for key, inner in value.items():
            yield from _changed_by_json(inner, read[key], f"{where}.{key}")
    elif isinstance(value, (list, tuple)) and isinstance(read, list):
        for index, (inner, other) in enumerate(zip(value, read, strict=True)):
            yield from _changed_by_json(inner, other, f"{where}[{index}]")
    elif value != read:
        detail = f"is {shown(value)}, which JSON gives back as {shown(read)}; expected JSON values, and text as keys"
        yield Problem(ProblemKind.FORMAT, where, detail)


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of format 1 in the current format. Its scalars were loaded as fp32 tensors."""
    optimizer = content.get("optimizer")
    states = optimizer.get("states") if isinstance(optimizer, dict) else None
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and isinstance(scalars := state.get("scalars"), dict):
            state["scalars"] = {key: {"type": "torch.float32", "value": value} for key, value in scalars.items()}
    return content | {"format": FORMAT}


def _out_of_range(manifest: Manifest) -> Iterator[Problem]:
    """Find values of a manifest that have the right type but are out of range."""

    def problem(where: str, detail: str) -> Problem:
        return Problem(ProblemKind.FORMAT, where, detail, MANIFEST_NAME)

    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name):
            yield problem(f"files.{name}", "is not a name of a checkpoint's files")
        if not 0 <= file.bytes < 2**63:
            yield problem(f"files.{name}.bytes", f"is {shown(file.bytes)}, which is not a size")
        if not _DIGEST.fullmatch(file.xxh3_128):
            yield problem(f"files.{name}.xxh3_128", f"is {shown(file.xxh3_128)}, expected 32 hexadecimal digits")
    step = manifest.progress.get("step", 0)
    if type(step) is not int or not 0 <= step < 2**63:
        yield problem("progress.step", f"is {shown(step)}, expected a whole number, 0 or more")
    if manifest.optimizer is not None:
        yield from (problem(f"optimizer.{where}", detail) for where, detail in _wrong_in(manifest.optimizer))


def _wrong_in(optimizer: OptimizerFacts) -> Iterator[tuple[str, str]]:
    names = Counter(name for group in optimizer.groups for name in group.parameters)
    for name, count in names.items():
        if count > 1:
            yield "groups", f"have {name} {count} times"
    for number, group in enumerate(optimizer.groups):
        for key, value in group.options.items():
            if not all(map(_is_plain, value if isinstance(value, list) else [value])):
                yield f"groups[{number}].options.{key}", f"is {shown(value)}, expected a plain value or a list of them"
    for name, states in optimizer.states.items():
        if name not in names:
            yield f"states.{name}", "is a parameter of no group"
        if set(states.tensors) & states.scalars.keys() or len(set(states.tensors)) < len(states.tensors):
            yield f"states.{name}", "has a state twice"
        for key, scalar in states.scalars.items():
            if not scalar.is_valid:
                detail = f"is {shown(scalar.value)} of type {shown(scalar.type)}, expected a finite number of its type"
                yield f"states.{name}.scalars.{key}", detail


def _is_plain(value: Any) -> bool:
    """Return True for text, bools, None, and numbers that a float can represent."""
    return isinstance(value, (str, bool, NoneType)) or is_number(value)
