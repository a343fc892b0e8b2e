"""Map each key of a checkpoint to a tensor of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.layouts import LoadedNames, base_prefix, renamed_keys
from nrl_models.common.upstream_conversions import (
    Renaming,
    WeightConverter,
    dot_natural_key,
    get_model_conversion_mapping,
)
from nrl_models.common.views.view import HFTensor


class CheckpointNames:
    """Mapping from a checkpoint's keys to tensors, by transformers' renamings and conversions.

    A key may be the hub's name, the name in memory, an older name that transformers renames, or any of these with or
    without the base model's prefix.

    Args:
        model: The model to load.
        adapter: The model's adapter.
        keys: All keys of the checkpoint.
        key_mapping: Renamings to apply before those of transformers.

    Attributes:
        targets: Tensor of each key, or None.
        renamed: Name of each key after transformers' renamings.
        loaded: Keys for which transformers would save other names, except names in memory, older names, and names
            without the base model's prefix. With `key_mapping`, all keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: StateDictAdapter,
        keys: Iterable[str],
        key_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self._conversions: list[Any] = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
        self._converters = [conversion for conversion in self._conversions if isinstance(conversion, WeightConverter)]
        self._prefix = base_prefix(model)
        self._rename = Renaming()
        renamed = renamed_keys(keys, self._conversions, self._rename)
        # A key and the hub's name for the same tensor become the same name when both are renamed. `key_mapping` only
        # renames the keys.
        known = {} if key_mapping else renamed
        names = known | renamed_keys(adapter.hub.keys() - known.keys(), get_model_conversion_mapping(model), Renaming())
        hub = {names[name]: tensor for name, tensor in adapter.hub.items()}
        if len(hub) < len(adapter.hub):  # if several names become equal, the last one in transformers' order wins
            hub = {names[name]: adapter.hub[name] for name in sorted(adapter.hub, key=dot_natural_key)}
        self._table: dict[str, HFTensor] = adapter.transformers | hub
        # `get_model_conversion_mapping` puts the renamings of `key_mapping` first.
        mapped = renamed_keys(keys, self._conversions[: len(key_mapping)], Renaming()) if key_mapping else {}
        self.targets = {key: self._resolve(mapped.get(key, key), name) for key, name in renamed.items()}
        self.renamed = renamed
        pieces = {key: tensor.pieces for key, tensor in self.targets.items() if tensor is not None}
        recorded = pieces if key_mapping else self._published(model, adapter, renamed)
        self.loaded = LoadedNames({pieces[key]: key for key in recorded}, in_exports=not key_mapping)

    def parameters(self, key: str) -> tuple[str, ...]:
        """Return the model's own tensors that a key fills completely or partly; empty if it is unknown."""
        tensor = self.targets[key]
        return () if tensor is None else tuple(tensor.parameters)

    def used_conversions(self) -> list[Any]:
        """Return the conversions that applied to a key. Saving has to revert them."""
        return [conversion for conversion in self._conversions if self._rename.has_used(conversion)]

    def _published(self, model: PreTrainedModel, adapter: StateDictAdapter, renamed: Mapping[str, str]) -> list[str]:
        saved = {
            key: tensor.name
            for key, tensor in self.targets.items()
            if tensor is not None and key != tensor.name and key not in adapter.transformers
        }
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        if not saved or not conversions:  # saving reverts no conversion
            return []
        names = renamed_keys({*saved, *saved.values()}, conversions, Renaming())
        # If some names have the prefix, other names were published without it. If none has it, this is a base model.
        has_prefix = any(name.startswith(self._prefix) for name in renamed.values())
        alike = ("", self._prefix) if has_prefix else ("",)
        return [key for key, name in saved.items() if names[name] in [prefix + names[key] for prefix in alike]]

    def _resolve(self, key: str, renamed: str) -> HFTensor | None:
        for candidate in (renamed, key):
            for name in (candidate.removeprefix(self._prefix), self._prefix + candidate, candidate):
                if name in self._table:
                    self._mark_used(candidate)
                    return self._table[name]
        return None

    def _mark_used(self, key: str) -> None:
        """Mark the converter that applies to `key` as used, as transformers does."""
        for converter in self._converters:
            if self._rename(converter, key)[1] is not None:
                return
