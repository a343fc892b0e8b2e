"""Whether a model computes what a configuration asks for: no key that nobody reads, no value that nobody honours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.config.keys import (
    BOOKKEEPING,
    FORMER,
    NEAR,
    declared_keys,
    generation_keys,
    is_read,
    keys_in_class,
    parts_of,
    value_at,
)
from nrl_models.common.config.ledger import recorded
from nrl_models.common.config.walk import own_values, walk
from nrl_models.errors import ConfigurationError, Problem, ProblemKind


def check_config(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, ignored: Collection[str] | str = ()
) -> None:
    """Refuse a configuration that asks for something the model would leave out in silence.

    A key is known if the configuration class declares it or makes something of it, if the modelling code reads it, if
    it is bookkeeping, or if the family says so (`ignored_config_keys`, `config_values`). An unknown one that asks for
    nothing (null, false, zero, empty) passes, unless it looks like a misspelt known one. Keys that are supported at
    some values only are those of `config_values`, and those the ledger records as such.

    Args:
        model_class: the class it is for; of another than a family's nothing is known, and nothing is checked.
        config: the configuration.
        ignored: keys, by name or path, that are not to be checked.

    Raises:
        ConfigurationError: unknown keys, and values that are not supported; all of them.
    """
    if not hasattr(model_class, "rewrites"):
        return
    check = _Check(model_class, config, {ignored} if isinstance(ignored, str) else set(ignored))
    if problems := [*check.unknown(), *check.unsupported()]:
        keys = ", ".join(repr(problem.subject) for problem in problems)
        raise ConfigurationError(
            f"{config.name_or_path or 'the configuration'} asks for what {model_class.__name__} does not do",
            problems,
            [f"correct the configuration; or pass ignore_config_keys=({keys},) if the model is right without"],
        )


class _Check:
    def __init__(self, model_class: Any, config: PreTrainedConfig, ignored: set[str]) -> None:
        self.model_class = model_class
        self.config = config
        self.ignored = ignored | set(model_class.ignored_config_keys)
        self.values: Mapping[str, Collection[Any]] = model_class.config_values

    def unknown(self) -> Iterator[Problem]:
        """Keys that nobody reads."""
        for path, part, key, value in walk(self.config):
            if self._is_ignored(path, key) or key in self.values or self._is_known(part, key):
                continue
            if self._is_read(key) or self._says_what_a_part_says(part, key, value):
                continue
            known = {*declared_keys(type(part)), *keys_in_class(type(part)), *self.values} - BOOKKEEPING
            near = get_close_matches(key, sorted(known), n=3, cutoff=NEAR)
            if value or (near and key not in FORMER):
                close = near or get_close_matches(key, sorted(declared_keys(type(part))), n=3)
                meant = f"; did you mean {' or '.join(close)}?" if close else ""
                detail = f"is {_shown(value)}, and neither {type(part).__name__} nor the model reads it{meant}"
                yield Problem(ProblemKind.UNKNOWN, path, detail)

    def unsupported(self) -> Iterator[Problem]:
        """Values that are read by nobody, or of which it is known that the model does something else."""
        for path, _, key, value in walk(self.config):
            if key in self.values and not self._is_ignored(path, key) and value not in self.values[key]:
                valid = " or ".join(map(_shown, self.values[key]))
                yield Problem(ProblemKind.UNSUPPORTED, path, f"is {_shown(value)}; only {valid} is supported")
        ledger = recorded().get(self.model_class.__name__)
        for path, default in (ledger.supported if ledger else {}).items():
            key = path.rpartition(".")[2]
            value = _value_or(self.config, path, default)
            if value in (default, None) or self._is_ignored(path, key) or self._is_read(key):
                continue
            detail = f"is {_shown(value)}, which no code honours; only {_shown(default)} is supported"
            yield Problem(ProblemKind.UNSUPPORTED, path, detail)

    def _is_ignored(self, path: str, key: str) -> bool:
        return path in self.ignored or key in self.ignored

    def _is_known(self, part: PreTrainedConfig, key: str) -> bool:
        config_class = type(part)
        return (
            key.startswith("_")
            or key in declared_keys(config_class)
            or key in BOOKKEEPING
            or key in generation_keys()
            or key in keys_in_class(config_class)
            or hasattr(config_class, key)
        )

    def _is_read(self, key: str) -> bool:
        return is_read(key, self.model_class, self.config)

    def _says_what_a_part_says(self, part: PreTrainedConfig, key: str, value: Any) -> bool:
        """Whether a key of a part stands in the whole as well, as in configurations of before there were parts."""
        return any(
            key in declared_keys(type(inner)) and own_values(inner).get(key) == value
            for inner in parts_of(part)
            if inner is not part
        )


def _value_or(config: PreTrainedConfig, path: str, default: Any) -> Any:
    try:
        return value_at(config, path)
    except (AttributeError, KeyError):  # a part of another class than the tiny configuration's, or none
        return default


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
