"""Find settings of rotary embeddings that a configuration states but transformers does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.config.keys import declared_keys, is_read
from nrl_models.common.config.walk import own_values, parts
from nrl_models.errors import Problem, ProblemKind, shown

KEYS = ("rope_theta", "partial_rotary_factor")
"""Settings that configurations may have in `rope_parameters`, or next to it."""


def contradicting_keys(content: Mapping[str, Any], config: PreTrainedConfig, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each setting that another one of the same file replaces without a message.

    If there are both, `rope_scaling` replaces `rope_parameters`, and values in either replace those next to them.
    Keys next to `rope_parameters` that the configuration class declares are not compared.

    Args:
        content: Content of `config.json`, or of a nested configuration.
        config: The configuration that transformers makes from it.
        prefix: Path of `content` in `config.json`, with a dot at its end.
    """
    used = own_values(config).get("rope_parameters")
    if isinstance(used, Mapping):
        values = dict(_settings(used))
        # Files always have the keys that the class declares, so those are not necessarily stated.
        undeclared = [key for key in KEYS if key in content and key not in declared_keys(type(config))]
        stated = {key: content[key] for key in undeclared if _values(values, key)}
        replaced, scaling = content.get("rope_parameters"), content.get("rope_scaling")
        if isinstance(replaced, Mapping) and scaling:
            stated |= dict(_settings(replaced, "rope_parameters."))
        for path, value in stated.items():
            computed = _values(values, path.rpartition(".")[2])
            if type(value) in (int, float) and value not in computed:
                other = f"rope_parameters has {shown(computed[0])}" if computed else "rope_scaling has no such value"
                detail = f"is {shown(value)}, but {other}, which transformers uses instead"
                advice = "keep one of the two values in config.json"
                if path.startswith("rope_parameters"):
                    detail = f"is {shown(value)}, but rope_scaling replaces rope_parameters"
                    detail += f", and the model would compute with {shown(computed[0])}" if computed else ""
                    advice = "put all values into rope_parameters of config.json, and remove rope_scaling"
                yield Problem(ProblemKind.UNSUPPORTED, prefix + path, detail, advice=advice)
    for key, part in parts(config).items():
        if isinstance(content.get(key), Mapping):
            yield from contradicting_keys(content[key], part, f"{prefix}{key}.")


def unused_keys(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Iterator[Problem]:
    """Yield a problem for each setting in a nested configuration that the code reads, but does not compute with.

    Published DBRX checkpoints have their base in `attn_config.rope_theta`; transformers computes with the default.
    """
    used = own_values(config).get("rope_parameters")
    if not isinstance(used, Mapping):
        return
    for name, part in parts(config).items():
        values = own_values(part)
        for key in KEYS:
            value, computed = values.get(key), _values(dict(_settings(used)), key)
            if type(value) not in (int, float) or "rope_parameters" in values or key in declared_keys(type(part)):
                continue
            if computed and value not in computed and is_read(key, model_class, config):
                detail = f"is {shown(value)}, but {model_class.__name__} computes with rope_parameters.{key}, which is "
                fixed = {**used, key: value}
                advice = f"set rope_parameters to {fixed} in config.json, or pass rope_parameters={fixed}"
                yield Problem(ProblemKind.UNSUPPORTED, f"{name}.{key}", detail + shown(computed[0]), advice=advice)


def _settings(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting. Layers of different kinds may have their own."""
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _values(settings: Mapping[str, Any], key: str) -> list[Any]:
    return [value for path, value in settings.items() if path.rpartition(".")[2] == key]
