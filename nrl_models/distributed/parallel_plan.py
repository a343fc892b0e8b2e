"""Parallel plans: how each module of a model is sharded, based on declarations of transformers and the family.

For each architecture, transformers lists the linears that tensor parallelism shards and the expert stacks that expert
parallelism shards. Data parallelism shards all parameters, and needs no list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nrl_models.common.config.walk import values_of_layers
from nrl_models.common.modules import class_name, own_modules, own_parameters
from nrl_models.distributed.mesh import check_mesh, describe, has_stages, size_of
from nrl_models.distributed.pipeline.schedules import Schedule, schedule_problems
from nrl_models.distributed.tensor.styles import (
    DIVIDED_EMBEDDING,
    DIVIDED_HEAD,
    EXPERT_STYLES,
    TENSOR_STYLES,
    ExpertsOfThisRank,
    Style,
    VocabularyParallel,
)
from nrl_models.errors import Problem, ProblemKind, ShardingError

Plan = Literal["auto"] | Mapping[str, str]
"""`"auto"`, or rules (a style for each name) that replace the model's own for the modules they name."""


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
        param_dtype: Dtype of parameters during computation under `fsdp`. None keeps their own dtype.
        reduce_dtype: Dtype in which `fsdp` reduces gradients. None uses `param_dtype`.
        reshard_after_forward: Whether `fsdp` frees a unit's parameters between forward and backward.
        offload: Whether `fsdp` keeps parameters and gradients on the CPU.
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
        """The numbers of the stages that a rank of `pp` holds."""
        return Schedule(self.schedule).stages_of(rank, ranks, self.stages_per_rank)


def plan_for(model: PreTrainedModel, mesh: DeviceMesh, plan: Plan | ParallelPlan = "auto") -> ParallelPlan:
    """Complete and validate the plan for sharding `model` over `mesh`.

    Args:
        model: A model with values or on meta.
        mesh: Mesh with dimensions from `pp`, `fsdp`, `ep`, `tp`, in this order.
        plan: See `Plan`. Fields of a `ParallelPlan` that are None are filled in.

    Returns:
        A plan without None for required fields.

    Raises:
        ShardingError: If mesh or plan do not fit the model. Lists all problems.
    """
    check_mesh(mesh)
    problems: list[Problem] = []
    if isinstance(plan, ParallelPlan):
        problems += _unknown_names(model, {**(plan.tensor or {}), **(plan.expert or {})})
        problems += _unknown_units(model, plan.units or ())
        chosen = _completed(model, mesh, plan)
    elif plan == "auto" or isinstance(plan, Mapping):
        chosen = _completed(model, mesh, ParallelPlan())
        if not isinstance(plan, str):
            problems += _unknown_names(model, plan)
            overridden = _matches(model, plan)
            kept = {name: style for name, style in _matches(model, chosen.tensor).items() if name not in overridden}
            chosen = replace(chosen, tensor={**kept, **plan})
    else:
        problem = Problem(ProblemKind.PLAN, repr(plan), "is neither 'auto' nor rules by name")
        raise ShardingError("no such plan", [problem])
    unknown = _unknown_styles(chosen)
    problems += unknown
    if not unknown:  # the effect of unknown styles cannot be checked
        problems += [*_tensor_problems(model, mesh, chosen), *_expert_problems(model, mesh, chosen)]
    problems += schedule_problems(chosen.schedule, chosen.stages_per_rank)
    if has_stages(mesh):
        problems += _adapter_problems(model, "pp")
        if chosen.offload and "fsdp" in (mesh.mesh_dim_names or ()):
            detail = "keeps gradients on the CPU, where stages cannot sum what several of them hold"
            problems.append(Problem(ProblemKind.PLAN, "offload", detail, advice="leave out offload, or pp"))
    if problems:
        summary = f"{class_name(model)} cannot be sharded over {describe(mesh)}"
        raise ShardingError(summary, _merged_over_layers(problems))
    return chosen


def _adapter_problems(model: PreTrainedModel, dimension: str) -> Iterator[Problem]:
    """LoRA adapters, which a dimension of the mesh does not divide."""
    if lora := [name for name, module in own_modules(model) if hasattr(module, "lora_A")]:
        detail = f"and {len(lora) - 1} more have LoRA adapters, which {dimension} does not divide"
        yield Problem(ProblemKind.PLAN, lora[0], detail, advice="use fsdp alone for LoRA")


