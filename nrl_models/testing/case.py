"""One architecture under test: its class, the reference class, and both with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.dtypes import kept_dtypes
from nrl_models.common.forward.soft_cap import reference_attention
from nrl_models.common.process_state import BUILDING
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import Inputs, inputs_for
from nrl_models.testing.tiny import tiny_config

SEED = 42


@dataclass(eq=False)
class FamilyCase:
    """A family's class under test.

    Args:
        model_class: The class under test.
        device: Device of the tests. Default: CUDA if available.
        tiny: Values for the tiny configuration, in addition to the class's `tiny`.
    """

    model_class: type[FamilyModel]
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tiny: Mapping[str, Any] = field(default_factory=dict)
    _tests_reference: bool = field(default=False, init=False)
    _references: dict[torch.dtype, PreTrainedModel] = field(default_factory=dict, init=False)
    _models: dict[torch.dtype, FamilyModel] = field(default_factory=dict, init=False)
    _inputs: dict[tuple[tuple[str, Any], ...], Inputs] = field(default_factory=dict, init=False)

    @property
    def architecture(self) -> str:
        """Name of the class."""
        return self.model_class.__name__

    @cached_property
    def reference_class(self) -> type[PreTrainedModel]:
        """The Hugging Face class."""
        return self.model_class.reference_class()

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        """Class of the model's configurations."""
        assert self.reference_class.config_class is not None
        return self.reference_class.config_class

    @property
    def tiny_values(self) -> dict[str, Any]:
        """Values for the tiny configuration from the class and this case."""
        return {**self.model_class.tiny, **self.tiny}

    @property
    def config(self) -> PreTrainedConfig:
        """A tiny configuration, created at each access."""
        return tiny_config(self.config_class, self.tiny_values, self.reference_class)

    @property
    def full_configs(self) -> dict[str, PreTrainedConfig]:
        """Configurations of published size by name: the class's default, and its `published` models.

        Defaults that transformers cannot build are left out, because they describe no model.
        """
        published = {name: self.config_class(**values) for name, values in self.model_class.published.items()}
        default = self.config_class()
        try:
            with torch.device("meta"):
                self.reference_class(copy.deepcopy(default))
        except Exception:  # any error of a missing size
            return published
        return {"default": default} | published

    def inputs(self, **options: Any) -> Inputs:
        """Return random inputs for this class, see `inputs_for`. Creates new tensors in each call."""
        key = tuple(sorted(options.items()))
        if key not in self._inputs:  # runs the model on some inputs, to find out the form of images
            self._inputs[key] = inputs_for(self.reference(), **options)
        return {name: value.clone() for name, value in self._inputs[key].items()}

    def reference(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return the reference with randomized weights, in evaluation mode. It is shared, so do not modify it."""
        if dtype not in self._references:
            torch.manual_seed(SEED)
            attention = reference_attention(self.reference_class)
            with BUILDING:
                reference = self.reference_class._from_config(self.config, dtype=dtype, **attention)
            randomize(reference)
            widen(reference, dtype)
            reference.to(self.device)
            self._references[dtype] = reference.eval()
        return self._references[dtype]

    def model(self, dtype: torch.dtype = torch.float32) -> FamilyModel:
        """Return the model under test with the reference's weights, in evaluation mode. Shared: do not modify it."""
        if self._tests_reference:
            return cast(FamilyModel, self.reference(dtype))
        if dtype not in self._models:
            model = self.model_class.from_config(self.config, dtype=dtype, device=self.device, combine=True)
            widen(model, dtype)
            model.load_state_dict(self.reference(dtype).state_dict())
            self._models[dtype] = model.eval()
        return self._models[dtype]

    def of_reference(self) -> FamilyCase:
        """Return the same case with the reference as the model under test, to run a test on transformers' class."""
        case = copy.copy(self)
        case._tests_reference = True
        case._references = {}  # built again, because some references keep states of their last forward
        return case

    def new_pair(self, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, FamilyModel]:
        """Return copies of `reference` and `model` that may be modified."""
        return copy.deepcopy(self.reference(dtype)), copy.deepcopy(self.model(dtype))


@torch.no_grad()
def widen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert to fp32, in place, the parameters that transformers keeps in fp32 when it loads a model in `dtype`.

    A new model has all parameters in `dtype`. Some models do not run in that state.
    """
    kept_dtype = kept_dtypes(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if wide := kept_dtype(name):
            tensor.data = tensor.data.to(wide)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Randomize parameters that initialization sets to constants: norms, biases, sinks, router corrections.

    With norms of one and biases of zero, swapped or dropped parameters would have no effect.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and (tensor.ndim <= 1 or tensor.std() == 0):
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
