"""Select the layers of a model that its tiny version keeps: the first of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nrl_models.testing import sizes

MANY = 4
"""If numbers have more values than this, layers that differ in size are of the same kind."""


class KeptLayers:
    """The layers to keep, and the new values of keys about layers.

    Layers are of the same kind if none of the following distinguishes them: entries of lists with one entry per layer
    (`layer_types`), membership in a list of layer numbers (`mlp_only_layers`), being among the first or last layers
    (`first_k_dense_replace`, `num_kv_shared_layers`), and separate values (`per_layer_config`). One layer of each kind
    is kept, and at least two layers.

    Args:
        config: Keys and values of a configuration.
        count: Number of layers to keep. None keeps one per kind.
        sections: Keys that count consecutive layers and add up to all of them (`n_input_layers`, ...).

    Attributes:
        indices: Numbers of the kept layers. Empty if the configuration has no number of layers.
        own_values: Separate values of kept layers, by their new number.
    """

    def __init__(self, config: Mapping[str, Any], count: int | None = None, sections: Sequence[str] = ()) -> None:
        types = config.get("layers_block_type") or config.get("layer_types") or ()
        self._count = next((value for key in sizes.LAYERS if type(value := config.get(key)) is int), len(types))
        self._lists: dict[str, Any] = {}  # keys with an entry per layer
        self._marks: dict[str, list[bool]] = {}  # for each other key about layers, whether it applies to each layer
        for key, value in config.items():
            if isinstance(value, (list, tuple)):
                if len(value) == self._count > 2:
                    self._lists[key] = value
                elif key.endswith(sizes.INDEX_SUFFIXES) and all(
                    type(element) is int and 0 <= element < self._count for element in value
                ):
                    self._marks[key] = [layer in value for layer in range(self._count)]
            elif key in sizes.LEADING and type(value) is int:
                self._marks[key] = [layer < value for layer in range(self._count)]
            elif key in sizes.TRAILING and type(value) is int:
                self._marks[key] = [layer >= self._count - value for layer in range(self._count)]
        begin = 0
        for key in sections:
            self._marks[key] = [begin <= layer < begin + config[key] for layer in range(self._count)]
            begin += config[key]
        own_values = {int(layer): values for layer, values in (config.get("per_layer_config") or {}).items()}
        self._own_values = own_values
        self.indices = self._choose(count)
        self.own_values = {
            new_number: own_values[layer] for new_number, layer in enumerate(self.indices) if layer in own_values
        }

    def value(self, key: str, value: Any) -> Any:
        """Return the value of `key` for a model with only the kept layers; None for keys unrelated to layers."""
        if not self.indices:
            return None
        if key in self._lists:
            return type(value)(
                range(len(self.indices)) if _are_numbers(value) else [value[layer] for layer in self.indices]
            )
        if key in self._marks:
            marked = [new_number for new_number, layer in enumerate(self.indices) if self._marks[key][layer]]
            return type(value)(marked) if isinstance(value, (list, tuple)) else len(marked)
        if key in sizes.LAYERS and type(value) is int:
            return len(self.indices)
        return None

    def _choose(self, count: int | None) -> list[int]:
        seen: set[Any] = set()
        chosen: list[int] = []
        for layer in range(self._count):
            kinds = set(self._kinds(layer))
            if kinds - seen:
                seen |= kinds
                chosen.append(layer)
        sharing = [layer for layer in range(self._count) if set(self._types(layer)) & set(sizes.SHARED_BLOCKS)]
        chosen = sorted({*chosen, *sharing[:2]})
        others = [layer for layer in range(self._count) if layer not in chosen]
        wanted = max(2, len(chosen)) if count is None else count
        return sorted([*chosen, *others[: max(0, wanted - len(chosen))]])[:wanted]

    def _kinds(self, layer: int) -> Iterator[Any]:
        for key, values in self._lists.items():
            if not _are_numbers(values):
                yield key, _kind(values[layer], values)
        for key, marks in self._marks.items():
            # Keep one of each type among the last layers, because a layer shares with layers of its type.
            yield key, marks[layer], *(self._types(layer) if key in sizes.TRAILING and any(marks) else ())
        yield "per_layer_config", layer in self._own_values
        for key, value in (self._own_values.get(layer) or {}).items():
            yield "per_layer_config", key, _kind(value, [values.get(key) for values in self._own_values.values()])

    def _types(self, layer: int) -> list[str]:
        return [values[layer] for key, values in self._lists.items() if key in ("layer_types", "layers_block_type")]


def _are_numbers(values: Any) -> bool:
    """Return True if a list with an entry per layer consists of the layers' numbers."""
    return list(values) == list(range(len(values)))


def _kind(value: Any, values: Any) -> str:
    """Return the part of a layer's value that determines its kind: all of it, unless layers only differ in size."""
    if isinstance(value, (int, float)) and len({repr(element) for element in values}) > MANY:
        return "some" if value else "none"
    return repr(value)
