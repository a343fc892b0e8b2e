"""Complete a parallel plan with the declared plans, and check that it fits a model and a mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nrl_models.common.config.walk import values_of_layers
from nrl_models.common.modules import class_name, own_modules, own_parameters
from nrl_models.common.value_checks import is_integer
from nrl_models.distributed.mesh import check_mesh, describe, has_stages, size_of
from nrl_models.distributed.parallel_plan import (
    ParallelPlan,
    Plan,
    declared_expert_plan,
    declared_tensor_plan,
    expert_stacks,
    expert_styles,
    is_vocabulary,
    name_pattern,
    names_in,
    styles_by_name,
    tensor_styles,
    units_of,
    vocabulary_is_divided,
    without_rule,
)
from nrl_models.distributed.pipeline.schedules import schedule_problems
from nrl_models.distributed.sharding import require_model
from nrl_models.distributed.split_blocks import split_problems
from nrl_models.distributed.tensor.styles import EXPERT_STYLES, REPLICATE, TENSOR_STYLES, Style, VocabularyParallel
from nrl_models.errors import Problem, ProblemKind, ShardingError


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
        UnknownArgumentError: See `check_mesh` and `require_model`.
    """
    check_mesh(mesh)
    require_model(model, "parallelize(model, mesh, plan)")
    has_fsdp = "fsdp" in (mesh.mesh_dim_names or ())
    problems: list[Problem] = []
    if isinstance(plan, ParallelPlan):
        invalid = _invalid_options(plan, mesh)
        problems += invalid.values()
        # Check the other options with defaults in place of the invalid ones.
        plan = replace(plan, **{name: getattr(ParallelPlan, name) for name in invalid})
        problems += _unknown_names(model, {**(plan.tensor or {}), **(plan.expert or {})})
        problems += [*_unknown_units(model, plan.units or ()), *(() if has_fsdp else _without_fsdp(plan))]
        chosen = _completed(model, mesh, plan)
    elif plan == "auto" or (plan is not None and _is_rules(plan)):
        chosen = _completed(model, mesh, ParallelPlan())
        if not isinstance(plan, str):
            problems += _unknown_names(model, plan)
            overridden = styles_by_name(model, plan)
            default_styles = {
                name: style for name, style in styles_by_name(model, chosen.tensor).items() if name not in overridden
            }
            chosen = replace(chosen, tensor={**default_styles, **plan})
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
        if chosen.offload and has_fsdp:
            detail = "keeps gradients on the CPU, where stages cannot sum what several of them hold"
            problems.append(Problem(ProblemKind.PLAN, "offload", detail, advice="leave out offload, or pp"))
    if has_fsdp:
        problems += _scalar_problems(model)
    if problems:
        summary = f"{class_name(model)} cannot be sharded over {describe(mesh)}"
        raise ShardingError(summary, _merged_over_layers(problems))
    return chosen


def _adapter_problems(model: PreTrainedModel, dimension: str) -> Iterator[Problem]:
    """Yield the problem of LoRA adapters, which a dimension of the mesh does not divide."""
    if lora := [name for name, module in own_modules(model) if hasattr(module, "lora_A")]:
        detail = f"and {len(lora) - 1} more have LoRA adapters, which {dimension} does not divide"
        yield Problem(ProblemKind.PLAN, lora[0], detail, advice="use fsdp alone for LoRA")


def _scalar_problems(model: PreTrainedModel) -> Iterator[Problem]:
    """Yield a problem for each 0-dimensional parameter, which FSDP cannot shard, even over a single rank."""
    advice = "give it the shape (1,), or use tp without fsdp"
    for name, parameter in own_parameters(model):
        if parameter.ndim == 0:
            yield Problem(ProblemKind.PLAN, name, "has no dimension that fsdp can divide", advice=advice)


