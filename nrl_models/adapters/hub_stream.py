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
from nrl_models.common.state_dict.layouts import note_published_names, published_names
from nrl_models.common.state_dict.ties import tied_names
from nrl_models.common.upstream import loaded_conversions, set_loaded_conversions
from nrl_models.errors import TrainerError, UnknownArgumentError
from nrl_models.loading.skeleton import build_skeleton
from nrl_models.registry import unmet


def check_trainer(requirement: str) -> None:
    """Check that the installed trainer is one that its adapter was written for.

    Args:
        requirement: its distribution and range, e.g. `trl>=1.16,<1.17`.

    Raises:
        TrainerError: it is not installed, or of another version.
    """
    if (found := unmet(Requirement(requirement))) is not None:
        raise TrainerError(
            f"this adapter needs {found}. Install that version, or an nrl_models with an adapter for yours."
        )


class HubStream:
    """Turns a trainer's stream of gathered parameters into the hub's tensors.

    Its table is that of the model as its class builds it, whatever has wrapped it since (PEFT, DDP, FSDP, compiling).
    Make it after the model is loaded and before the first update; it keeps no tensor and no reference to the model.

    Args:
        model: the trainer's model, of this library or of transformers.

    Raises:
        UnknownArgumentError: there is no transformers model inside.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = unwrapped(model)
        base: Any = next(kind for kind in type(inner).__mro__ if not issubclass(kind, FSDPModule))
        config: Any = inner.config
        bare = build_skeleton(base, config, inner.dtype)
        set_loaded_conversions(bare, loaded_conversions(inner))  # which say what the checkpoint's names were
        note_published_names(bare, published_names(inner))
        self.adapter = StateDictAdapter(bare)

    def __call__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The hub's tensors, contiguous: of the parameters as they come, then of the persistent buffers.

        What is tied is given once, under the name that is saved.

        Args:
            tensors: whole parameters under the names of the model's class.
            model: the trainer's model, for its buffers, which trainers leave out (a router's correction).

        Raises:
            StateDictError: a name or shape that is not the model's.
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
        """The same, with each tensor that is tied now once, under the name that is saved."""
        seen = set()
        for name, tensor in tensors:
            kept = tied.get(own_name(name), own_name(name))
            if kept not in seen:
                seen.add(kept)
                yield kept, tensor


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside what trainers wrap it in.

    Raises:
        UnknownArgumentError: there is none.
    """
    inner: Any = innermost(model)
    while not isinstance(inner, PreTrainedModel):  # DeepSpeed's engine, torch's averaged model
        if not isinstance(inner := getattr(inner, "module", None), nn.Module):
            raise UnknownArgumentError(f"{type(model).__name__} has no transformers model inside")
        inner = innermost(inner)
    return inner
