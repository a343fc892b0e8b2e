"""prime-rl: register this library's models as custom models, with a `conversion_chain` from their layout tables.

    from nrl_models.adapters import prime_rl

    prime_rl.register("MixtralForCausalLM")

Without arguments, `register()` registers every architecture that prime-rl has no class for.

Call it at the start of prime-rl's trainer, before it builds its model. prime-rl is not on the package index. This
module uses the interface of its public source, version 0.8 (`PreTrainedModelPrimeRL`, `ConvOp`, the mappings of
`prime_rl.trainer.models`). It is tested with a stand-in for that interface, but not with prime-rl itself.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.adapters.hub_stream import check_trainer
from nrl_models.adapters.hub_table import HubTable, StateDict
from nrl_models.auto import AutoModelForCausalLM, AutoModelForImageTextToText
from nrl_models.common.dtypes import kept_dtypes
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.upstream import register_class
from nrl_models.errors import UnknownArchitectureError, UnknownArgumentError
from nrl_models.loading.skeleton import build_skeleton, compute_buffers

REQUIREMENT = "prime-rl>=0.8,<0.9"


def register(*architectures: str) -> list[str]:
    """Register this library's classes with prime-rl, for `model.impl=custom`.

    Args:
        architectures: Names as in `config.architectures`. Default: all language models, with and without images, whose
            configurations prime-rl has no class for. Architectures that you pass replace prime-rl's classes.

    Returns:
        The registered architectures.

    Raises:
        TrainerError: If prime-rl is not installed, or has another version.
        UnknownArchitectureError: If this library lacks some of them as language models. Then none is registered.
    """
    check_trainer(REQUIREMENT)
    from prime_rl.trainer import models

    kinds = {
        AutoModelForCausalLM: models._CUSTOM_CAUSAL_LM_BY_MODEL_TYPE,
        AutoModelForImageTextToText: models._CUSTOM_VLM_MAPPING,
    }
    registrations: dict[str, tuple[Any, dict[str, Any]]] = {
        name: (registry.model_class(name), by_model_type)
        for name in architectures or registry.architectures(aliases=False)
        for auto_class, by_model_type in kinds.items()
        if auto_class.serves(name) and name in registry.MODEL_ARCH_MAPPING and not registry.unmet_requirement(name)
    }
    if unknown := [name for name in architectures if name not in registrations]:
        raise UnknownArchitectureError(f"not registered here as language models: {', '.join(unknown)}")
    registered = []
    taken = set().union(*kinds.values()) if not architectures else set()
    for name, (model_class, by_model_type) in registrations.items():
        config_class = model_class.config_class
        if config_class.model_type in taken:
            continue
        by_model_type[config_class.model_type] = made = _for_prime(model_class, models.PreTrainedModelPrimeRL)
        register_class(models._CUSTOM_CAUSAL_LM_MAPPING, config_class, made)
        registered.append(name)
    return registered


@lru_cache(maxsize=8)  # called once per layer
def _table(model_class: Any, config_class: Any, config: str) -> HubTable:
    return HubTable(StateDictAdapter(build_skeleton(model_class, config_class(**json.loads(config)), torch.bfloat16)))


def _for_prime(model_class: Any, base: type[PreTrainedModel]) -> Any:
    """Return this library's class as a subclass of prime-rl's base class.

    prime-rl's base class changes kernels of transformers for its own layers, so it comes last in the bases.
    """

    class Model(model_class, base):  # type: ignore[misc, valid-type]
        """This library's model with the methods of a custom model of prime-rl."""

        _check_and_adjust_attn_implementation = PreTrainedModel._check_and_adjust_attn_implementation
        get_correct_experts_implementation = PreTrainedModel.get_correct_experts_implementation

        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.base_model.register_forward_pre_hook(_without_prime_keywords, with_kwargs=True)

        @classmethod
        def conversion_chain(cls, config: Any) -> list[HubTable]:
            config_class: Any = type(config)
            return [_table(model_class, config_class, config.to_json_string(use_diff=False))]

        def is_prime_state_dict(self, state_dict: StateDict) -> bool:
            return any(name in state_dict for name in self.conversion_chain(self.config)[0].parts)

        def is_hf_state_dict(self, state_dict: StateDict) -> bool:
            return not self.is_prime_state_dict(state_dict)

        def keep_in_fp32_for_weight_transfer(self, name: str) -> bool:
            return kept_dtypes(self, torch.bfloat16)(name) is torch.float32

        def init_buffers_post_meta(self) -> None:
            compute_buffers(self)

    Model.__name__ = Model.__qualname__ = model_class.__name__
    Model.__module__ = model_class.__module__
    return Model


def _without_prime_keywords(module: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Drop keywords that prime-rl passes for document boundaries, because `position_ids` also have them.

    Raises:
        UnknownArgumentError: Replayed routing is passed. Use `replay_routing` in `nrl_models.common.forward.routing`.
    """
    if keywords.pop("routed_experts", None) is not None:
        raise UnknownArgumentError(
            "routed_experts: expected none; wrap the forward in nrl_models.common.forward.routing.replay_routing"
        )
    return args, {name: value for name, value in keywords.items() if not name.startswith("seq_lens")}
