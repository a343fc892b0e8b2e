"""Validate a configuration: find settings that the model does not support, and misspelled keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nrl_models.common.config.ignored import ignored_here, key_names
from nrl_models.common.config.keys import (
    BOOKKEEPING,
    FORMER,
    FORMER_ROPE,
    declared_keys,
    generation_keys,
    is_named,
    is_read,
    is_token_id,
    keys_in_class,
    parts_of,
    value_at,
)
from nrl_models.common.config.recorded_keys import architecture_that_computes_with, supported_at_default_only
from nrl_models.common.config.rope_keys import unused_keys
from nrl_models.common.config.spelling import misspellings_of
from nrl_models.common.config.types import is_same_value
from nrl_models.common.config.walk import own_values, values_of_layers, walk
from nrl_models.common.logs import get_logger
from nrl_models.errors import ConfigurationError, Problem, ProblemKind, shown

logger = get_logger(__name__)

ROPE_TYPES = {"default", *ROPE_INIT_FUNCTIONS}
"""The rotary embeddings that transformers has."""

NEUTRAL = (-1, 0, 1)
"""Numbers without effect when multiplied, added, or used as a limit."""


@dataclass(frozen=True)
class Findings:
    """Result of examining a configuration.

    Args:
        problems: Settings that the model does not support.
        unread: Other keys that no code reads, by path, with their values.
        required: Paths of problems with which the model's code fails, so ignoring the key does not help.
    """

    problems: list[Problem] = field(default_factory=list)
    unread: dict[str, Any] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)


def check_config(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, ignored: Collection[str] | str = ()
) -> None:
    """Raise if a configuration has settings that the model would ignore. Log keys that no code reads.

    Args:
        model_class: Model class for the configuration. For remote code, only `unused_keys` is checked.
        config: The configuration.
        ignored: Names or paths of keys to skip.

    Raises:
        ConfigurationError: If there are misspelled keys or unsupported values. Lists all of them.
    """
    findings = examine(model_class, config, ignored)
    where = config.name_or_path or "the configuration"
    if findings.problems:
        wrong = tuple(each.subject for each in findings.problems if each.subject not in findings.required)
        ignore = (
            f"correct the configuration. If the model is correct without these settings, pass "
            f"ignore_config_keys={wrong}, on the command line --ignore-config-key KEY"
        )
        summary = f"{where} has settings that {model_class.__name__} does not support"
        raise ConfigurationError(summary, findings.problems, [ignore] if wrong else [])
    if findings.unread:
        keys = ", ".join(f"{path}: {shown(value)}" for path, value in findings.unread.items())
        logger.warning_once(f"{where} has keys that nothing in {model_class.__name__} reads; they are ignored: {keys}")


def examine(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, ignored: Collection[str] | str = ()
) -> Findings:
    """Return the problems that `check_config` raises, and the keys that it logs.

    A key is known if the configuration class declares or handles it, the modeling code reads it, it is bookkeeping, or
    the family lists it (`ignored_config_keys`, `config_values`). A key that no code reads is a problem if either:

    - It is a misspelling of a known key, unless it is unset or has the same value as that key.
    - Its value is a number that affects only computations: it changes the outputs of another architecture according to
      the ledger, is not in `NEUTRAL`, and no key that is read has the same value. The following are not problems:
      switches and names (`use_qk_norm: true`, `scoring_func: "sigmoid"`), because published configurations use them to
      state what a model always does; sizes of parameters, which are compared with the weights; and token ids.

    A known key is a problem if its value is not among the supported ones in `config_values` or in the ledger.
    """
    ignored = key_names(ignored)
    findings = Findings(without_ignored(unused_keys(model_class, config), ignored))
    # Remote code may read keys in modules that are not searched.
    if not hasattr(model_class, "rewrites") and model_class.__module__.partition(".")[0] != "transformers":
        return findings
    check = _Check(model_class, config, ignored)
    check.unread(findings)
    findings.problems.extend(check.unsupported())
    findings.required.update(check.required)
    return findings


def without_ignored(problems: Iterable[Problem], ignored: Collection[str] | str) -> list[Problem]:
    """Drop problems of keys that `ignored` or the command line has, by name, path or part of the path."""
    names = key_names(ignored) | ignored_here()
    return [each for each in problems if not names & {each.subject, *each.subject.split(".")}]


class _Check:
    def __init__(self, model_class: Any, config: PreTrainedConfig, ignored: set[str]) -> None:
        self.model_class = model_class
        self.config = config
        self.ignored = ignored | ignored_here() | set(getattr(model_class, "ignored_config_keys", ()))
        self.values: Mapping[str, Collection[Any]] = getattr(model_class, "config_values", {})
        self.required: set[str] = set()

    @cached_property
    def _defaults(self) -> PreTrainedConfig | None:
        """The configuration class's default values; None if they are not valid together."""
        try:
            return type(self.config)()
        except Exception:  # any error of the class's own validation
            return None

    def unread(self, findings: Findings) -> None:
        """Classify the keys that no code reads."""
        for path, part, key, value in walk(self.config):
            if self._is_ignored(path, key) or key in self.values or self._is_known(part, key):
                continue
            if self._is_read(key) or self._says_what_a_part_says(part, key, value):
                continue
            if problem := self._misspelled(path, part, key, value) or self._unsupported_number(path, part, key, value):
                findings.problems.append(problem)
            elif value or key not in FORMER:
                findings.unread[path] = value

    def _misspelled(self, path: str, part: PreTrainedConfig, key: str, value: Any) -> Problem | None:
        if value is None or key in FORMER:
            return None
        known = {*declared_keys(type(part)), *keys_in_class(type(part)), *self.values} - BOOKKEEPING
        values = own_values(part)
        if isinstance(rope := values.get("rope_parameters"), Mapping):
            known.update(FORMER_ROPE)
            values |= rope
        near = misspellings_of(key, sorted(known))
        if not near or any(name in values and is_same_value(value, values[name]) for name in near):
            return None
        if is_same_value(value, _value_or(self._defaults, path, None)):  # transformers itself has misspelled keys
            return None
        detail = f"is {shown(value)}, but neither {type(part).__name__} nor the model reads this key"
        return Problem(ProblemKind.UNKNOWN, path, f"{detail}; did you mean {' or '.join(near)}?")

    def _unsupported_number(self, path: str, part: PreTrainedConfig, key: str, value: Any) -> Problem | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value in NEUTRAL or is_token_id(key):
            return None
        other = architecture_that_computes_with(key)
        # The same number usually means the same setting under another name (`layer_norm_eps` for `rms_norm_eps`).
        if other is None or any(
            is_same_value(value, other_value) and self._is_known(part, name)
            for name, other_value in own_values(part).items()
        ):
            return None
        detail = (
            f"is {shown(value)}; it changes the outputs of {other}, but {self.model_class.__name__} does not read it"
        )
        return Problem(ProblemKind.UNSUPPORTED, path, detail)

    def unsupported(self) -> Iterator[Problem]:
        """Yield a problem for each unsupported value of a known key."""
        for path, part, key, value in walk(self.config):
            if key == "layer_types" and not self._is_ignored(path, key) and self._is_read(key):
                yield from _without_window(path, part, value)
            if key in CHOSEN_EXPERTS and not self._is_ignored(path, key) and self._is_read(key):
                yield from _too_few_experts(path, part, value)
            if key in self.values and not self._is_ignored(path, key) and value not in self.values[key]:
                valid = " or ".join(map(shown, self.values[key]))
                yield Problem(ProblemKind.UNSUPPORTED, path, f"is {shown(value)}; only {valid} is supported")
            elif not self._is_ignored(path, key):
                yield from self._foreign(path, key, value)
        for path, default in supported_at_default_only(self.model_class.__name__).items():
            key = path.rpartition(".")[2]
            value = _value_or(self.config, path, default)
            if value in (default, None) or self._is_ignored(path, key) or self._is_read(key):
                continue
            detail = f"is {shown(value)}, which no code supports; only {shown(default)} is supported"
            yield Problem(ProblemKind.UNSUPPORTED, path, detail)

    def _foreign(self, path: str, key: str, value: Any) -> Iterator[Problem]:
        """Yield problems that do not depend on the model: unknown rotary embeddings, and weights packed by MLX."""
        if key == "rope_parameters" and isinstance(value, Mapping):
            layers = {f"{path}.{layer}": inner for layer, inner in value.items() if isinstance(inner, Mapping)}
            for where, parameters in (layers or {path: value}).items():
                kind, former = parameters.get("rope_type") or "default", parameters.get("type")
                if self._is_ignored(f"{where}.rope_type", "rope_type"):
                    continue
                if kind not in ROPE_TYPES and not is_named(kind, self.model_class, self.config):
                    self.required.add(f"{where}.rope_type")
                    yield _unknown_rope_type(where, kind, "type" if former == kind else "rope_type")
                elif former in ROPE_TYPES and former != kind:
                    detail = f"is {kind!r}, and type, its former name, is {former!r}; expected the same, or one of them"
                    yield Problem(ProblemKind.UNSUPPORTED, f"{where}.rope_type", detail)
        packed_by_mlx = key in ("quantization", "quantization_config") and isinstance(value, Mapping)
        if packed_by_mlx and {"bits", "group_size"} <= set(value) and not value.get("quant_method"):
            detail = f"is {shown(value)}, the format of MLX, which only MLX can read; expected unquantized weights"
            yield Problem(ProblemKind.UNSUPPORTED, path, detail, advice="dequantize it: mlx_lm.convert --dequantize")

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
        """Return True if a key of a part also exists in the main configuration, as before nested configurations."""
        return any(
            key in declared_keys(type(inner)) and own_values(inner).get(key) == value
            for inner in parts_of(part)
            if inner is not part
        )