def _completed(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> ParallelPlan:
    """Fill the fields of `plan` that are None with the declared plans."""
    tensor, expert = declared_tensor_plan(model), declared_expert_plan(model)
    # Unknown styles are not checked if the dimension has a single rank, because they have no effect.
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
    names = names_in(model)
    advice = "names are those of transformers' model, with * for layer numbers, e.g. model.layers.*.mlp.up_proj"
    return [
        Problem(ProblemKind.PLAN, name, "names no module or parameter of the model", advice=advice)
        for name in rules
        if not any(map(name_pattern(name).fullmatch, names))
    ]


def _unknown_units(model: nn.Module, units: tuple[str, ...]) -> list[Problem]:
    classes = {class_name(module) for module in model.modules()}
    unknown = [unit for unit in units if unit not in classes]
    return [Problem(ProblemKind.PLAN, unit, "is not a class of a module of the model") for unit in unknown]


def _without_fsdp(plan: ParallelPlan) -> Iterator[Problem]:
    """Yield options that only `fsdp` supports, if the mesh has no `fsdp`."""
    requested = {"param_dtype": plan.param_dtype is not None, "offload": plan.offload}
    for option in (option for option, is_set in requested.items() if is_set):
        detail = f"is {getattr(plan, option)}, which needs the dimension fsdp in the mesh"
        advice = f"add fsdp to the mesh, fsdp=1 is enough; or leave out {option}"
        yield Problem(ProblemKind.PLAN, option, detail, advice=advice)


def _invalid_options(plan: ParallelPlan, mesh: DeviceMesh) -> dict[str, Problem]:
    """Return the problem of each option that has a value of another kind than `ParallelPlan` documents."""
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        "tensor": (_is_rules, "a style for each name, or None"),
        "expert": (_is_rules, "a style for each name, or None"),
        "units": (_is_names, "a tuple of class names, or None"),
        "param_dtype": (_is_floating_point, "a floating-point torch.dtype such as torch.bfloat16, or None"),
        "reduce_dtype": (_is_floating_point, "a floating-point torch.dtype such as torch.float32, or None"),
        "reshard_after_forward": (lambda value: _is_reshard(value, mesh), "True or False"),
        "offload": (lambda value: isinstance(value, bool), "True or False"),
        "schedule": (lambda value: isinstance(value, str), "a name in Schedule"),
        "stages_per_rank": (lambda value: value is None or is_integer(value, 1), "a whole number, or None"),
    }
    return {
        name: Problem(ProblemKind.PLAN, name, f"is {getattr(plan, name)!r}, expected {expected}")
        for name, (is_valid, expected) in kinds.items()
        if not is_valid(getattr(plan, name))
    }


def _is_rules(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value))


def _is_names(value: Any) -> bool:
    is_several = isinstance(value, Collection) and not isinstance(value, str)
    return value is None or (is_several and all(isinstance(name, str) for name in value))


