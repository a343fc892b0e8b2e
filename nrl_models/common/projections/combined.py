"""Declare groups of linears that share an input and run as one fused matmul."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn

from nrl_models.common.modules import is_at, own_modules
from nrl_models.common.projections.group import LinearGroup
from nrl_models.common.projections.obstacles import hooked_module
from nrl_models.common.upstream_torch import current_graph_task_id

FEW_SEQUENCES = 16
"""Maximum number of sequences decoded on a CPU without groups, because the matmuls are small."""


class CombinedProjections(nn.Module):
    """Mixin for a Hugging Face module that fuses linears with a common input into one matmul.

    A family names it in `FamilyModel.rewrites`. In a class definition, it precedes the Hugging Face class:

        class DeepseekV3Attention(CombinedProjections, hf.DeepseekV3Attention):
            combined = {"qkv_a_proj": ("q_a_proj", "q_proj", "kv_a_proj_with_mqa")}

    Rules for forming a group:

    - Missing linears are skipped: absent or None (a configuration without `q_a_proj`, a layer that reuses the
      keys of another layer), or wrapped in another module. A group needs at least two linears.
    - If only some linears have a bias, the larger part (with or without bias) is fused, and the others run separately.
    - If a linear is wrapped later (by PEFT or a checkpoint wrapper), or a module inside has forward hooks, all linears
      of its group run separately.
    - A class may serve both self-attention and cross-attention, whose linears read two inputs. `places` then restricts
      a group to some modules by a part of their dotted names (`crossattention`).

    When a few sequences are decoded on a CPU, linears run separately: fusing so few rows saves no time, and the checks
    would take a few percent of the step (docs/benchmarks.md).

    Attributes:
        combined: Group name to names of its linears, in row order. The group (`LinearGroup`) is an attribute of that
            name, and not a submodule.
        places: Group name to the part of module names that the group is restricted to.
    """

    combined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    places: ClassVar[Mapping[str, str]] = {}

    _groups: tuple[LinearGroup, ...] = ()
    _join_when_run: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.combine_projections()

    def combine_projections(self, name: str = "") -> None:
        """Form all groups of `combined` in place. Parameters keep their identity and values.

        Args:
            name: Name of this module in its model, for groups that are restricted to a place.
        """
        for group_name, linears in self.possible_groups(name):
            if group_name not in self.__dict__:
                # Not registered: code that walks the model finds Hugging Face's modules, and no other.
                self.__dict__[group_name] = group = LinearGroup(linears)
                self.__dict__["_groups"] = (*self._groups, group)

    def possible_groups(self, name: str = "") -> Iterator[tuple[str, Mapping[str, nn.Linear]]]:
        """Yield the groups that `combine_projections` forms: name, and linears by name, in row order."""
        for group_name, names in self.combined.items():
            if group_name in self.places and not is_at(name, self.places[group_name]):
                continue
            linears = _alike_in_bias({each: linear for each in names if _is_layer(linear := getattr(self, each, None))})
            if len(linears) >= 2:
                yield group_name, linears

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Hugging Face forward, with one matmul per group where possible. Same arguments and results."""
        if torch.compiler.is_compiling():  # the compiler fuses linears itself
            return super().forward(*args, **kwargs)
        # Not in a backward pass: a checkpoint runs this again, and must compute the same as before.
        if self._join_when_run and current_graph_task_id() == -1:
            self.join_projections()
        groups = [group for group in self._groups if group.is_joined or group.always_answers]
        is_hooked = bool(groups) and hooked_module(self) is not None
        if groups and (is_hooked or _is_step_of_decoding(args, kwargs)):
            groups = [group for group in groups if group.always_answers]
        running = [(group, run) for group in groups if not group.wrapped(self) and (run := group.begin()) is not None]
        if not running:
            return super().forward(*args, **kwargs)
        for _, run in running:
            run.at_calls = is_hooked
        complete = False
        try:
            result = super().forward(*args, **kwargs)
            complete = True
            return result
        finally:
            for group, run in running:
                group.end(run, complete=complete)

    def join_projections(self) -> None:
        """Move the weights of each group into one buffer, if they are not in one already and nothing prevents it."""
        waiting = [group.join() for group in self._groups]
        self.__dict__["_join_when_run"] = any(waiting)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast parameters (`.to`, `.half`, ...), then make the new weights of each group contiguous again."""
        result = super()._apply(fn, recurse)
        self.join_projections()
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        # With `assign=True`, the passed tensors become parameters of the linears, which load after their parent.
        if local_metadata.get("assign_to_params_buffers"):
            self.__dict__["_join_when_run"] = True
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # While an object is unpickled, the unpickler still references the memory of its tensors.
        self.__dict__["_join_when_run"] = not all(group.is_joined for group in self._groups)


def _is_step_of_decoding(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a module decodes one token of a few sequences on a CPU, without gradients."""
    if torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    hidden_states = args[0] if args else next(iter(kwargs.values()), None)
    if type(hidden_states) is not torch.Tensor or hidden_states.dim() < 2:
        return False
    *_, length, features = hidden_states.shape
    return length == 1 and hidden_states.is_cpu and hidden_states.numel() <= FEW_SEQUENCES * features


