"""Rename a state dict between names in memory and on the hub, in place, as prime-rl's state-dict operations do."""

from __future__ import annotations

import torch

from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.views.view import HFTensor

StateDict = dict[str, torch.Tensor]


class HubTable:
    """The single operation of a model's `conversion_chain`, based on an adapter's table.

    It accepts some of the tensors (such as those of a layer), and leaves tensors with missing parts unchanged.

    Args:
        adapter: Adapter with the table.
    """

    def __init__(self, adapter: StateDictAdapter) -> None:
        self.specs = adapter.specs
        self.hub = [t for t in adapter.hub.values() if t.view is None or t.name != str(t.view)]
        self.parts: dict[str, list[HFTensor]] = {
            name: adapter.tensors_in(name, "hub") for tensor in self.hub for name in tensor.parameters
        }

    def prime_to_hf(self, state_dict: StateDict) -> None:
        """Rename from the names in memory to the hub's. Returns views if strides allow it."""
        ready = [tensor for tensor in self.hub if all(name in state_dict for name in tensor.parameters)]
        made = {tensor.name: tensor.read(state_dict) for tensor in ready}
        for name in {name for tensor in ready for name in tensor.parameters}:
            if all(part.name in made for part in self.parts[name]):
                del state_dict[name]
        state_dict.update(made)

    def hf_to_prime(self, state_dict: StateDict) -> None:
        """Rename from the hub's names to those in memory."""
        made: StateDict = {}
        for name, parts in self.parts.items():
            if not all(part.name in state_dict for part in parts):
                continue
            made[name] = state_dict[parts[0].name].new_empty(self.specs[name].shape)
            for part in parts:
                part.write_into(name, made[name], state_dict[part.name])
        for tensor in self.hub:
            if all(name in made for name in tensor.parameters):
                del state_dict[tensor.name]
        state_dict.update(made)
