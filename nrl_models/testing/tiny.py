"""Tiny configurations: at most a few million parameters, but large enough that errors are visible."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nrl_models.common.config.walk import all_values
from nrl_models.common.process_state import BUILDING
from nrl_models.errors import NRLModelsError, one_line
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.testing import sizes
from nrl_models.testing.shrink import Needs, shrink

Source = type[PreTrainedConfig] | PreTrainedConfig
"""A configuration, or a configuration class, whose default is used."""


class TinyModelError(NRLModelsError, ValueError):
    """No tiny model of a class can be built."""


@dataclass(frozen=True)
class Tiny:
    """A tiny configuration, and how it was found.

    Args:
        config: The configuration; None if there is none.
        needs: Values that had to be added so that the class builds and runs. Empty for most classes.
        reached: The last stage of `STAGES` that succeeded.
        failure: Error of the next stage; None if there was none, or if no class was tried.
    """

    config: PreTrainedConfig | None
    needs: Needs
    reached: str
    failure: Exception | None = None


STAGES = ("nothing", "configuration", "build", "inputs", "forward")
"""Stages of trying a configuration, in order."""


def tiny_config(
    source: Source, overrides: Mapping[str, Any] | None = None, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedConfig:
    """Return a small configuration with all features that distinguish the model.

    Hidden size 256, 8 heads, and 4 key-value heads if the model allows it; one layer of each kind in the given
    configuration. Features that it disables stay disabled.

    Args:
        source: A configuration, or a configuration class, whose default is used.
        overrides: Values that the rules cannot derive; a mapping for a nested configuration.
        model_class: The model class. If it does not build or run, unset values are filled in.

    Raises:
        TinyModelError: If the class cannot be built from any configuration.
    """
    tiny = find_tiny(source, overrides, model_class)
    if tiny.config is None or (model_class is not None and tiny.reached == "configuration"):
        name = (model_class or (source if isinstance(source, type) else type(source))).__name__
        raise TinyModelError(
            f"cannot build a tiny {name}: {one_line(tiny.failure) if tiny.failure else 'no configuration'}. "
            "If a value is wrong, set it by its key in a family's `tiny`."
        ) from tiny.failure
    return copy.deepcopy(tiny.config)


_found: dict[Any, Tiny] = {}


def find_tiny(
    source: Source, overrides: Mapping[str, Any] | None = None, model_class: type[PreTrainedModel] | None = None
) -> Tiny:
    """Return the result of `tiny_config`, with how it was found. Results are cached by arguments.

    First, the rules alone are tried. If `model_class` does not run with the result, all unset keys are filled from
    `sizes.MISSING`. Then each key is removed again if the model reaches the same stage without it.
    """
    source_key = source if isinstance(source, type) else (type(source), source.to_json_string())
    key = (source_key, repr(overrides), model_class)
    if key not in _found:
        with silent_transformers(), torch.random.fork_rng(devices=[]):
            _found[key] = _find(source, overrides or {}, model_class)
    return _found[key]


def _find(source: Source, overrides: Mapping[str, Any], model_class: type[PreTrainedModel] | None) -> Tiny:
    try:
        default = source() if isinstance(source, type) else source
    except Exception as error:
        return Tiny(None, Needs(), "nothing", error)

    def attempt(needs: Needs) -> Tiny:
        tiny = _attempt(default, overrides, needs, model_class)
        error = tiny.failure
        if isinstance(error, AttributeError) and isinstance(error.obj, PreTrainedConfig):
            wanted = (type(error.obj), str(error.name))
            if error.name in sizes.MISSING and wanted not in needs.undeclared:
                return attempt(replace(needs, undeclared=(*needs.undeclared, wanted)))
        return tiny

    best = _attempt(default, overrides, Needs(), model_class)
    if best.failure is None:
        return best
    unset = (key for key, value in all_values(default) if key in sizes.MISSING and sizes.is_unset(key, value))
    needs = Needs(tuple(dict.fromkeys(unset)))
    for rope in ("", "sections", "layer types"):
        candidate = attempt(replace(needs, rope=rope))
        best = max(best, candidate, key=lambda attempt: STAGES.index(attempt.reached))
        if candidate.failure is None:
            break
    for key in best.needs.keys:
        without = attempt(replace(best.needs, keys=tuple(need for need in best.needs.keys if need != key)))
        best = max(without, best, key=lambda attempt: STAGES.index(attempt.reached))
    return best


def _attempt(
    default: PreTrainedConfig, overrides: Mapping[str, Any], needs: Needs, model_class: type[PreTrainedModel] | None
) -> Tiny:
    config, reached = None, "nothing"
    try:
        config = shrink(default, overrides, needs)
        reached = "configuration"
        if model_class is not None:
            torch.manual_seed(0)
            with BUILDING:
                model = model_class._from_config(copy.deepcopy(config)).eval()
            reached = "build"
            inputs = inputs_for(model, length=12, images=True)
            reached = "inputs"
            with torch.no_grad():
                model(**inputs)
        reached = "forward"
    except Exception as error:
        return Tiny(config, needs, reached, error.with_traceback(None))  # the traceback would keep the model alive
    return Tiny(config, needs, reached)


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Disable transformers' log messages and progress bars inside a `with` block."""
    verbosity, shows_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()
