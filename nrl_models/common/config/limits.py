"""Limits of what a configuration may ask for, so that a damaged one is an error and neither hangs nor fills memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

from nrl_models.errors import ConfigurationError, Problem, ProblemKind

MOST_LAYERS = 10_000
"""Layers, which configuration classes write lists of; the deepest models have some hundred."""

MOST_ELEMENTS = 2**31 - 1
"""A size of one dimension, of which tables are computed when a model is built."""

MODULES, MODULES_PER_TENSOR = 40_000, 8
"""How many modules a model may have: so many in any case, and so many for each tensor of its checkpoint."""

_LAYERS = re.compile(r"(^|_)(n|num)_.*(layer|block)s?$|(^|_)(layers?|depths?)$")
_SIZES = re.compile(r"(_|^)(size|dims?|heads?|embeddings|positions|experts|rank|width|channels|ctx|embd)$")


def check_limits(values: Mapping[str, Any], where: object) -> None:
    """Refuse values of a configuration that nothing could be built of, before a class makes something of them.

    Args:
        values: by key, with those of nested configurations, as in `config.json`.
        where: what they are from, for the message.

    Raises:
        ConfigurationError: more than `MOST_LAYERS` layers, a size over `MOST_ELEMENTS`; all of them.
    """
    problems = list(_beyond(values, ""))
    if problems:
        raise ConfigurationError(f"{where} asks for more than can be built", problems, ["correct the configuration"])


def _beyond(values: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _beyond(value, f"{prefix}{key}.")
            continue
        most = MOST_LAYERS if _LAYERS.search(key) else MOST_ELEMENTS if _SIZES.search(key) else None
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if most is not None and isinstance(number, (int, float)) and number > most:
                yield Problem(ProblemKind.CONFIG, f"{prefix}{key}", f"is {number:,}, expected at most {most:,}")
                break


@contextmanager
def limited_modules(tensors: int) -> Iterator[None]:
    """While a model is built in this thread, stop when it has more modules than a checkpoint of `tensors` could fill.

    Raises:
        ConfigurationError: it has.
    """
    most, count, thread = MODULES + MODULES_PER_TENSOR * tensors, 0, threading.get_ident()

    def counted(*_: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > most:
            detail = f"asks for a model of more than {most:,} modules, and the checkpoint has {tensors:,} tensors"
            problem = Problem(ProblemKind.CONFIG, "the configuration", detail)
            raise ConfigurationError("cannot build the model", [problem], ["correct the numbers of layers and experts"])

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()
