"""The hub's tensors of a model that a trainer has wrapped, from the parameters that the trainer gathers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from nrl_models.common.modules import (
    innermost,
    is_disabled,
    named_tensors,
    own_name,
    peft_modules,
    peft_types,
    without_wrappers,
)
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.layouts import loaded_names, note_loaded_names
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.upstream_conversions import loaded_conversions, set_loaded_conversions
from nrl_models.errors import Problem, ProblemKind, StateDictError, TrainerError, UnknownArgumentError
from nrl_models.loading.skeleton import build_skeleton
from nrl_models.registry import unmet

_TIED_ADVICE = (
    "load the model with tie_word_embeddings=False before adding adapters. If both weights have an adapter, "
    "nrl_models.export_adapter(model) can also export the merged weights for a refit"
)


def check_trainer(requirement: str) -> None:
    """Check that the installed trainer has a version that its adapter supports.

    Args:
        requirement: Distribution and version range, such as `trl>=1.16,<1.17`.

    Raises:
        TrainerError: If it is not installed, or has another version.
    """
    if (mismatch := unmet(Requirement(requirement))) is not None:
        raise TrainerError(
            f"this adapter needs {mismatch}. Install that version, or an nrl_models with an adapter for yours."
        )


class HubStream:
    """Converts a trainer's stream of gathered parameters to the hub's tensors.

    Uses the layout table of the model's class, independent of wrappers (PEFT, DDP, FSDP, compiling). Create it after
    loading the model and before the first update. It keeps no tensors and no reference to the model.

    Args:
        model: The trainer's model, from this library or from transformers.

    Raises:
        UnknownArgumentError: If there is no transformers model inside.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = unwrapped(model)
        base: Any = next(kind for kind in type(inner).__mro__ if not issubclass(kind, FSDPModule))
        config: Any = inner.config
        bare = build_skeleton(base, config, inner.dtype)
        set_loaded_conversions(bare, loaded_conversions(inner))  # for the checkpoint's names
        note_loaded_names(bare, loaded_names(inner))
        self.adapter = StateDictAdapter(bare)

    def __call__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the hub's tensors, contiguous: parameters as they arrive, then persistent buffers.

        Tied tensors are yielded once, under the name that is saved.

        Args:
            tensors: Unsharded parameters under the names of the model's class.
            model: The trainer's model, for its buffers, which trainers omit (such as a router's correction bias).

        Raises:
            StateDictError: If a name or shape is not the model's. Before the first tensor, if one of two tied weights
                has an adapter that changes both when the trainer merges it in place.
        """
        inner = unwrapped(model)
        plain = without_wrappers(inner, peft=True)
        named = ((name, tensor) for name, _, _, tensor in named_tensors(plain))
        buffers = ((name, tensor) for name, tensor in named if not isinstance(tensor, nn.Parameter))
        tied = tied_names(plain)
        _check_tied_adapters(inner, tied)
        for name, tensor in self.adapter.iter_to_hf(self._once(chain(tensors, buffers), tied)):
            yield name, tensor.contiguous()

    @staticmethod
    def _once(
        tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, under its saved name. Drops tensors that are tied to a tensor yielded before."""
        seen = set()
        for name, tensor in tensors:
            saved_name = tied.get(own_name(name), own_name(name))
            if saved_name not in seen:
                seen.add(saved_name)
                yield saved_name, tensor


def _check_tied_adapters(model: nn.Module, tied: Mapping[str, str]) -> None:
    """Check that no tied weight has an adapter that the other's forward does not apply in the same way.

    Trainers merge adapters in place, and tied weights are one tensor. So it gets the deltas of both adapters, and twice
    those of an adapter that both share. Only replaced rows (trainable tokens) may be merged twice.

    Raises:
        StateDictError: If there is one. Lists all.
    """
    wrappers = {name: wrapper for name, wrapper in peft_modules(model) if not is_disabled(wrapper)}

    def tuners_on(name: str) -> list[Any]:
        wrapper = next((wrapper for module, wrapper in wrappers.items() if name.startswith(f"{module}.")), nn.Module())
        return [layer for layer in wrapper.modules() if isinstance(layer, peft_types()[:1])]

    problems = []
    for name, saved_name in tied.items():
        first, second = tuners_on(name), tuners_on(saved_name)
        replaces_rows = all("trainable_tokens_delta" in tuner.adapter_layer_names for tuner in (*first, *second))
        if not (replaces_rows and _parameters_in(first) == _parameters_in(second)):
            detail = (
                f"is tied to {saved_name}, and trainers merge adapters in place: both weights would get every adapter"
            )
            problems.append(Problem(ProblemKind.TIED, name, detail, advice=_TIED_ADVICE))
    if problems:
        raise StateDictError("the adapters of tied weights cannot be merged in place", problems)


def _parameters_in(tuners: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for tuner in tuners for parameter in tuner.parameters()}


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of trainers.

    Raises:
        UnknownArgumentError: If there is none.
    """
    inner: Any = innermost(model)
    while not isinstance(inner, PreTrainedModel):  # DeepSpeed's engine, torch's averaged model
        if not isinstance(inner := getattr(inner, "module", None), nn.Module):
            raise UnknownArgumentError(f"{type(model).__name__} has no transformers model inside")
        inner = innermost(inner)
    return inner
