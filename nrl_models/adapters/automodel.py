"""NeMo AutoModel and NeMo RL: register this library's classes, with state-dict adapters for Automodel.

    from nrl_models.adapters import automodel

    automodel.register("Qwen3MoeForCausalLM")  # or register(): every architecture
    model = NeMoAutoModelForCausalLM.from_pretrained(path)

NeMo RL reads the same registry in each of its workers (`policy.dtensor_cfg._v2=true`). Its weight sync
(`dtensor_params_generator`) converts what it gathers with `model.state_dict_adapter.convert_single_tensor_to_hf`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from nrl_models import registry
from nrl_models.adapters.hub_stream import check_trainer
from nrl_models.common.state_dict import adapter
from nrl_models.errors import UnknownArchitectureError
from nrl_models.family import FamilyModel

REQUIREMENT = "nemo_automodel>=0.7,<0.8"

SIBLING = "state_dict_adapter"
"""Module next to a model's module. NeMo RL looks for it before loading, to see whether the adapter can sync weights."""


def register(*architectures: str) -> list[str]:
    """Register this library's classes with Automodel's `ModelRegistry`, replacing its own.

    Args:
        architectures: Names as in `config.architectures`. Default: all that the installed packages can run.

    Returns:
        The registered architectures.

    Raises:
        TrainerError: If Automodel is not installed, or has another version.
        UnknownArchitectureError: If this library lacks some of them. Then none is registered.
        FamilyImportError: If an architecture needs another version of a package.
    """
    check_trainer(REQUIREMENT)
    from nemo_automodel._transformers import registry as theirs
    from transformers import AutoConfig

    names = architectures or [name for name in registry.architectures() if not registry.unmet_requirement(name)]
    classes: dict[str, Any] = {name: registry.model_class(name) for name in names}
    if unknown := [name for name, model_class in classes.items() if model_class is None]:
        raise UnknownArchitectureError(
            f"not registered: {', '.join(unknown)}. `nrl_models.registry.architectures()` lists what is."
        )
    for name, model_class in classes.items():
        theirs.ModelRegistry.register(name, model_for_automodel(model_class), exist_ok=True)
        model_type = model_class.config_class.model_type
        if theirs._CUSTOM_CONFIG_REGISTRATIONS.pop(model_type, None):  # of Automodel's class, whose keys differ
            AutoConfig.register(model_type, model_class.config_class, exist_ok=True)
        package = model_class.__module__.rpartition(".")[0]
        sys.modules[f"{package}.{SIBLING}"] = adapter
    return list(classes)


@cache
def model_for_automodel(model_class: type[FamilyModel]) -> type[FamilyModel]:
    """Return a subclass of this library's class whose adapter is also an instance of Automodel's adapter class.

    Automodel reads files directly into the views of such an adapter. With any other adapter, it renames the result of
    `from_hf` again with transformers' conversions, and does not set weights whose names are then wrong.
    """
    from nemo_automodel.components.checkpoint.state_dict_adapter import StateDictAdapter as Theirs

    class Adapter(adapter.StateDictAdapter, Theirs):
        """This library's adapter, as an instance of Automodel's class. Inherits the methods that only Automodel has."""

        _supports_low_memory_dcp_load = True

        def __init__(self, ours: adapter.StateDictAdapter) -> None:
            self.__dict__ |= ours.__dict__

        def to_hf(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> dict[str, Any]:
            """Convert as the base method does, without tied duplicates, which no file contains."""
            once = {name: tensor for name, tensor in state_dict.items() if self.tied.get(name) not in state_dict}
            return super().to_hf(once, *args, **options)

    def state_dict_adapter(self: Any) -> Adapter:
        return Adapter(super(made, self).state_dict_adapter)

    attributes = {"__module__": model_class.__module__, "__doc__": model_class.__doc__}
    metaclass: Any = type(model_class)
    made: Any = metaclass(
        model_class.__name__, (model_class,), attributes | {"state_dict_adapter": property(state_dict_adapter)}
    )
    return made
