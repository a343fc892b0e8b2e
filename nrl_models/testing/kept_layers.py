"""Which layers of a model a tiny one keeps: the first of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nrl_models.testing import sizes

MANY = 4
"""Where numbers take more values than this, layers of different size are of one kind."""


class KeptLayers:
    """The layers to keep, and what keys about layers say about them.

    A kind is what distinguishes layers: the entries of lists with one for each layer (`layer_types`), being in a list
    of layer numbers (`mlp_only_layers`), being among the first or last so many (`first_k_dense_replace`,
    `num_kv_shared_layers`), values of its own (`per_layer_config`). Each is kept once, and two layers at least.

    Args:
        config: a configuration's keys and values.
        count: how many layers to keep; as many as there are kinds if None.
        sections: keys that count consecutive layers and add up to all of them (`n_input_layers`, ...).

    Attributes:
        kept: numbers of the layers that are kept; none where the configuration counts no layers.
        own_values: for those of them that have some, by their new number, values of their own.
    """

    def __init__(self, config: Mapping[str, Any], count: int | None = None, sections: Sequence[str] = ()) -> None:
        types = config.get("layers_block_type") or config.get("layer_types") or ()
        self._count = next((value for key in sizes.LAYERS if type(value := config.get(key)) is int), len(types))
        self._lists: dict[str, Any] = {}  # keys with an entry for each layer
        self._marks: dict[str, list[bool]] = {}  # of other keys about layers, for each whether it is one of theirs
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
        self.kept = self._choose(count)
        self.own_values = {place: own_values[layer] for place, layer in enumerate(self.kept) if layer in own_values}

    def value(self, key: str, value: Any) -> Any:
        """What `key` says in a model of the kept layers alone; None for keys about something else."""
        if not self.kept:
            return None
        if key in self._lists:
            return type(value)(range(len(self.kept)) if _are_numbers(value) else [value[layer] for layer in self.kept])
        if key in self._marks:
            marked = [place for place, layer in enumerate(self.kept) if self._marks[key][layer]]
            return type(value)(marked) if isinstance(value, (list, tuple)) else len(marked)
        if key in sizes.LAYERS and type(value) is int:
            return len(self.kept)
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
            # One of each type among the last, for what a layer shares is of its own type.
            yield key, marks[layer], *(self._types(layer) if key in sizes.TRAILING and any(marks) else ())
        yield "per_layer_config", layer in self._own_values
        for key, value in (self._own_values.get(layer) or {}).items():
            yield "per_layer_config", key, _kind(value, [values.get(key) for values in self._own_values.values()])

    def _types(self, layer: int) -> list[str]:
        return [values[layer] for key, values in self._lists.items() if key in ("layer_types", "layers_block_type")]


def _are_numbers(values: Any) -> bool:
    """Whether a list with an entry for each layer names each layer's own number."""
    return list(values) == list(range(len(values)))


def _kind(value: Any, values: Any) -> str:
    """What a layer's value says about its kind: all of it, unless layers merely differ in size."""
    if isinstance(value, (int, float)) and len({repr(element) for element in values}) > MANY:
        return "some" if value else "none"
    return repr(value)
