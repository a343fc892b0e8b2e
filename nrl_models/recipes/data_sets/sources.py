"""Read rows from a `.jsonl` file, or from a data set of the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from nrl_models.common.checkpoint.json_reading import MOST_BYTES, open_regular, parse_object
from nrl_models.common.checkpoint.local_path import as_path
from nrl_models.errors import CheckpointError, Problem, ProblemKind, RecipeError, one_line, suggestion

SUFFIXES = (".jsonl", ".json", ".jsonlines", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zip")
"""Suffixes of data files. Names of data sets on the hub have none of them, nor one that is spelled similarly."""

SECONDS = 10.0
"""Seconds to wait for the hub before only its cache is read."""


def refused(subject: str, detail: str, *advice: str) -> RecipeError:
    """Return the error for data that cannot be used."""
    return RecipeError("cannot use the data", [Problem(ProblemKind.FILE, subject, detail)], list(advice))


def local_path(path: str) -> Path:
    """Return the path of a file or directory with data, with `~` expanded. It may not exist if `path` is on the hub.

    Raises:
        RecipeError: If nothing exists there and `path` is not the name of a data set: it starts with `.`, `/` or `~`,
            has a suffix of data files, or is in an existing directory. The message has the most similar file. Also if
            no file can have that path.
    """
    try:
        file = as_path(path)
    except CheckpointError as error:
        raise RecipeError("cannot use the data", error.problems, ["correct the path"]) from error
    is_file_name = path.startswith((".", "/", "~")) or bool(get_close_matches(file.suffix, SUFFIXES, cutoff=0.8))
    if not file.exists() and "://" not in path and (is_file_name or ("/" in path and file.parent.is_dir())):
        names = [each.name for each in file.parent.glob("*") if each.suffix == ".jsonl" or each.is_dir()]
        close = [str(file.parent / name) for name in get_close_matches(file.name, names, n=1, cutoff=0.5)]
        advice = "pass a .jsonl file, or the name of a data set on the hub (owner/name)"
        raise refused(path, f"no such file{suggestion(close)}", advice)
    return file


def lines_of(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a file, one per line.

    Raises:
        RecipeError: If the file cannot be read.
        CheckpointError: If a line is not a JSON object.
    """
    try:
        with open_regular(file) as handle:
            for number, line in enumerate(iter(lambda: handle.readline(MOST_BYTES + 1), b""), 1):
                if line.strip():
                    yield parse_object(line, f"line {number}", file)
    except OSError as error:
        raise refused(str(file), f"cannot be read: {error}") from error


def data_set(path: str, name: str | None, split: str, revision: str | None) -> Any:
    """Load a data set of the hub, or of a directory.

    If the hub cannot be reached, `datasets` reads its cache. Its own requests would be repeated for a minute.

    Raises:
        RecipeError: If the package `datasets` is missing or cannot load the data set.
    """
    try:
        from datasets import config, load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise refused(path, "is not a .jsonl file, and data sets of the hub need: pip install datasets") from error
    problem = None if Path(path).is_dir() else _connection_problem(path, revision)
    was_offline = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = was_offline or problem is not None
    try:
        return load_dataset(path, name, split=split, revision=revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        if problem is not None:
            advice = "check the network, or pass a .jsonl file"
            raise refused(path, f"cannot be fetched from the hub: {one_line(problem)}", advice) from error
        raise refused(path, f"cannot be loaded by datasets: {one_line(error)}") from error
    finally:
        config.HF_HUB_OFFLINE = was_offline


def _connection_problem(name: str, revision: str | None) -> Exception | None:
    """Return the error of one request to the hub; None if the hub replied, also if the data set does not exist."""
    try:
        HfApi().dataset_info(name, revision=revision, timeout=SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return None
    except Exception as error:  # of the HTTP client, which differs between versions of huggingface_hub
        return error
    return None
