"""Run a single layer of a model with the arguments that the model passes to it."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.upstream_torch import tree_leaves
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.inputs.images import cast


@dataclass(frozen=True)
class Call:
    """Arguments with which a model called a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_random_input(self, seed: int) -> Call:
        """Return the same call with random numbers instead of the first floating-point tensor (the hidden states).

        If that tensor is passed several times (as queries and keys), all occurrences are replaced. A call with only
        token ids is unchanged.
        """
        arguments = (*self.args, *self.kwargs.values())
        hidden = next((value for value in arguments if torch.is_tensor(value) and value.is_floating_point()), None)
        if hidden is None:
            return self
        new = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed)).to(hidden)
        return Call(
            tuple(new if value is hidden else value for value in self.args),
            {name: new if value is hidden else value for name, value in self.kwargs.items()},
        )


def component_classes(reference: nn.Module) -> set[type[nn.Module]]:
    """Return the layer classes that a modeling file defines: neither torch's classes, nor complete models."""
    return {
        type(module)
        for module in reference.modules()
        if not type(module).__module__.startswith("torch.") and not isinstance(module, PreTrainedModel)
    }


def calls_of(model: nn.Module, classes: Collection[type[nn.Module]], inputs: Inputs) -> dict[str, Call]:
    """Record the first call of each module whose class is in `classes`, by module name, in one forward of `model`."""
    calls: dict[str, Call] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in calls:  # copied, because a cache in the arguments grows
            calls[name] = Call(*copy.deepcopy((args, dict(kwargs))))

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if type(module) in classes:
                stack.callback(module.register_forward_pre_hook(partial(record, name), with_kwargs=True).remove)
        model(**cast(inputs, model), use_cache=False)
    return calls


def run_layer(layer: nn.Module, call: Call) -> list[torch.Tensor]:
    """Run a layer, and return all tensors in its output, including nested ones (`ModelOutput` is a mapping).

    The layer receives copies of the arguments, so a cache in them is not modified.
    """
    args, kwargs = copy.deepcopy((call.args, call.kwargs))
    with torch.no_grad():
        return tensors_in(layer(*args, **kwargs))


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return all tensors in a layer's output, including nested ones in tuples, lists and mappings."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
