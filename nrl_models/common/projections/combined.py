"""Declaring groups: which linears of a module read the same input and are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn

from nrl_models.common.modules import is_at, own_modules
from nrl_models.common.projections.group import LinearGroup
from nrl_models.common.upstream_torch import current_graph_task_id

FEW_SEQUENCES = 16
"""Up to so many are decoded on a CPU without groups: there is little to multiply."""


class CombinedProjections(nn.Module):
    """Mixin for a Hugging Face module whose linears of one input are computed in one matmul.

    A family names it in `FamilyModel.rewrites`; in a class written out it goes before the Hugging Face class:

        class DeepseekV3Attention(CombinedProjections, hf.DeepseekV3Attention):
            combined = {"qkv_a_proj": ("q_a_proj", "q_proj", "kv_a_proj_with_mqa")}

    A group's linears that a module lacks are left out: absent or None (a configuration without `q_a_proj`, a layer that
    reuses another's keys), or wrapped in another module. With fewer than two left the group is not formed. Where a
    configuration gives a bias to only some of them, the majority is combined, and the others stay as they are. A linear
    that is wrapped later (by PEFT, by a checkpoint wrapper) makes all linears of its group compute separately.

    Where a class is used for self-attention and for cross-attention, its linears read one input in the former and two
    in the latter. A group then has a place: a part of the dotted names of the modules it applies to (`crossattention`).

    In a step of decoding a few sequences on a CPU each linear computes itself: one matmul of so few rows takes as long
    as several, and checking that it is allowed takes a few percent of such a step (docs/benchmarks.md).

    Attributes:
        combined: for each group's name the linears it computes, in row order. The group (`LinearGroup`) is an attribute
            of that name; it is no submodule.
        places: for some of those names the place of the group.
    """

    combined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    places: ClassVar[Mapping[str, str]] = {}

    _groups: tuple[LinearGroup, ...] = ()
    _join_when_run: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.combine_projections()

    def combine_projections(self, name: str = "") -> None:
        """Form every group of `combined`, in place. Parameters stay the same objects, with the same values.

        Args:
            name: of this module in its model; groups whose place it is not in are not formed.
        """
        for group_name, names in self.combined.items():
            if group_name in self.places and not is_at(name, self.places[group_name]):
                continue
            linears = _alike_in_bias({each: linear for each in names if _is_layer(linear := getattr(self, each, None))})
            if len(linears) >= 2 and group_name not in self.__dict__:
                # Not registered: code that walks the model finds Hugging Face's modules, and no other.
                self.__dict__[group_name] = group = LinearGroup(linears)
                self.__dict__["_groups"] = (*self._groups, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The Hugging Face forward, with one matmul for each group that can. Arguments and results are its own."""
        if torch.compiler.is_compiling():  # the compiler fuses by itself, and sees each linear
            return super().forward(*args, **kwargs)
        # Not in a backward pass, where a checkpoint runs this again, and it has to compute as it did before.
        if self._join_when_run and current_graph_task_id() == -1:
            self.join_projections()
        decodes = _is_step_of_decoding(args, kwargs)
        running = [
            (group, run)
            for group in self._groups
            if (group.always_answers or not decodes) and not group.wrapped(self) and (run := group.begin()) is not None
        ]
        if not running:
            return super().forward(*args, **kwargs)
        complete = False
        try:
            result = super().forward(*args, **kwargs)
            complete = True
            return result
        finally:
            for group, run in running:
                group.end(run, complete=complete)

    def join_projections(self) -> None:
        """Put the weights of every group side by side in memory, where they are not and can be."""
        waiting = [group.join() for group in self._groups]
        self.__dict__["_join_when_run"] = any(waiting)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast parameters (`.to`, `.half`, ...), and make the copies neighbours, too."""
        result = super()._apply(fn, recurse)
        self.join_projections()
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        # With `assign=True` the linears, which load after their owner, get the given tensors as parameters.
        if local_metadata.get("assign_to_params_buffers"):
            self.__dict__["_join_when_run"] = True
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # While an object is unpickled, the unpickler still references the memory of its tensors.
        self.__dict__["_join_when_run"] = not all(group.is_joined for group in self._groups)


def _is_step_of_decoding(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module reads one token of each of a few sequences on a CPU, and no gradients are wanted."""
    if torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    hidden_states = args[0] if args else next(iter(kwargs.values()), None)
    if type(hidden_states) is not torch.Tensor or hidden_states.dim() < 2:
        return False
    *_, length, features = hidden_states.shape
    return length == 1 and hidden_states.is_cpu and hidden_states.numel() <= FEW_SEQUENCES * features


def groups_of(model: nn.Module) -> Iterator[tuple[str, str, LinearGroup]]:
    """Every group in a model: the name of its owner in the model, its own name there, and the group."""
    for owner_name, owner in own_modules(model):
        if isinstance(owner, CombinedProjections):
            for name, value in owner.__dict__.items():
                if isinstance(value, LinearGroup):
                    yield owner_name, name, value


def _alike_in_bias(linears: Mapping[str, nn.Linear]) -> Mapping[str, nn.Linear]:
    """The linears with a bias or those without, whichever are more."""
    without = {name: linear for name, linear in linears.items() if getattr(linear, "bias", None) is None}
    with_bias = {name: linear for name, linear in linears.items() if name not in without}
    return without if len(without) >= len(with_bias) else with_bias


def combine(**groups: tuple[str, ...]) -> type[CombinedProjections]:
    """A `CombinedProjections` for other groups: `combine(qkv_a_proj=("q_a_proj", "kv_a_proj_with_mqa"))`.

    Args:
        groups: for each group's name the linears it computes, in row order.
    """
    return type("Combined", (CombinedProjections,), {"combined": groups})


class CombinedQKV(CombinedProjections):
    """Attention with one matmul, the group `qkv_proj`, for `q_proj`, `k_proj` and `v_proj`."""

    combined = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


class CombinedGateUp(CombinedProjections):
    """A gated MLP with one matmul, the group `gate_up_proj`, for `gate_proj` and `up_proj`."""

    combined = {"gate_up_proj": ("gate_proj", "up_proj")}


KNOWN_GROUPS: Mapping[tuple[str, ...], type[CombinedProjections]] = {
    tuple(linears): made for made in (CombinedQKV, CombinedGateUp) for linears in made.combined.values()
}
"""Groups that have a class of their own."""


def _is_layer(member: Any) -> TypeGuard[nn.Linear]:
    """Return whether a group's member is a layer itself: some versions of transformers put it into a module."""
    return member is not None and not any(member.children())


def combine_groups(*groups: str) -> type[CombinedProjections]:
    """A `CombinedProjections` for groups written as text: `"q_proj k_proj v_proj"`, or `"qkv: q_proj k_proj v_proj"`.

    Args:
        groups: names of linears, in row order, after the name of the group (see `combined_name` where there is none),
            before the place they are combined in, if they are not everywhere: `"key value @ crossattention"`.
    """
    named, places = {}, {}
    for group in groups:
        text, _, place = group.partition("@")
        name, _, text = text.rpartition(":")
        linears = tuple(text.split())
        name = name or combined_name(linears)
        named[name] = linears
        if place:
            places[name] = place.strip()
    made = combine(**named)
    made.places = places
    return made


def combined_name(group: Sequence[str]) -> str:
    """What a group is called where no family names it."""
    known = KNOWN_GROUPS.get(tuple(group))
    if known is not None:
        return next(iter(known.combined))
    if all(name.endswith("_proj") for name in group):
        return "_".join(name.removesuffix("_proj") for name in group) + "_proj"
    return "_".join(group)