FORMER_ROPE_TYPES = {"su": "longrope"}
"""Present names of rotary embeddings, by their former names."""


def _unknown_rope_type(where: str, kind: Any, key: str) -> Problem:
    """Return the problem of a rotary embedding that transformers lacks.

    Args:
        where: Path of the rotary parameters in the configuration.
        kind: The rotary embedding.
        key: The key that `config.json` has, in `rope_parameters` or in `rope_scaling`, the former name of these.
    """
    detail = f"is {shown(kind)}; only {' or '.join(map(repr, sorted(ROPE_TYPES)))} is supported"
    present = FORMER_ROPE_TYPES.get(kind) if isinstance(kind, str) else None
    value = f"{kind!r} is the former name of {present!r}. Change" if present else "correct"
    advice = f"{value} the value of {key!r} in rope_scaling or rope_parameters of config.json"
    if where == "rope_parameters":
        advice += ", or pass all settings as rope_parameters={'rope_type': ..., 'rope_theta': ..., ...}"
    return Problem(ProblemKind.UNSUPPORTED, f"{where}.rope_type", detail, advice=advice)


WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The key with the size of the window, by the type of the layers that have one."""


def _without_window(path: str, part: PreTrainedConfig, layer_types: Any) -> Iterator[Problem]:
    """Yield a problem if layers have a sliding window but the configuration has no size for it."""
    for kind, key in WINDOWS.items():
        size = next(iter(values_of_layers(part, key)), 1)
        is_size = isinstance(size, (list, tuple)) or (size is not None and size > 0)
        if isinstance(layer_types, (list, tuple)) and kind in layer_types and not is_size:
            where = f"{path.removesuffix('layer_types')}{key}"
            detail = (
                f"is {'null' if size is None else size}, and {layer_types.count(kind)} of the {path} are {kind!r}; "
            )
            detail += "expected the window's size"
            advice = f"set {where}, or list those layers as 'full_attention'"
            yield Problem(ProblemKind.UNSUPPORTED, where, detail, advice=advice)


CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys with the number of experts that a token selects, and of all experts."""


def _too_few_experts(path: str, part: PreTrainedConfig, chosen: Any) -> Iterator[Problem]:
    """Yield a problem if tokens select more experts than a layer has."""
    values = own_values(part)
    for name in EXPERTS:
        count = values.get(name)
        if type(count) is int and type(chosen) is int and 1 < count < chosen:
            yield Problem(
                ProblemKind.UNSUPPORTED, path, f"is {chosen}, and {name} is {count}; expected at most {count}"
            )
            return


def _value_or(config: PreTrainedConfig | None, path: str, default: Any) -> Any:
    try:
        return default if config is None else value_at(config, path)
    except (AttributeError, KeyError):  # a part of another class than the tiny configuration's, or none
        return default
