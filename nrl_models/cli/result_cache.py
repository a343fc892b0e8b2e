"""Keep results of commands that describe a checkpoint, because importing transformers takes seconds.

A result is used again only if nothing that could change it has changed: the files of the checkpoint, of nrl_models and
of installed packages, the options, and environment variables.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import nrl_models
from nrl_models.cli.console import output
from nrl_models.common.checkpoint.local_path import cache_directory
from nrl_models.common.process_state import no_collections

HEAVY = frozenset({"torch", "transformers"})
"""Modules that a stored result spares."""

FAMILY_GROUPS = ("nrl_models.families", "nrl_models.configs")
"""Entry points of other packages whose code may change a result."""

VARIABLES = ("NRL_", "HF_", "TRANSFORMERS_")
"""Prefixes of environment variables that may change a result."""

MOST_FILES = 4096
"""Largest number of files in a directory whose results are kept."""

MOST_RESULTS = 256
"""Number of results to keep."""


def cached_result(command: str, path: Path | None, options: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """Return the result of `compute`, which may be from an earlier process. Repeats its warnings.

    Computes and does not store if the process has imported torch already, because its state may matter; if other
    packages register families; or if `path` is a Hub repository.

    Args:
        command: Name of the command.
        path: Checkpoint directory or file; None if the result depends on no checkpoint.
        options: Options of the command, as JSON.
        compute: Compute the result, as JSON. Imports torch.
    """
    if HEAVY & sys.modules.keys() or (state := _state(path)) is None:
        return _as_json(compute())
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
    asked = [command, str(path), options, output.quiet]
    key = json.dumps([asked, state, variables, sys.version, sys.path])
    file = cache_directory() / "results" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(file.read_text(encoding="utf-8"))
        result, messages = entry["result"], [(str(kind), str(text)) for kind, text in entry["messages"]]
        file.touch()
        _repeat(messages)
        return result
    with _recorded() as recorded:
        with no_collections():
            import_module("nrl_models.auto")  # most of the time, and hardly any garbage
        result = _as_json(compute())
    if _state(path) == state:  # no file changed in the meantime
        _store(file, {"result": result, "messages": recorded})
    return result


def _as_json(result: Any) -> Any:
    """Convert a result to JSON and back, as if it had been read from a file."""
    return json.loads(json.dumps(result))


def _state(path: Path | None) -> Any:
    """Return the state of all files that a result depends on; None if that is unknown."""
    from importlib.metadata import entry_points  # not at the top, where help texts would wait for it

    transformers = find_spec("transformers")
    origin = Path(str(transformers and transformers.origin)).parts
    is_installed = "site-packages" in origin or "dist-packages" in origin  # not a checkout, whose files may change
    if not is_installed or any(entry_points(group=group) for group in FAMILY_GROUPS):
        return None
    try:
        folders = [_files(folder) for folder in (path, Path(nrl_models.__file__).parent) if folder is not None]
    except OSError:
        return None
    return None if None in folders else [folders, _distributions()]


def _files(path: Path) -> list[Any] | None:
    """Return name, size, inode and times of a file or of all files in a directory; None if there are too many."""
    files = list(islice(_walk(path), MOST_FILES + 1))
    return None if len(files) > MOST_FILES else [_stat(file) for file in sorted(files)]


def _walk(path: Path) -> Iterator[str]:
    if not path.is_dir():
        path.stat()  # raises if there is no such file
        yield str(path)
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield folder
        yield from (os.path.join(folder, name) for name in files)


def _stat(file: str) -> list[Any]:
    file_stat = os.stat(file)
    times = [] if stat.S_ISDIR(file_stat.st_mode) else [file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns]
    return [file, os.path.realpath(file), file_stat.st_ino, *times]


def _distributions() -> list[tuple[str, int]]:
    """Return the metadata directories of installed packages, whose names have versions, and when they were written."""
    distributions = []
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            distributions += [
                (entry.path, entry.stat().st_mtime_ns) for entry in entries if entry.name.endswith("-info")
            ]
    return sorted(distributions)


@contextmanager
def _recorded() -> Iterator[list[tuple[str, str]]]:
    """Yield a list of the warnings that are shown and the messages that nrl_models and transformers log."""
    messages: list[tuple[str, str]] = []
    show = warnings.showwarning

    def record_and_show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        messages.append(("warning", str(message)))
        show(message, category, filename, lineno, file, line)

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logger = logging.getLogger(record.name.partition(".")[0])
            handlers = [handler for handler in (*logger.handlers, *logging.getLogger().handlers) if handler is not self]
            messages.append(("log", (handlers or [self])[0].format(record)))
            if not handlers and logging.lastResort is not None:  # as without this handler
                logging.lastResort.handle(record)

    recorder = Recorder(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("nrl_models", "transformers")]
    warnings.showwarning = record_and_show
    for logger in loggers:
        logger.addHandler(recorder)
    try:
        yield messages
    finally:
        warnings.showwarning = show
        for logger in loggers:
            logger.removeHandler(recorder)


def _repeat(messages: list[tuple[str, str]]) -> None:
    for kind, text in messages:
        if kind == "warning":
            warnings.showwarning(text, UserWarning, "", 0)
        else:
            print(text, file=sys.stderr)


def _store(file: Path, entry: Any) -> None:
    """Write an entry, and delete the oldest ones. Does nothing if the directory cannot be written."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(entry), encoding="utf-8")
        part.replace(file)
        files = sorted(file.parent.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
        for old in files[:-MOST_RESULTS]:
            old.unlink()
