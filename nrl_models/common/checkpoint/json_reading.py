"""Read untrusted JSON: within limits, and with errors that name the file or the value. Has no heavy imports."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from nrl_models.errors import CheckpointError, Problem, ProblemKind, one_line, shown

MOST_BYTES = 256 * 2**20
"""The largest file that is read: an index of a million tensors has half of it."""

MOST_LEVELS = 64
"""How deep objects and arrays may be nested; configurations have six levels."""

POINTER = "is a Git LFS pointer, not the file itself"
"""Detail of the problem with a file of a repository that was cloned without Git LFS."""

POINTER_ADVICE = (
    "download the files: run `git lfs install` and `git lfs pull` in the cloned repository, or use "
    "`hf download REPOSITORY --local-dir DIR`"
)


def is_pointer(data: bytes) -> bool:
    """Return True if a file's first bytes are those of a Git LFS pointer, which Git writes in place of the file."""
    return data.startswith(b"version https://git-lfs.github.com/")


def pointers_in(folder: Path) -> list[str]:
    """Return the names of files in a directory that are Git LFS pointers."""
    pointers = []
    for file in sorted(folder.glob("*")):
        with suppress(OSError), open_regular(file) as handle:
            pointers += [file.name] if is_pointer(handle.read(64)) else []
    return pointers


def read_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        file: A regular file.

    Raises:
        CheckpointError: If the file does not exist, is larger than `MOST_BYTES`, is not JSON in UTF-8, is nested deeper
            than `MOST_LEVELS`, or is not an object.
    """
    try:
        data = read_bytes(file)
    except OSError as error:
        raise _refused(file.name, file, ProblemKind.FILE, f"cannot be read: {one_line(error)}") from error
    return parse_object(data, file.name, file)


def read_bytes(file: Path) -> bytes:
    """Read a regular file, at most one byte more than `MOST_BYTES`; `parse_object` rejects longer data.

    Raises:
        OSError: If the file does not exist, is not regular, or cannot be read.
    """
    with open_regular(file) as handle:
        return handle.read(MOST_BYTES + 1)


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: If the file does not exist, is not regular, or cannot be opened.
    """
    if file.exists() and not file.is_file():  # reading a pipe would wait for a writer
        raise OSError("not a regular file")
    return open(file, "rb")


def parse_object(data: bytes, name: str, source: object, kind: ProblemKind = ProblemKind.FILE) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: Contents of a file or an answer.
        name: Name for messages.
        source: Origin of the data: a path or an address.
        kind: Kind of the problem if parsing fails.

    Raises:
        CheckpointError: See `read_object`.
    """
    if len(data) > MOST_BYTES:
        raise _refused(name, source, kind, f"has more than {MOST_BYTES:,} bytes")
    if is_pointer(data):
        raise _refused(name, source, kind, POINTER, POINTER_ADVICE)
    try:
        content = json.loads(data.decode())
    except RecursionError as error:
        raise _refused(name, source, kind, f"is nested deeper than {MOST_LEVELS} levels") from error
    except ValueError as error:
        raise _refused(name, source, kind, f"is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        type_name = "null" if content is None else type(content).__name__
        raise _refused(name, source, kind, f"is not a JSON object: it is {type_name}")
    if _is_deeper(content, MOST_LEVELS):
        raise _refused(name, source, kind, f"is nested deeper than {MOST_LEVELS} levels")
    return content


def parsed(kind: Any, content: Any, *, strict: bool = False) -> Any:
    """Build a value of an annotated type, such as a dataclass, from JSON values.

    Args:
        kind: The type.
        content: JSON values. Unless `strict`, strings also count as numbers: "nan", "inf" and "-inf".
        strict: Whether values need exactly the type of their field. Lists also count as tuples, and values of enums.

    Raises:
        ValueError: If a value is missing, unknown or of another type. The message names the first such value.
        Exception: As raised by the `__post_init__` of a dataclass.
    """
    from pydantic import ValidationError

    try:
        if strict:  # which means strict JSON values: Python values would have to be dataclasses and tuples
            # pydantic rejects JSON text with half of a surrogate pair, which stands for a byte of a file name.
            text = json.dumps([content], ensure_ascii=False).encode(errors="replace")
            _adapter(kind).validate_json(text, strict=True)
        (value,) = _adapter(kind).validate_python([content])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":
            raise first["ctx"]["error"] from None
        details = {"missing": "is missing", "unexpected_keyword_argument": "is unknown"}
        detail = details.get(first["type"], f"is {shown(first['input'])}: {first['msg']}")
        raise ValueError(f"{'.'.join(map(str, first['loc'][1:])) or 'it'} {detail}") from None
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # takes 0.1 seconds

    # In a tuple, because a dataclass itself takes no configuration.
    return TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid"))


def _refused(
    name: str,
    source: object,
    kind: ProblemKind,
    detail: str,
    advice: str = "correct it, or download or save it again",
) -> CheckpointError:
    return CheckpointError(f"cannot load {source}", [Problem(kind, name, detail, advice=advice)])


def _is_deeper(content: Any, levels: int) -> bool:
    nested = [content]
    for _ in range(levels):
        nested = [
            inner
            for outer in nested
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not nested:
            return False
    return True
