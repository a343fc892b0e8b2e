"""Parallel plans: how each module of a model is sharded, based on declarations of transformers and the family.

For each architecture, transformers lists the linears that tensor parallelism shards and the expert stacks that expert
parallelism shards. Data parallelism shards all parameters, and needs no list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nrl_models.common.modules import input_embeddings, own_modules, own_parameters
from nrl_models.distributed.mesh import size_of
from nrl_models.distributed.pipeline.schedules import Schedule
from nrl_models.distributed.tensor.styles import (
    DIVIDED_EMBEDDING,
    DIVIDED_HEAD,
    EXPERT_STYLES,
    TENSOR_STYLES,
    ExpertsOfThisRank,
    Style,
)

Plan = Literal["auto"] | Mapping[str, str]
"""`"auto"`, or rules (a style for each name). Rules replace the model's own rules for the modules that they name."""


@dataclass(frozen=True)
class ParallelPlan:
    """How to shard a model.

    Names may have `*` for a number, as in transformers' plans: `model.layers.*.self_attn.q_proj`.

    Args:
        tensor: Style from `TENSOR_STYLES` for each module or parameter that `tp` shards. None uses the plan of
            transformers and the family.
        expert: Style from `EXPERT_STYLES` for each module or parameter that `ep` shards. None uses the plan of
            transformers and the family.
        units: Class names of the modules that `fsdp` gathers and frees as one unit. None uses the modules that
            transformers never splits.
        param_dtype: Dtype of parameters during computation. Requires `fsdp` in the mesh. None keeps their own dtype.
        reduce_dtype: Dtype in which `fsdp` reduces gradients. None uses `param_dtype`.
        reshard_after_forward: Whether `fsdp` frees a unit's parameters between forward and backward.
        offload: Whether `fsdp` keeps parameters and gradients on the CPU. Requires `fsdp` in the mesh.
        schedule: Name in `Schedule` of the order in which the ranks of `pp` process microbatches.
        stages_per_rank: Number of stages per rank of `pp`. None uses the schedule's number, or 2 if it has none.
    """

    tensor: Mapping[str, str] | None = None
    expert: Mapping[str, str] | None = None
    units: tuple[str, ...] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    offload: bool = False
    schedule: str = Schedule.ONE_FORWARD_ONE_BACKWARD
    stages_per_rank: int | None = None

    def stages_of(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the numbers of the stages that a rank of `pp` holds."""
        return Schedule(self.schedule).stages_of(rank, ranks, self.stages_per_rank)


def declared_tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of a model, with the family's additions, and a sharded vocabulary.

    Embedding and head are both sharded over the vocabulary, so that they can stay tied. If the number of ranks does not
    divide the vocabulary, both stay unsharded.
    """
    plan = dict(getattr(model, "_tp_plan", None) or {}) | dict(getattr(model, "tensor_parallel", {}))
    names = {module: name for name, module in own_modules(model)}
    embedding, head = input_embeddings(model), model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding):
        plan[names[embedding]] = DIVIDED_EMBEDDING.name
    if isinstance(head, nn.Linear) and head in names:
        plan[names[head]] = DIVIDED_HEAD.name
    return plan


def declared_expert_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' expert-parallel plan of a model, without linears that it also shards.

    In transformers, one set of ranks shards both. Here, `ep` shards experts, and `tp` shards linears by its own plan.
    """
    plan = getattr(model, "_ep_plan", None) or {}
    linears = {style.name for style in TENSOR_STYLES.values() if style.divides_linears}
    return {name: style for name, style in plan.items() if style not in linears}


def units_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Return class names of the FSDP units: the modules that transformers never splits."""
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    return tuple(sorted(declared))


def tensor_styles(model: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """Return how `tp` shards each module and parameter that a checked plan names."""
    return {name: TENSOR_STYLES[style] for name, style in styles_by_name(model, plan.tensor).items()}


def expert_styles(model: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """Return how `ep` shards each module and parameter that a checked plan names."""
    return {name: EXPERT_STYLES[style] for name, style in styles_by_name(model, plan.expert).items()}


def is_vocabulary(model: PreTrainedModel, module: nn.Module) -> bool:
    """Return True if `module` is the model's embedding or head."""
    return module is input_embeddings(model) or module is model.get_output_embeddings()


def vocabulary_is_divided(model: PreTrainedModel, mesh: DeviceMesh) -> bool:
    """Return True if `tp` shards the vocabulary, which requires that it can shard both embedding and head."""
    both: list[Any] = [input_embeddings(model), model.get_output_embeddings()]
    return all(module is None or module.weight.shape[0] % size_of(mesh, "tp") == 0 for module in both)


def experts_over(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> str | None:
    """Return the mesh dimension that shards a stack of experts: `ep`, or `tp` if the plan has no `tp` rule for it.

    None if the experts are not sharded: there is no stack or no such dimension, or it does not divide their number.
    """
    styles = expert_styles(model, plan)
    divided = [name for name, style in styles.items() if style.dim(3) is not None]
    if not divided:
        return None
    if size_of(mesh, "ep") > 1:
        return "ep"
    ranks, tensor = size_of(mesh, "tp"), styles_by_name(model, plan.tensor)
    parameters = dict(own_parameters(model, duplicates=True))
    fits = all(name not in tensor and parameters[name].shape[0] % ranks == 0 for name in divided)
    fits &= not any(without_rule(model, name, styles) for name in expert_stacks(styles))
    return "tp" if ranks > 1 and fits else None


def styles_by_name(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """Return the style of each module and parameter that a plan names."""
    names = names_in(model)
    styles: dict[str, str] = {}
    for pattern, style in (plan or {}).items():
        styles |= dict.fromkeys(filter(name_pattern(pattern).fullmatch, names), style)
    return styles


def name_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern of the names that a plan's name matches."""
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def names_in(model: nn.Module) -> list[str]:
    """Return the names of a model's modules, then of its parameters."""
    return [name for name, _ in (*own_modules(model), *own_parameters(model, duplicates=True))]


def expert_stacks(styles: Mapping[str, Style]) -> list[str]:
    """Return the stacks of experts among the modules with a style."""
    return [name for name, style in styles.items() if style.compute is ExpertsOfThisRank]


def without_rule(model: nn.Module, stack: str, styles: Mapping[str, Style]) -> list[str]:
    """Return parameters in a stack of experts that have no style, neither directly nor through their module."""
    names = [f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_parameters()]
    return [name for name in names if not {name, name.rpartition(".")[0]} & (styles.keys() - {stack})]
