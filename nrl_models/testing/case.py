"""One architecture under test: its class, the class it must equal, and both with the same weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common import FamilyModel
from nrl_models.parity.inputs import Inputs, inputs_for
from nrl_models.testing.tiny import tiny_config

SEED = 42


@dataclass(eq=False)
class FamilyCase:
    """A family's class under test.

    Args:
        model_class: the class.
        device: where to test; CUDA when there is one.
    """

    model_class: type[FamilyModel]
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def architecture(self) -> str:
        """The class's name."""
        return self.model_class.__name__

    @cached_property
    def reference_class(self) -> type[PreTrainedModel]:
        """The uncombined class."""
        return self.model_class.reference_class()

    @property
    def config(self) -> PreTrainedConfig:
        """A tiny configuration, new at each call."""
        return tiny_config(self.reference_class.config_class, self.model_class.tiny)

    @property
    def full_config(self) -> PreTrainedConfig:
        """A configuration of published size: the class's default."""
        return self.reference_class.config_class()

    def inputs(self, **options: Any) -> Inputs:
        """Random inputs of the kind this class takes, see `inputs_for`."""
        return inputs_for(self.model_class, self.config, self.device, **options)

    def reference(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The reference with randomised weights, in evaluation mode. Shared: do not change it."""
        return _pair(self, dtype)[0]

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model under test with the reference's weights, in evaluation mode. Shared: do not change it."""
        return _pair(self, dtype)[1]

    def new_pair(self, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Copies of `reference` and `model` to change at will."""
        return copy.deepcopy(self.reference(dtype)), copy.deepcopy(self.model(dtype))


@lru_cache(maxsize=2)  # one class at a time, in fp32 and bf16
def _pair(case: FamilyCase, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.manual_seed(SEED)
    reference = case.reference_class._from_config(case.config, dtype=dtype)
    randomise(reference)
    reference = reference.to(case.device).eval()
    model = case.model_class.from_config(case.config, dtype=dtype, device=case.device).eval()
    weights = model.state_dict_adapter.from_hf(reference.state_dict())
    model.load_state_dict(weights)
    return reference, model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Randomise what initialisation leaves constant: norms, biases, sinks, router corrections.

    With norms at one and biases at zero, swapped or dropped ones would go unnoticed.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and (tensor.ndim <= 1 or tensor.std() == 0):
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
