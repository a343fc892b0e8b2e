"""verl: return this library's models from transformers' auto classes, and send the hub's tensors to rollouts.

verl imports the module that a model's configuration names, in each process, before it loads anything:

    actor_rollout_ref.model.external_lib=nrl_models.adapters.verl
    actor_rollout_ref.actor.strategy=fsdp2

Importing this module is sufficient. Then the auto classes that verl uses, such as `AutoModelForCausalLM`, return this
library's classes. For language models with `fsdp` and `fsdp2`, `EngineRegistry` returns a subclass of
`FSDPEngineWithLMHead` with one changed method, `get_per_tensor_param`, which yields the tensors for rollouts. verl
finds it before its own class, because that has no device vendor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nrl_models import registry
from nrl_models.adapters.hub_stream import HubStream, check_trainer
from nrl_models.auto import AUTO_CLASSES, AutoModel
from nrl_models.common.upstream import classes_by_config, register_class
from nrl_models.errors import UnknownArgumentError

REQUIREMENT = "verl>=0.9,<0.10"

check_trainer(REQUIREMENT)

from verl.utils.device import get_device_id, get_device_name, get_vendor  # noqa: E402
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402

HEADS = [auto_class for auto_class in AUTO_CLASSES if auto_class is not AutoModel]
"""The auto classes, with transformers' in `upstream`, of models with a head."""


def register_with_transformers() -> list[str]:
    """Make transformers' auto classes return this library's classes for all architectures that it has.

    Returns:
        The architectures.
    """
    registry.register_custom_configs()
    names = [name for name in registry.architectures(aliases=False) if not registry.unmet_requirement(name)]
    ours: dict[str, Any] = {name: registry.model_class(name) for name in names}
    registered: list[str] = []
    for auto_class in HEADS:
        mapping: Any = classes_by_config(auto_class.upstream)
        classes: dict[Any, list[Any]] = {}
        for config_class in mapping.keys():  # noqa: SIM118, not a dict
            entry = mapping[config_class]
            classes[config_class] = list(entry) if isinstance(entry, tuple) else [entry]
        for name, model_class in ours.items():  # configurations that transformers lacks
            if auto_class.serves(name) and model_class.config_class.model_type in registry._CUSTOM_CONFIG_REGISTRATIONS:
                there = classes.setdefault(model_class.config_class, [])
                there += [model_class] if name not in {c.__name__ for c in there} else []
        for config_class, model_classes in classes.items():
            if known := [c.__name__ for c in model_classes if c.__name__ in ours]:
                replaced = tuple(ours.get(c.__name__, c) for c in model_classes)
                register_class(mapping, config_class, replaced if len(replaced) > 1 else replaced[0])
                registered += known
    return registered


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=get_device_name(), vendor=get_vendor()
)
class HubTensorsEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine; rollouts are updated with the hub's tensors."""

    def _build_module(self) -> Any:
        """Build the model as verl does.

        Raises:
            UnknownArgumentError: If weights could not be sent in the hub's format with these settings.
        """
        refused = {
            "strategy=fsdp: expected fsdp2, whose parameters keep their shapes": self.engine_config.strategy == "fsdp",
            "qat: expected none, as it sends quantized weights": self._qat_enabled,
        }
        if wrong := [why for why, holds in refused.items() if holds]:
            raise UnknownArgumentError(*wrong)
        module = super()._build_module()
        self.hub_stream = HubStream(module)
        return module

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **options: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Return an iterator over the hub's tensors, and None. Every rank has to exhaust the iterator.

        Adapters that are sent separately (`lora.merge=False`) and their configuration are returned as in verl.

        Raises:
            UnknownArgumentError: If the engine applies adapters itself, because it then uses names in memory.
        """
        if not hasattr(self.module, "peft_config"):
            return self.hub_stream(self._gathered(), self.module), None
        if self.model_config.lora.get("merge", False):
            merged, _ = super().get_per_tensor_param(layered_summon, base_sync_done, **options)
            return self.hub_stream(merged, self.module), None
        if not base_sync_done:
            self._check_names("lora.merge=False: expected True")
        return super().get_per_tensor_param(layered_summon, base_sync_done, **options)

    def get_per_tensor_param_shard(self, **options: Any) -> Any:
        """Return this rank's shards for delta updates, which verl sends under the parameters' names.

        Raises:
            UnknownArgumentError: If those names differ from the hub's.
        """
        self._check_names("checkpoint_engine.backend=delta_sharded: expected another")
        return super().get_per_tensor_param_shard(**options)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = get_device_id()
        for name, tensor in self.module.state_dict().items():
            if isinstance(tensor, DTensor):
                sharded: Any = tensor.to(device, non_blocking=True)
                tensor = sharded.full_tensor()
            yield name, tensor

    def _check_names(self, setting: str) -> None:
        adapter = self.hub_stream.adapter
        other = [name for name, tensor in adapter.hub.items() if tensor.view is None or name != str(tensor.view)]
        if other:
            raise UnknownArgumentError(
                f"{setting}, because {other[0]} and {len(other) - 1} more are not parameters in memory"
            )


register_with_transformers()
