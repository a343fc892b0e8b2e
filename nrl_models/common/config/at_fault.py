"""Errors of code that makes something of a configuration, told as what is wrong with the configuration."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from nrl_models.common.config.keys import BOOKKEEPING
from nrl_models.errors import ConfigurationError, NRLModelsError, Problem, ProblemKind, one_line, shown

ADVICE = "correct the configuration; transformers' own class fails on it in the same way"


@contextmanager
def blaming(config: PreTrainedConfig, what: str) -> Iterator[None]:
    """Tell errors of transformers' or torch's as what is wrong with `config`, with the keys where they came up.

    What is missing (an ImportError) or no error of values (ours, KeyboardInterrupt) passes.

    Args:
        config: what is made something of.
        what: is made of it, for the message: "build LlamaForCausalLM".

    Raises:
        ConfigurationError: any other error, as its cause.
    """
    try:
        yield
    except (NRLModelsError, ImportError):
        raise
    except Exception as error:
        where = config.name_or_path or "the configuration"
        problems = [
            Problem(ProblemKind.CONFIG, path, f"is {shown(value)}: {one_line(error)}")
            for path, value in keys_at_fault(error, vars(config)).items()
        ] or [Problem(ProblemKind.CONFIG, "the configuration", one_line(error))]
        raise ConfigurationError(f"cannot {what}: {where}", problems, [ADVICE]) from error


def keys_at_fault(error: BaseException, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were read in the innermost line of transformers' code that names keys of a configuration.

    Those that the error's message quotes, if it quotes some.

    Args:
        error: caught.
        values: of the configuration, by key; nested ones as objects or mappings.

    Returns:
        By path; empty if no line names a key.
    """
    named = dict(_flat(values, ""))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if re.search(r"\b(transformers|families)\b", frame.filename) is None:
            continue
        words = set(re.findall(r"\w+", frame.line or ""))
        found = {path: value for path, value in named.items() if path.rpartition(".")[2] in words}
        if found:
            quoted = {path: value for path, value in found.items() if str(value) in str(error)}
            return quoted or found
    return {}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            yield from _flat(vars(value), f"{prefix}{key}.")
        elif not key.startswith("_") and (key not in BOOKKEEPING or key == "architectures"):
            yield f"{prefix}{key}", value
