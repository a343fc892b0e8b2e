"""The source of a failure: files, config, tokenizer, model or engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nrl_models.certify.check_result import Side
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.consistency.verdict import Party, Verdict
from nrl_models.errors import (
    CheckpointError,
    ConfigurationError,
    EngineError,
    EngineUnavailableError,
    Problem,
    ProblemKind,
    ShardingError,
    StateDictError,
    UnknownArchitectureError,
)

_LAYER = re.compile(r"\.\d+\.")


def shows_fault(error: BaseException) -> bool:
    """Return True if an error shows a fault of the checkpoint or the engine.

    An engine that is not available, and a mesh that does not fit the model, show none.
    """
    if isinstance(error, EngineUnavailableError | ShardingError):
        return False
    return isinstance(error, StateDictError | EngineError)


def side_of_error(error: BaseException) -> Side | None:
    """Return the source of an error that loading a checkpoint or running an engine raised; None if it is unknown.

    Tensors with other names or shapes than the model's may be damaged files or a wrong configuration. The configuration
    is the source if the difference is the same in every layer, or if complete layers are missing or surplus.
    """
    if isinstance(error, EngineError):
        return Side.ENGINE
    if isinstance(error, ConfigurationError | UnknownArchitectureError):
        return Side.CONFIG
    if isinstance(error, StateDictError):
        is_of_config = any(CONFIG_NAME in (problem.file or "", problem.subject) for problem in error.problems)
        return Side.CONFIG if is_of_config or _is_in_every_layer(error.problems) else Side.FILES
    text = str(error)
    if CONFIG_NAME in text:
        return Side.CONFIG
    return Side.FILES if isinstance(error, CheckpointError | OSError) else None


def _is_in_every_layer(problems: Sequence[Problem]) -> bool:
    """Return True if tensors differ as they would with a wrong size in the configuration."""
    shapes = [problem.subject for problem in problems if problem.kind is ProblemKind.SHAPE]
    others = [problem.subject for problem in problems if problem.kind is not ProblemKind.SHAPE]
    return (len(shapes) > 1 and not others and _repeats(shapes)) or (not shapes and _are_complete_layers(others))


def _repeats(names: Iterable[str]) -> bool:
    """Return True if every name occurs with several layer numbers, or has no layer number."""
    numbers: dict[str, int] = {}
    for name in names:
        pattern = _LAYER.sub(".*.", name)
        numbers[pattern] = numbers.get(pattern, 0) + 1
    return all(count > 1 for pattern, count in numbers.items() if "*" in pattern)


def _are_complete_layers(names: Sequence[str]) -> bool:
    """Return True if all names are in layers, with an attention's and an MLP's tensors in each."""
    layers: dict[str, int] = {}
    for name in names:
        match = _LAYER.search(name)
        if match is None:
            return False
        layers[name[: match.end()]] = layers.get(name[: match.end()], 0) + 1
    return bool(layers) and min(layers.values()) >= 5 and len(set(layers.values())) == 1


def side_of_verdict(verdict: Verdict | None) -> Side | None:
    """Return the side that a verdict names; None if it names none or both."""
    parties = set(verdict.at_fault) if verdict else set()
    sides = {Side.MODEL if party is Party.TRAINER else Side.ENGINE for party in parties}
    return sides.pop() if len(sides) == 1 else None
