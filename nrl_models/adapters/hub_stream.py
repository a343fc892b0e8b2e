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

from nrl_models.common.modules import innermost, named_tensors, own_name, without_wrappers
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.layouts import loaded_names, note_loaded_names
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.upstream_conversions import loaded_conversions, set_loaded_conversions
from nrl_models.errors import TrainerError, UnknownArgumentError
from nrl_models.loading.skeleton import build_skeleton
from nrl_models.registry import unmet


def check_trainer(requirement: str) -> None:
    """Check that the installed trainer has a version that its adapter supports.

    Args:
        requirement: Distribution and version range, such as `trl>=1.16,<1.17`.

    Raises:
        TrainerError: If it is not installed, or has another version.
    """
    if (found := unmet(Requirement(requirement))) is not None:
        raise TrainerError(
            f"this adapter needs {found}. Install that version, or an nrl_models with an adapter for yours."
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
            StateDictError: If a name or shape is not the model's.
        """
        named = ((name, tensor) for name, _, _, tensor in named_tensors(without_wrappers(unwrapped(model), peft=True)))
        buffers = ((name, tensor) for name, tensor in named if not isinstance(tensor, nn.Parameter))
        tied = tied_names(without_wrappers(unwrapped(model), peft=True))
        for name, tensor in self.adapter.iter_to_hf(self._once(chain(tensors, buffers), tied)):
            yield name, tensor.contiguous()

    @staticmethod
    def _once(
        tensors: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, under its saved name. Drops tensors that are tied to a tensor yielded before."""
        seen = set()
        for name, tensor in tensors:
            kept = tied.get(own_name(name), own_name(name))
            if kept not in seen:
                seen.add(kept)
                yield kept, tensor


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
