"""Limits for configuration values, so that a damaged one raises an error instead of hanging or filling memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nrl_models.errors import ConfigurationError, Problem, ProblemKind

MOST_PARTS = 20_000
"""Maximum number of layers or of experts. Configurations list the layers. Models have a few hundred at most."""

MOST_LABELS = 2**20
"""Maximum number of labels of a classifier. A configuration has a name for each label."""

MOST_ELEMENTS = 2**26
"""Maximum size of a dimension, because models build tables of this size. Six times the longest known context."""

TENSORS, TENSORS_PER_STORED = 20_000, 16
"""Maximum number of tensors in a model: a constant, plus this many per tensor of its checkpoint."""

MOST_IN_TABLE = 2**29
"""Maximum number of elements in a table that is computed when a model is built: a 22,000 x 22,000 mask."""

_PARTS = re.compile(r"(^|_)(n|num)_.*(layer|block|expert)s?$|(^|_)(layers?|depths?|experts)$")
_SIZES = re.compile(r"(_|^)(size|dims?|heads?|embeddings|positions|rank|width|channels|ctx|embd)$")
_LIMITS = ((_PARTS, MOST_PARTS), (re.compile(r"(^|_)num_labels$"), MOST_LABELS), (_SIZES, MOST_ELEMENTS))
"""Pattern of keys, and their maximum value."""

_LAYERS = re.compile(r"^(num_((hidden|encoder|decoder)_)?layers|n_layers?|(encoder|decoder)_layers|depth)$")
"""Pattern of keys with a number of layers. A negative one builds a model without layers, without an error."""


def check_limits(values: Mapping[str, Any], where: object) -> None:
    """Check that values of a configuration are within limits, before a class processes them.

    Args:
        values: Values by key, including nested configurations, as in `config.json`.
        where: Origin of the values, for the message.

    Raises:
        ConfigurationError: If there are more than `MOST_PARTS` layers or experts, more than `MOST_LABELS` labels, or a
            size above `MOST_ELEMENTS`. Also if there is a negative number of layers. Lists all problems.
    """
    problems = [*_beyond(values, ""), *negative_layers(values)]
    if problems:
        raise ConfigurationError(f"{where} has values outside the limits", problems, ["correct the configuration"])


def negative_layers(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each negative number of layers in `values` and nested configurations."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from negative_layers(value, f"{prefix}{key}.")
        elif isinstance(key, str) and _LAYERS.search(key) and isinstance(value, (int, float)) and value < 0:
            yield Problem(ProblemKind.CONFIG, f"{prefix}{key}", f"is {value}, expected at least 0 layers")


def _beyond(values: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _beyond(value, f"{prefix}{key}.")
        if isinstance(value, Mapping) or not isinstance(key, str):
            continue
        most = next((limit for named, limit in _LIMITS if named.search(key)), None)
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if most is not None and isinstance(number, (int, float)) and number > most:
                yield Problem(ProblemKind.CONFIG, f"{prefix}{key}", f"is {number:,}, expected at most {most:,}")
                break


@contextmanager
def limited_build(stored: int) -> Iterator[None]:
    """Stop building a model in this thread before it fills memory or has too many tensors.

    Args:
        stored: Number of tensors of the checkpoint.

    Raises:
        ConfigurationError: If there are more tensors than `TENSORS_PER_STORED` allows, or a table above
            `MOST_IN_TABLE`.
    """
    with _LimitedTensors(stored):
        yield


class _LimitedTensors(TorchFunctionMode):
    """Counts new tensors, and checks the size of tensors that are filled with numbers; parameters are not filled.

    A mode, because it acts in one thread only. torch's hooks on new modules are shared by all threads.
    """

    def __init__(self, stored: int) -> None:
        super().__init__()
        self.stored, self.most, self.count = stored, TENSORS + TENSORS_PER_STORED * stored, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _NEW:
            self.count += 1
            if self.count > self.most:
                raise _too_large(f"needs more than {self.most:,} tensors, but the checkpoint has {self.stored:,}")
        if func in _FILLED and (elements := _elements(func, args)) > MOST_IN_TABLE:
            raise _too_large(f"needs a table of {elements:,.0f} numbers, expected at most {MOST_IN_TABLE:,}")
        return func(*args, **(kwargs or {}))


_NEW = {torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand, torch.full}
_FILLED = {torch.arange, torch.ones, torch.full, torch.eye, torch.linspace}


def _elements(func: Any, args: tuple[Any, ...]) -> float:
    if func is torch.arange:
        start, end, step = (0, *args, 1)[:3] if len(args) == 1 else (*args, 1)[:3]
        return float(abs((end - start) / step)) if step else 0.0
    sizes = args[:1] if func is torch.full else args[2:3] if func is torch.linspace else args
    flat = [size for argument in sizes for size in (argument if isinstance(argument, (tuple, list)) else (argument,))]
    return math.prod(float(size) for size in flat)


def _too_large(detail: str) -> ConfigurationError:
    problem = Problem(ProblemKind.CONFIG, "the configuration", detail)
    return ConfigurationError("cannot build the model", [problem], ["correct the sizes, and the numbers of layers"])
