"""Errors of code that makes something of a configuration, reported as problems of the configuration."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig

from nrl_models.common.config.keys import BOOKKEEPING
from nrl_models.errors import (
    ConfigurationError,
    FamilyImportError,
    NRLModelsError,
    Problem,
    ProblemKind,
    one_line,
    shown,
)

ADVICE = "correct the configuration; if transformers' own class takes it, report a bug of this family"


@contextmanager
def blaming(config: PreTrainedConfig, what: str) -> Iterator[None]:
    """Report errors of transformers' or torch's as problems of `config`, with the keys where they came up.

    What is no error of values passes unchanged: ours, those of the disk, and of a device without memory.

    Args:
        config: the configuration.
        what: is done with it, for the message: "build LlamaForCausalLM".

    Raises:
        FamilyImportError: a package is missing that the configuration asks for.
        ConfigurationError: any other error, as its cause.
    """
    try:
        yield
    except (NRLModelsError, OSError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise FamilyImportError(f"cannot {what}, which takes another package: {one_line(error)}") from error
    except Exception as error:
        where = config.name_or_path or "the configuration"
        problems = [
            Problem(ProblemKind.CONFIG, path, f"is {shown(value)}: {one_line(error)}")
            for path, value in keys_at_fault(error, vars(config)).items()
        ] or [Problem(ProblemKind.CONFIG, "the configuration", one_line(error))]
        raise ConfigurationError(f"cannot {what}: {where}", problems, [ADVICE]) from error


def keys_at_fault(error: BaseException, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were read where an error came up, as far as code and message tell.

    Those that the innermost line of transformers' code names; else those that its innermost function reads and whose
    type the message quotes. Of these the ones that are zero or negative, or that the message quotes, if some are.

    Args:
        error: caught.
        values: of the configuration, by key; nested ones as objects or mappings.

    Returns:
        By path; empty if none can be found.
    """
    message, named = str(error), dict(_flat(values, ""))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [summary.line or "" for summary in traceback.extract_tb(error.__traceback__)]
    upstream = [
        (set(re.findall(r"\w+", line)), frame.f_code)
        for frame, line in zip(reversed(frames), reversed(lines), strict=True)
        if re.search(r"\b(transformers|families)\b", frame.f_code.co_filename)
    ]
    for words, _ in upstream:
        if found := _among(named, words):
            not_positive = {
                path: value for path, value in found.items() if isinstance(value, (int, float)) and value <= 0
            }
            return not_positive or {path: value for path, value in found.items() if str(value) in message} or found
    for _, code in upstream:
        found = _among(named, {*code.co_names, *(name for name in code.co_consts if isinstance(name, str))})
        if quoted := {path: value for path, value in found.items() if f"'{type(value).__name__}'" in message}:
            return quoted
    return {}


def _among(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if path.rpartition(".")[2] in names}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            yield from _flat(vars(value), f"{prefix}{key}.")
        elif isinstance(key, str) and not key.startswith("_") and key not in BOOKKEEPING - {"quantization_config"}:
            yield f"{prefix}{key}", value
            if isinstance(value, Mapping):
                yield from _flat(value, f"{prefix}{key}.")