def groups_of(model: nn.Module) -> Iterator[tuple[str, str, LinearGroup]]:
    """Yield all groups of a model: name of the parent module, name of the group in it, and the group."""
    for owner_name, owner in own_modules(model):
        if isinstance(owner, CombinedProjections):
            for name, value in owner.__dict__.items():
                if isinstance(value, LinearGroup):
                    yield owner_name, name, value


def declared_groups(model: nn.Module) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the groups of a model whether or not they are fused: name of the parent module, group, and its linears."""
    for owner_name, owner in own_modules(model):
        if isinstance(owner, CombinedProjections):
            formed = {name: value.names for name, value in owner.__dict__.items() if isinstance(value, LinearGroup)}
            possible = {name: tuple(linears) for name, linears in owner.possible_groups(owner_name)}
            for name, linears in (possible | formed).items():
                yield owner_name, name, linears


def _alike_in_bias(linears: Mapping[str, nn.Linear]) -> Mapping[str, nn.Linear]:
    """Return the larger set: linears with a bias, or linears without."""
    without = {name: linear for name, linear in linears.items() if getattr(linear, "bias", None) is None}
    with_bias = {name: linear for name, linear in linears.items() if name not in without}
    return without if len(without) >= len(with_bias) else with_bias


def combine(**groups: tuple[str, ...]) -> type[CombinedProjections]:
    """Return a `CombinedProjections` for other groups: `combine(qkv_a_proj=("q_a_proj", "kv_a_proj_with_mqa"))`.

    Args:
        groups: Names of the linears of each group, in row order.
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
"""Groups with a predefined class."""


def _is_layer(member: Any) -> TypeGuard[nn.Linear]:
    """Return whether a group's member is a layer itself: some versions of transformers put it into a module."""
    return member is not None and not any(member.children())


def combine_groups(*groups: str) -> type[CombinedProjections]:
    """Return a `CombinedProjections` for groups in text form: `"q_proj k_proj v_proj"` or `"qkv: q_proj k_proj
    v_proj"`.

    Args:
        groups: Names of linears in row order, optionally with the group's name in front (default: `combined_name`) and
            the location that the group is restricted to at the end: `"key value @ crossattention"`.
    """
    named, places = {}, {}
    for group in groups:
        text, _, location = group.partition("@")
        name, _, text = text.rpartition(":")
        linears = tuple(text.split())
        name = name or combined_name(linears)
        named[name] = linears
        if location:
            places[name] = location.strip()
    made = combine(**named)
    made.places = places
    return made


def combined_name(group: Sequence[str]) -> str:
    """Return the default name of a group."""
    known = KNOWN_GROUPS.get(tuple(group))
    if known is not None:
        return next(iter(known.combined))
    if all(name.endswith("_proj") for name in group):
        return "_".join(name.removesuffix("_proj") for name in group) + "_proj"
    return "_".join(group)