def _is_floating_point(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


def _is_reshard(value: Any, mesh: DeviceMesh) -> bool:
    """Return True for a value that torch's `fully_shard` accepts: also a number of ranks that divides `fsdp`."""
    if isinstance(value, bool):
        return True
    return is_integer(value, 1) and size_of(mesh, "fsdp") % value == 0 and not has_stages(mesh)


def _unknown_styles(plan: ParallelPlan) -> list[Problem]:
    return [
        Problem(ProblemKind.PLAN, name, f"has the style {style!r}; known are {', '.join(known)}")
        for rules, known in ((plan.tensor, TENSOR_STYLES), (plan.expert, EXPERT_STYLES))
        for name, style in (rules or {}).items()
        if not isinstance(style, str) or style not in known
    ]


def _tensor_problems(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> list[Problem]:
    """Return reasons why `tp` cannot divide a model."""
    ranks = size_of(mesh, "tp")
    if ranks == 1:
        return []
    problems = list(_adapter_problems(model, "tp"))  # first, because adapters replace linears and wrap the model
    styles = tensor_styles(model, plan)
    modules = dict(own_modules(model))
    inside = {name for name in styles if not (name in modules and is_vocabulary(model, modules[name]))}
    if not any(styles[name].divides_linears for name in inside):
        why = "has no tensor-parallel plan, neither transformers' nor its family's"
        advice = "use fsdp alone; or give rules as plan={name: style}, or in the family's `tensor_parallel`"
        return problems or [Problem(ProblemKind.PLAN, class_name(model), why, advice=advice)]
    if declared := getattr(model, "limits", {}).get("tensor parallelism"):
        why = f"declares that it lacks tensor parallelism: {declared}"
        return [Problem(ProblemKind.PLAN, class_name(model), why)]
    for name, style in styles.items():
        if name not in modules:
            problems += _uneven(model, name, model.get_parameter(name), style, ranks)
            continue
        module = modules[name]
        if is_vocabulary(model, module) or hasattr(module, "lora_A"):
            continue
        if not isinstance(module, nn.Linear):
            problems += _unsuited(name, module, style)
            continue
        heads = _uneven_heads(model, name, module, modules, ranks) if style.dim(2) == 0 else []
        problems += heads or _uneven(model, name, module.weight, style, ranks)  # the heads' message has more detail
    problems += _tied_problems(model, mesh, styles)
    return [*problems, *split_problems(model, styles)]


def _tied_problems(model: PreTrainedModel, mesh: DeviceMesh, styles: Mapping[str, Style]) -> Iterator[Problem]:
    """Yield tied parameters whose uses have styles that divide them differently, so each would read another shard."""
    modules = dict(own_modules(model))
    uses: dict[int, dict[str, Style]] = {}
    for name, parameter in own_parameters(model, duplicates=True):
        owner = name.rpartition(".")[0]
        style = styles.get(name, styles.get(owner, REPLICATE))
        if owner in modules and is_vocabulary(model, modules[owner]) and not vocabulary_is_divided(model, mesh):
            style = REPLICATE
        uses.setdefault(id(parameter), {})[name] = style
    for tied in uses.values():
        (first, style), *others = tied.items()
        ndim = model.get_parameter(first).ndim
        for name, other in others:
            if (other.dim(ndim), other.blocks) != (style.dim(ndim), style.blocks):
                detail = f"is tied to {first}, which has the style {style.name!r}, but has {other.name!r}"
                advice = "give both a style that divides the same dimension, or untie them before sharding"
                yield Problem(ProblemKind.PLAN, name, detail, advice=advice)


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
    return [Problem(ProblemKind.INDIVISIBLE, name, detail, advice=_fitting_ranks(model))]


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
    return [Problem(ProblemKind.INDIVISIBLE, name, detail, advice=_fitting_ranks(model))]


_HEADS = ("num_key_value_heads", "num_attention_heads")


def _fitting_ranks(model: PreTrainedModel) -> str:
    """Return advice with possible sizes of `tp`."""
    config = model.config.get_text_config()
    sizes = [count for key in _HEADS for count in values_of_layers(config, key) if isinstance(count, int)]
    fitting = [n for n in range(1, max(sizes, default=1) + 1) if all(count % n == 0 for count in sizes)]
    return f"take tp among {fitting} (heads are never split or copied), and put the other ranks into fsdp"


def _expert_problems(model: PreTrainedModel, mesh: DeviceMesh, plan: ParallelPlan) -> list[Problem]:
    """Return reasons why `ep` cannot divide a model."""
    ranks = size_of(mesh, "ep")
    if ranks == 1:
        return []
    styles = expert_styles(model, plan)
    modules = dict(own_modules(model))
    stacks = expert_stacks(styles)
    if not stacks:
        why = "has no experts that an expert-parallel plan divides"
        return [Problem(ProblemKind.PLAN, class_name(model), why, advice="leave out ep")]
    problems = []
    for name in (name for name in styles if name not in modules):
        parameter = model.get_parameter(name)
        if styles[name].dim(parameter.ndim) is not None and parameter.shape[0] % ranks:
            detail = f"has {parameter.shape[0]} experts, which ep={ranks} does not divide"
            advice = "take an ep that divides the number of experts, and put the other ranks into fsdp"
            problems.append(Problem(ProblemKind.INDIVISIBLE, name, detail, advice=advice))
    for name in stacks:
        if not hasattr(modules[name], "num_experts"):
            problems.append(Problem(ProblemKind.PLAN, name, "does not say how many experts it has (num_experts)"))
        problems += [
            Problem(ProblemKind.PLAN, parameter, "is in a stack that ep divides, and no rule says how")
            for parameter in without_rule(model, name, styles)
        ]
    return problems