def _completed(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> ParallelPlan:
    """Fill the fields of `plan` that are None with the declared plans."""
    tensor, expert = declared_tensor_plan(model), declared_expert_plan(model)
    # A declared style that is unknown here has no effect if its dimension has a single rank.
    if size_of(mesh, "tp") == 1:
        tensor = {name: style for name, style in tensor.items() if style in TENSOR_STYLES}
    if size_of(mesh, "ep") == 1:
        expert = {name: style for name, style in expert.items() if style in EXPERT_STYLES}
    return replace(
        plan,
        tensor=tensor if plan.tensor is None else plan.tensor,
        expert=expert if plan.expert is None else plan.expert,
        units=units_of(model) if plan.units is None else plan.units,
    )


def declared_tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of a model, with the family's additions, and a sharded vocabulary.

    Embedding and head are both sharded over the vocabulary, so that they can stay tied. If the number of ranks does not
    divide the vocabulary, both stay unsharded.
    """
    plan = dict(getattr(model, "_tp_plan", None) or {}) | dict(getattr(model, "tensor_parallel", {}))
    names = {module: name for name, module in own_modules(model)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
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
    """For each module and parameter that a checked plan names, how `tp` divides it."""
    return {name: TENSOR_STYLES[style] for name, style in _matches(model, plan.tensor).items()}


def expert_styles(model: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """For each module and parameter that a checked plan names, how `ep` divides it."""
    return {name: EXPERT_STYLES[style] for name, style in _matches(model, plan.expert).items()}


def is_vocabulary(model: PreTrainedModel, module: nn.Module) -> bool:
    """Return True if `module` is the model's embedding or head."""
    return module is model.get_input_embeddings() or module is model.get_output_embeddings()


def vocabulary_is_divided(model: PreTrainedModel, mesh: DeviceMesh) -> bool:
    """Return True if `tp` shards the vocabulary, which requires that it can shard both embedding and head."""
    both: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
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
    ranks, tensor = size_of(mesh, "tp"), _matches(model, plan.tensor)
    parameters = dict(own_parameters(model, duplicates=True))
    fits = all(name not in tensor and parameters[name].shape[0] % ranks == 0 for name in divided)
    fits &= not any(_without_rule(model, name, styles) for name in _stacks(styles))
    return "tp" if ranks > 1 and fits else None


def _matches(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, str]:
    """For each module and parameter that a plan names, the style it has for it."""
    names = _names(model)
    found: dict[str, str] = {}
    for pattern, style in (plan or {}).items():
        found |= dict.fromkeys(filter(_pattern(pattern).fullmatch, names), style)
    return found


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _names(model: nn.Module) -> list[str]:
    """The names of a model's modules, then of its parameters."""
    return [name for name, _ in (*own_modules(model), *own_parameters(model, duplicates=True))]


def _merged_over_layers(problems: list[Problem]) -> list[Problem]:
    """Merge problems that are the same in several layers."""
    alike: dict[Problem, list[Problem]] = {}
    for problem in problems:
        subject = re.sub(r"\.\d+(?=\.|$)", ".*", problem.subject)
        alike.setdefault(replace(problem, subject=subject), []).append(problem)
    return [
        several[0] if len(several) == 1 else replace(common, subject=f"{common.subject} ({len(several)} times)")
        for common, several in alike.items()
    ]


def _unknown_names(model: nn.Module, rules: Mapping[str, str]) -> list[Problem]:
    names = _names(model)
    advice = "names are those of transformers' model, with * for layer numbers, e.g. model.layers.*.mlp.up_proj"
    return [
        Problem(ProblemKind.PLAN, name, "names no module or parameter of the model", advice=advice)
        for name in rules
        if not any(map(_pattern(name).fullmatch, names))
    ]


def _unknown_units(model: nn.Module, units: tuple[str, ...]) -> list[Problem]:
    classes = {class_name(module) for module in model.modules()}
    unknown = [unit for unit in units if unit not in classes]
    return [Problem(ProblemKind.PLAN, unit, "is not a class of a module of the model") for unit in unknown]


def _unknown_styles(plan: ParallelPlan) -> list[Problem]:
    return [
        Problem(ProblemKind.PLAN, name, f"has the style {style!r}; known are {', '.join(known)}")
        for rules, known in ((plan.tensor, TENSOR_STYLES), (plan.expert, EXPERT_STYLES))
        for name, style in (rules or {}).items()
        if style not in known
    ]


def _tensor_problems(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> list[Problem]:
    """Why `tp` does not divide a model."""
    ranks = size_of(mesh, "tp")
    if ranks == 1:
        return []
    styles = tensor_styles(model, plan)
    modules = dict(own_modules(model))
    inside = {name for name in styles if not (name in modules and is_vocabulary(model, modules[name]))}
    if not any(styles[name].divides_linears for name in inside):
        why = "has no tensor-parallel plan, neither transformers' nor its family's"
        advice = "use fsdp alone; or give rules as plan={name: style}, or in the family's `tensor_parallel`"
        return [Problem(ProblemKind.PLAN, class_name(model), why, advice=advice)]
    if declared := getattr(model, "limits", {}).get("tensor parallelism"):
        why = f"declares that it lacks tensor parallelism: {declared}"
        return [Problem(ProblemKind.PLAN, class_name(model), why)]
    problems = []
    for name, style in styles.items():
        if name not in modules:
            problems += _uneven(model, name, model.get_parameter(name), style, ranks)
            continue
        module = modules[name]
        if is_vocabulary(model, module):
            continue
        if not isinstance(module, nn.Linear):
            problems += _unsuited(name, module, style)
            continue
        heads = _uneven_heads(model, name, module, modules, ranks) if style.dim(2) == 0 else []
        problems += heads or _uneven(model, name, module.weight, style, ranks)  # the heads' message has more detail
    return [*problems, *_adapter_problems(model, "tp")]


def _unsuited(name: str, module: nn.Module, style: Style) -> list[Problem]:
    """Return the problem of a module other than a linear that does not support its style."""
    if style.compute is VocabularyParallel and isinstance(module, nn.Embedding):
        if module.max_norm is None:
            return []
        detail = "normalizes its vectors (max_norm), which a shard of them cannot"
    elif style.compute is None or not style.divides_linears:
        return []
    else:
        detail = f"is a {type(module).__name__}, and {style.name} divides nn.Linear"
    return [Problem(ProblemKind.PLAN, name, detail)]


def _uneven(
    model: PreTrainedModel, name: str, parameter: torch.Tensor | None, style: Style, ranks: int
) -> list[Problem]:
    if parameter is None or (dim := style.dim(parameter.ndim)) is None:
        return []
    size = parameter.shape[dim]
    if size % (ranks * style.blocks) == 0:
        return []
    packed = f", packed of {style.blocks}," if style.blocks > 1 else ""
    detail = f"has {size} in dimension {dim}{packed} which tp={ranks} does not divide"
    return [Problem(ProblemKind.DIVIDE, name, detail, advice=_fitting_ranks(model))]


def _uneven_heads(
    model: PreTrainedModel, name: str, module: nn.Linear, modules: Mapping[str, nn.Module], ranks: int
) -> list[Problem]:
    """Return the problem of a projection whose heads cannot be split evenly, because a rank holds complete heads."""
    owner = modules[name.rpartition(".")[0]]
    head_dim = getattr(owner, "head_dim", None)
    if not isinstance(head_dim, int) or module.out_features % head_dim or "Attention" not in type(owner).__name__:
        return []
    heads = module.out_features // head_dim
    if heads % ranks == 0:
        return []
    config = model.config.get_text_config()
    named = [key for key in _HEADS if heads in values_of_layers(config, key)]
    kind = f" ({named[0]})" if named else ""
    detail = f"has {heads} heads of {head_dim}{kind}, which tp={ranks} does not divide"
    return [Problem(ProblemKind.DIVIDE, name, detail, advice=_fitting_ranks(model))]


_HEADS = ("num_key_value_heads", "num_attention_heads")


def _fitting_ranks(model: PreTrainedModel) -> str:
    """What `tp` can be, as advice."""
    config = model.config.get_text_config()
    sizes = [count for key in _HEADS for count in values_of_layers(config, key) if isinstance(count, int)]
    fitting = [n for n in range(1, max(sizes, default=1) + 1) if all(count % n == 0 for count in sizes)]
    return f"take tp among {fitting} (heads are never split or copied), and put the other ranks into fsdp"


def _expert_problems(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> list[Problem]:
    """Why `ep` does not divide a model."""
    ranks = size_of(mesh, "ep")
    if ranks == 1:
        return []
    styles = expert_styles(model, plan)
    modules = dict(own_modules(model))
    stacks = _stacks(styles)
    if not stacks:
        why = "has no experts that an expert-parallel plan divides"
        return [Problem(ProblemKind.PLAN, class_name(model), why, advice="leave out ep")]
    problems = []
    for name in (name for name in styles if name not in modules):
        parameter = model.get_parameter(name)
        if styles[name].dim(parameter.ndim) is not None and parameter.shape[0] % ranks:
            detail = f"has {parameter.shape[0]} experts, which ep={ranks} does not divide"
            advice = "take an ep that divides the number of experts, and put the other ranks into fsdp"
            problems.append(Problem(ProblemKind.DIVIDE, name, detail, advice=advice))
    for name in stacks:
        if not hasattr(modules[name], "num_experts"):
            problems.append(Problem(ProblemKind.PLAN, name, "does not say how many experts it has (num_experts)"))
        problems += [
            Problem(ProblemKind.PLAN, parameter, "is in a stack that ep divides, and no rule says how")
            for parameter in _without_rule(model, name, styles)
        ]
    return problems


def _stacks(styles: Mapping[str, Style]) -> list[str]:
    """The stacks of experts among the modules that have a style."""
    return [name for name, style in styles.items() if style.compute is ExpertsOfThisRank]


def _without_rule(model: nn.Module, stack: str, styles: Mapping[str, Style]) -> list[str]:
    """Return parameters in a stack of experts that have no style, neither directly nor through their module."""
    names = [f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_parameters()]
    return [name for name in names if not {name, name.rpartition(".")[0]} & (styles.keys() - {stack})]
