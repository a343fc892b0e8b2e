"""Make a configuration small by rules: first each value by its key, then the equations between them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from nrl_models.common.cached import cached
from nrl_models.common.config.types import is_same_value
from nrl_models.common.config.walk import all_values, own_values
from nrl_models.testing import sizes
from nrl_models.testing.constraints import satisfy, sections_of
from nrl_models.testing.kept_layers import KeptLayers

Values = Mapping[str, Any]
Parts = Mapping[str, PreTrainedConfig]

KEPT_AS_THEY_ARE = ("id2label", "label2id", "transformers_version", "architectures", "model_type")


@dataclass(frozen=True)
class Needs:
    """Values that a model class needs and its configuration lacks.

    Args:
        keys: Unset keys, in any part of the configuration. They get their value in `sizes.MISSING`.
        undeclared: Keys that a configuration class does not declare. They get their value in `sizes.MISSING`.
        rope: Missing rotary parameters: empty for none, `sections` for three kinds of positions, or `layer types` for
            one set per layer type.
    """

    keys: tuple[str, ...] = ()
    undeclared: tuple[tuple[type[PreTrainedConfig], str], ...] = ()
    rope: str = ""

    def __str__(self) -> str:
        undeclared = (f"{owner.__name__}.{key}" for owner, key in self.undeclared)
        rope = (f"rope_parameters with {self.rope}",) if self.rope else ()
        return ", ".join([*self.keys, *undeclared, *rope])


def shrink(default: PreTrainedConfig, overrides: Values, needs: Needs) -> PreTrainedConfig:
    """Return a small configuration of `default`'s class with the same features as `default`.

    Args:
        default: The configuration; not modified.
        overrides: Values that replace those of the rules; a mapping for a nested configuration.
        needs: Values to add.

    Raises:
        Exception: Any error of the class for values that it does not allow.
    """
    return _Shrinking(_token_ids(default), needs).config(default, overrides)


@dataclass(frozen=True)
class _Shrinking:
    token_ids: Mapping[int, int]
    needs: Needs

    def config(self, default: PreTrainedConfig, overrides: Values) -> PreTrainedConfig:
        config_class = type(default)
        old = {key: value for key, value in own_values(default).items() if key not in KEPT_AS_THEY_ARE}
        parts = {key: value for key, value in old.items() if isinstance(value, PreTrainedConfig)}
        for key, part_class in config_class.sub_configs.items():
            # AutoConfig has no fixed class: the parent class creates such a part from its values.
            wanted = isinstance(overrides.get(key), Mapping) and issubclass(part_class, PreTrainedConfig)
            if (wanted or key in self.needs.keys) and old.get(key, 0) is None:
                parts[key] = part_class()
        new_parts = {key: self.config(part, overrides.get(key, {})) for key, part in parts.items()}
        # Values that a parent set in its part, or a file in a model, differ from the class's defaults.
        defaults = default_values(config_class)
        leaf_values = {key: value for key, value in old.items() if key not in parts}
        values = {
            key: value
            for key, value in leaf_values.items()
            if key in defaults and not is_same_value(value, defaults[key])
        }
        sections = next((section_keys for key in sizes.LAYERS if (section_keys := sections_of(config_class, key))), ())
        layers = KeptLayers(old, next((overrides[key] for key in sizes.LAYERS if key in overrides), None), sections)
        values |= self._values(default, old, layers, parts, new_parts)
        values |= new_parts
        for owner, key in self.needs.undeclared:
            if owner is config_class:
                values[key] = sizes.MISSING[key]
        values = {key: value for key, value in values.items() if key not in _read_only(config_class)}
        values |= {key: value for key, value in overrides.items() if key not in new_parts}
        values |= satisfy(config_class, {**old, **values}, overrides)
        config = config_class(**values)
        config.classifier_dropout = 0.0  # token classifiers use 0.1 if it is not set
        return config

    def _values(
        self, default: PreTrainedConfig, old: Values, layers: KeptLayers, parts: Parts, new_parts: Parts
    ) -> dict[str, Any]:
        """Return new values for the keys that change."""
        public = {internal: name for name, internal in default.attribute_map.items()}
        new: dict[str, Any] = {}
        for key, value in old.items():
            if key in parts or key in ("per_layer_config", "rope_parameters"):
                continue
            layer_value = layers.value(key, value)
            value = value if layer_value is None else layer_value
            result = self._value(key, value, public.get(key, key), derived=key not in _given_by_default(type(default)))
            if (result := layer_value if result is None else result) is not None:
                new[key] = result
        new |= _equations({**old, **parts}, {**old, **new, **new_parts})
        if layers.own_values:
            new["per_layer_config"] = {
                str(new_number): self._own_values_of_layer(values, old, new, public)
                for new_number, values in layers.own_values.items()
            }
        if rope := self._rope(default, old, {**old, **new}):
            new["rope_parameters"] = rope
        return {key: value for key, value in new.items() if not is_same_value(value, old[key])}

    def _value(self, key: str, value: Any, public: str, derived: bool) -> Any:
        """Return the new value of a key, or None to keep the value."""
        if key in self.needs.keys and sizes.is_unset(key, value):
            missing = sizes.MISSING[key]
            return missing(value) if callable(missing) else missing
        if sizes.is_token(key):
            return sizes.COMMON_TOKENS.get(key, _each(value, lambda token: self.token_ids.get(token, token)))
        if value is None or isinstance(value, (str, bool)):
            return None
        if key in sizes.VALUES:
            return sizes.VALUES[key]
        if any(word in key for word in sizes.DROPOUTS):
            return type(value)(0) if isinstance(value, (int, float)) else None
        if key in sizes.LAYER_REFERENCES:
            return _each(value, lambda layer: max(-2, min(layer, 1)))  # two layers remain, counted from either end
        if (size := _size(key, value, public)) is not None:
            return size
        # A scalar that the class derives from other values is updated automatically.
        if _is_large_width(key, value) and (isinstance(value, (list, tuple)) or not derived):
            return _in_form_of(value, sizes.WIDTH)
        return None

    def _own_values_of_layer(
        self, values: Values, old: Values, new: Values, public: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the separate values of one layer, in the same proportion to the model's values as before."""
        model = {**old, **new}
        layer_values: dict[str, Any] = {}
        for key, value in values.items():
            is_size = key in sizes.SIZES or public.get(key) in sizes.SIZES
            if is_size and type(value) is int and value and type(old.get(key)) is int and old[key]:
                layer_values[key] = max(1, model[key] * value // old[key])
            else:
                layer_values[key] = value if (size := _size(key, value, public.get(key, key))) is None else size
        equal = _equations({**old, **values}, {**model, **layer_values})
        return layer_values | {key: value for key, value in equal.items() if key in layer_values or value != model[key]}

    def _rope(self, default: PreTrainedConfig, old: Values, new: Values) -> dict[str, Any] | None:
        parameters = old.get("rope_parameters") or {}
        if not parameters and not (self.needs.rope and "rope_parameters" in old):
            return None
        head_dim = new.get("head_dim") or new.get("hidden_size", 0) // (new.get("num_attention_heads") or 1)
        known = getattr(default, "ignore_keys_at_rope_validation", None) or ()
        sections = self.needs.rope == "sections" or "mrope_section" in known

        def one(rope: Values) -> dict[str, Any]:
            result = {"rope_type": "default", "rope_theta": 1e4, **rope}
            pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            if sections or "mrope_section" in rope:
                result["mrope_section"] = _shares(pairs, rope.get("mrope_section") or (1, 1, 1))
            if "original_max_position_embeddings" in rope:
                result["original_max_position_embeddings"] = 8  # less than the test sequences
            for key in ("short_factor", "long_factor"):
                if key in rope:
                    result[key] = rope[key][:pairs]
            return result

        if nested := {key: one(value) for key, value in parameters.items() if isinstance(value, Mapping)}:
            return {**parameters, **nested}
        if self.needs.rope == "layer types" and new.get("layer_types"):
            return {layer_type: one(parameters) for layer_type in dict.fromkeys(new["layer_types"])}
        return one(parameters)


# Information from configuration classes


@cached
def default_values(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the values of the class's default; empty if it cannot be created."""
    try:
        return own_values(config_class())
    except Exception:
        return {}


@cached
def _given_by_default(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the keys with a default value. Other keys are computed or unset."""
    return frozenset(
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is not dataclasses.MISSING and field.default is not None
    )


@cached
def _read_only(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    members = inspect.getmembers_static(config_class)
    return frozenset(name for name, member in members if isinstance(member, property) and member.fset is None)


# Special tokens


def _token_ids(root: PreTrainedConfig) -> dict[int, int]:
    """Assign a new id to each id of a special token in `root` and its parts. Return new ids by old id."""
    new_ids: dict[int, int] = {}
    for key, value in all_values(root):
        if sizes.is_token(key) and key not in sizes.COMMON_TOKENS:
            for element in value if isinstance(value, (list, tuple)) else [value]:
                if type(element) is int:
                    new_ids.setdefault(element, sizes.FIRST_SPECIAL + len(new_ids))
    return new_ids


# Values


def _size(key: str, value: Any, public: str) -> Any:
    """Return the tables' value for a key or its public name, or None."""
    for name in (key, public):
        if name in sizes.SIZES:
            return _in_form_of(value, sizes.SIZES[name])
        if name in sizes.AT_MOST:
            return _each(value, partial(_at_most, sizes.AT_MOST[name]))
    return None


def _at_most(most: int, value: Any) -> Any:
    return min(value, most) if type(value) is int else None


def _is_large_width(key: str, value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    all_integers = bool(values) and all(type(element) is int for element in values)
    return key.endswith(sizes.WIDTH_SUFFIXES) and all_integers and max(values) > sizes.WIDTH


def _in_form_of(value: Any, size: float) -> Any:
    """Convert `size` to the form of `value`: its type, or a list of its length and proportions. Zero stays zero."""
    if not isinstance(value, (list, tuple)):
        return type(value)(size) if isinstance(value, (int, float)) and value else None
    if not value or not all(isinstance(element, (int, float)) for element in value):
        return None
    largest = max(value)
    if largest <= size and len(set(value)) > 1:
        return None
    return type(value)(element and max(1, round(size * element / largest)) for element in value)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a value, or to each element of a list."""
    if isinstance(value, (list, tuple)):
        return type(value)(_each(element, change) for element in value)
    return change(value)


def _shares(total: int, parts: tuple[int, ...] | list[int]) -> list[int]:
    """Split `total` into integers in the ratio of `parts`; the last one gets the rest."""
    shares = [total * part // sum(parts) for part in parts]
    return [*shares[:-1], total - sum(shares[:-1])]


def _equations(old: Values, new: Values) -> dict[str, Any]:
    """Return the values of `new` that follow from equations that hold in `old`, and from those that always hold."""
    new = dict(new)
    result = {}
    for key, right, always in [*((*rule, False) for rule in sizes.RELATIONS), *((*rule, True) for rule in sizes.LAWS)]:
        try:
            if key in old and (always or right(SimpleNamespace(**old)) == old[key]):
                value = right(SimpleNamespace(**new))
                if value:
                    result[key] = new[key] = value
        except (AttributeError, TypeError, ZeroDivisionError):  # keys that are missing or unset in this configuration
            continue
    return result
