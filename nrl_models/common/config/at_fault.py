"""Report errors of code that processes a configuration as problems of the configuration's keys."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig

from nrl_models.common.config.keys import BOOKKEEPING, is_token_id
from nrl_models.errors import (
    ConfigurationError,
    FamilyImportError,
    NRLModelsError,
    Problem,
    ProblemKind,
    one_line,
    shown,
)

OR_REPORT = "; if transformers' own class accepts it, report a bug of this family"

TORCH_ARGUMENTS = {"padding_idx": "pad_token_id", "num_embeddings": "vocab_size", "embedding_dim": "hidden_size"}
"""Arguments of torch's modules that its messages name, with the keys of their values."""

_NEGATIVE = re.compile(r"negative dimension -(\d+)")
"""torch's message for a negative size."""

_NOT_SIZES = re.compile(r"(^|_)(layers?|index|idx)$")
"""Keys whose values may be negative, because they count from the end: `vision_feature_layer`."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@contextmanager
def blaming(config: PreTrainedConfig, action: str, passed: Mapping[str, Any] = _NOTHING) -> Iterator[None]:
    """Report errors of transformers and torch as problems of `config` or of keywords, with the keys that caused them.

    Errors that values do not cause pass unchanged: errors of this library, of the disk, and out-of-memory errors.

    Args:
        config: The configuration.
        action: The action, for the message: "build LlamaForCausalLM".
        passed: Values that the caller passed as keywords.

    Raises:
        FamilyImportError: If the configuration needs a package that is not installed, or that does not work here.
        ConfigurationError: For any other error, with that error as its cause.
    """
    try:
        yield
    except (NRLModelsError, OSError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        reason = f"a package is missing or cannot be used here: {one_line(error)}"
        raise FamilyImportError(f"cannot {action}, because {reason}") from error
    except Exception as error:
        where = config.name_or_path or "the configuration"
        passed = {**dict(_flat(passed, "")), **passed}
        causes = keys_at_fault(error, vars(config), passed, type(config))
        problems = [
            Problem(ProblemKind.CONFIG, path, f"{verb} {shown(value)}: {one_line(error)}")
            for path, value in causes.items()
            for verb in ["was passed as" if path in passed else "is"]
        ]
        suspects = ", ".join(passed) + " or the configuration" if passed else "the configuration"
        advice = f"correct {suspects}{OR_REPORT}"
        if causes and causes.keys() <= passed.keys():
            advice = f"pass a different value for {' and '.join(causes)}, or leave it out"
        if not problems:
            argument = re.search(r"(attn|experts)_implementation", str(error))
            advice = f"pass a supported {argument[0]} to from_pretrained, or leave it out" if argument else advice
            name = argument[0] if argument else "the configuration"
            problems = [Problem(ProblemKind.CONFIG, name, one_line(error))]
        raise ConfigurationError(f"cannot {action}: {where}", problems, [advice]) from error


def keys_at_fault(
    error: BaseException,
    values: Mapping[str, Any],
    passed: Mapping[str, Any] = _NOTHING,
    config_class: type[PreTrainedConfig] = PreTrainedConfig,
) -> dict[str, Any]:
    """Find configuration values that caused an error, from code and message.

    If torch does not have a dtype, returns the keys with that dtype. Otherwise, candidates are the values that the
    innermost statement of transformers' code names. Otherwise, those that the innermost function reads and whose type
    is in the message. If some candidates are zero or negative, only these are returned; otherwise, if some were passed,
    only these; otherwise, if some are quoted or named in the message, only these.

    If torch reports a negative dimension, candidates must be negative. If the code names none, for example because a
    module has copied the value, returns the negative sizes of the configuration that divide the dimension.

    Args:
        error: The caught error.
        values: Values of the configuration by key; nested ones as objects or mappings.
        passed: Values that the caller passed as keywords, by path.
        config_class: Class of the configuration. A line that names one of its properties also names the values that
            the property reads.

    Returns:
        Values by path; empty if none can be found.
    """
    if isinstance(error, AttributeError) and error.obj is torch:
        return {path: value for path, value in _dtypes(values, "") if value == error.name}
    message, named = str(error), {**dict(_flat(values, "")), **passed}
    arguments = {key for argument, key in TORCH_ARGUMENTS.items() if argument in message.lower()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [_statement(summary) for summary in traceback.extract_tb(error.__traceback__)]
    negative = _NEGATIVE.search(message)
    upstream = [
        (set(re.findall(r"\w+", line)), frame.f_code)
        for frame, line in zip(reversed(frames), reversed(lines), strict=True)
        if re.search(r"\b(transformers|families)\b", frame.f_code.co_filename)
    ]
    for words, _ in upstream:
        candidates = _among(named, words | _read_by_properties(config_class, words))
        if negative:
            candidates = {
                path: value for path, value in candidates.items() if type(value) in (int, float) and value < 0
            }
        if candidates:
            candidates |= _among(named, arguments)
            of_caller = {path: value for path, value in candidates.items() if path in passed}
            numbers = {path: value for path, value in candidates.items() if type(value) in (int, float)}
            not_positive = {path: value for path, value in numbers.items() if value <= 0}
            quoted = {path: value for path, value in candidates.items() if str(value) in message}
            return not_positive or of_caller or quoted or _among(candidates, arguments) or candidates
    if negative:
        return {path: value for path, value in named.items() if _is_factor(path, value, int(negative[1]))}
    for _, code in upstream:
        candidates = _among(named, {*code.co_names, *(name for name in code.co_consts if isinstance(name, str))})
        if quoted := {path: value for path, value in candidates.items() if f"'{type(value).__name__}'" in message}:
            return {path: value for path, value in quoted.items() if path in passed} or quoted
    return {}


def _statement(summary: traceback.FrameSummary) -> str:
    """Return the source of a traceback's entry, with all lines of an expression that has several."""
    first = summary.lineno or 0
    return "".join(
        linecache.getline(summary.filename, line) for line in range(first, (summary.end_lineno or first) + 1)
    )


def _is_factor(path: str, value: Any, dimension: int) -> bool:
    """Return True for a negative size that divides a dimension."""
    key = path.rpartition(".")[2]
    is_size = type(value) is int and value < 0 and not is_token_id(key) and not _NOT_SIZES.search(key)
    return is_size and dimension % value == 0


def _read_by_properties(config_class: type[PreTrainedConfig], names: set[str]) -> set[str]:
    """Return the attributes that properties of these names read."""
    properties = [member for name in names if isinstance(member := getattr(config_class, name, None), property)]
    return {name for member in properties if member.fget is not None for name in member.fget.__code__.co_names}


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


def _dtypes(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in ("dtype", "torch_dtype"):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _dtypes(value, f"{prefix}{key}.")
