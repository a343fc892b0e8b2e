"""Load a checkpoint into a sharded model: each rank reads only the slices it holds.

The steps are those of `nrl_models.loading.weights`. The model is sharded on meta, and every rank checks names, shapes
and mesh. Slices are read once all ranks have succeeded and agree on the checkpoint. On a CPU, contiguous slices become
memory-mapped views. Other shards are allocated once, and several threads fill them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from zlib import crc32

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.modules import install
from nrl_models.common.projections import Buffer, join, neighboring_parameters
from nrl_models.common.state_dict.layouts import note_loaded_names
from nrl_models.common.upstream import mark_initialized
from nrl_models.common.upstream_conversions import set_loaded_conversions
from nrl_models.common.views.view_blocks import Block
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.kept_dtypes import separate_group
from nrl_models.distributed.mesh import agreed, gather_over
from nrl_models.distributed.parallel_plan import ParallelPlan, Plan
from nrl_models.distributed.parallelize import cut_for, divide_data, divide_stages
from nrl_models.distributed.shard_slices import ShardSlice, slices_of
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import local_of, share_of
from nrl_models.distributed.tensor.packed_shards import over_shard
from nrl_models.loading.fit import EXACT, Fit, Tolerance, fit_checkpoint
from nrl_models.loading.skeleton import move_buffers, share_copies
from nrl_models.loading.weights import keep_unused, map_consecutive, require_written, run_readers


def load_sharded(
    model: PreTrainedModel,
    files: CheckpointFiles,
    mesh: DeviceMesh,
    plan: Plan | ParallelPlan,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: Tolerance = EXACT,
) -> Fit:
    """Shard a model on meta, and load each rank's shards.

    Args:
        model, files, dtype, device, tolerance: See `nrl_models.loading.weights.load_weights`.
        mesh, plan: See `nrl_models.distributed.parallelize`.

    Returns:
        The match of checkpoint and model.

    Raises:
        CheckpointError, ShardingError: For a problem on this or another rank, before memory is allocated.
    """
    if "fsdp" in (mesh.mesh_dim_names or ()):
        separate_group(mesh)  # now, because all ranks must take part, and one may fail below
    with agreed(mesh, "load the checkpoint") as facts:
        chosen = plan_for(model, mesh, plan)
        # The checkpoint has to fit the complete model, even if this rank holds only some stages.
        sharding, full_model = divide_stages(model, mesh, chosen, cut_for(model, mesh, chosen))
        share = (mesh.get_coordinate() or [0])[-1], mesh.size(mesh.ndim - 1)
        fit = fit_checkpoint(full_model, files, dtype=dtype, tolerance=tolerance, share=share)
        for part in (model, full_model):
            set_loaded_conversions(part, fit.names.used_conversions())
            note_loaded_names(part, fit.names.loaded)
        _retype(model, fit)
        keep_unused(model, fit, files, dtype)
        sharding.finish(model, full_model, fit.dtypes)
        divide_data(model, sharding)
        facts |= {
            "class": type(model).__name__,
            "config": model.config.to_json_string(),
            "dtype": dtype,
            "mtp": tolerance.options.mtp,
            "plan": chosen,
            "checkpoint": sorted((key, tensor.shape, tensor.dtype) for key, tensor in files.tensors.items()),
        }
    sharding.agree_on_holders(model)
    with agreed(mesh, "load the checkpoint"):
        _fill(model, fit, files, device)
    fit.warn(model, files)
    return fit


def _retype(model: nn.Module, fit: Fit) -> None:
    """Give parameters on meta their final dtypes, before FSDP records them."""
    done: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name = f"{module_name}.{attribute}" if module_name else attribute
            if parameter is None or name not in fit.dtypes or parameter.dtype == fit.dtypes[name]:
                continue
            if id(parameter) not in done:
                cast = parameter.detach().to(fit.dtypes[name])
                done[id(parameter)] = nn.Parameter(cast, requires_grad=parameter.requires_grad)
            module._parameters[attribute] = done[id(parameter)]


def _fill(model: PreTrainedModel, fit: Fit, files: CheckpointFiles, device: torch.device) -> None:
    """Map or read this rank's shard of every tensor, several at a time."""
    sharding = sharding_of(model)
    local_state = model.state_dict()
    slices = {  # of this rank's stages only
        name: slices_of(
            name, local_state[name], ((files.tensors[key], target) for key, target in sources), fit.dtypes[name]
        )
        for name, sources in fit.matches.sources.items()
        if name in local_state
    }
    sharding.loaded_bytes = sum(part.nbytes for parts in slices.values() for part in parts)
    shards: dict[str, torch.Tensor] = {}
    copied: dict[str, list[tuple[ShardSlice, Block]]] = defaultdict(list)
    groups = _neighboring_shards(model, fit, local_state)
    grouped = {name for names in groups for name in names}
    for names in [*groups, *((name,) for name in slices if name not in grouped)]:
        shapes, dtype = [local_of(local_state[name]).shape for name in names], fit.dtypes[names[0]]
        # With offloading FSDP keeps its shards on the CPU.
        is_offloaded = sharding.plan.offload and isinstance(local_state[names[0]], DTensor)
        shard_device = torch.device("cpu") if is_offloaded else device
        parts = [slices[name] for name in names]
        memory = None
        if shard_device.type == "cpu":
            memory = map_consecutive([[part.run() for part in of_name] for of_name in parts], shapes, files, dtype)
        is_mapped = memory is not None
        if memory is None:
            memory = torch.empty(Buffer.shape_of(shapes), dtype=dtype, device=shard_device)
        locals_ = Buffer(memory, [shape[0] for shape in shapes]).neighbors() if len(names) > 1 else [memory]
        for name, local, of_name in zip(names, locals_, parts, strict=True):
            shards[name] = over_shard(local_state[name], local) if isinstance(local_state[name], DTensor) else local
            for part in () if is_mapped else of_name:
                copied[part.stored.key].append((part, part.over(local)))

    def read(parts: list[tuple[ShardSlice, Block]]) -> None:
        values = files.read(parts[0][0].stored)  # lazily mapped: only the copied slices are read
        for part, block in parts:
            part.read_into(block, values)

    run_readers(read, sorted(copied.values(), key=lambda parts: -sum(part.nbytes for part, _ in parts)))
    for name, tensor in shards.items():
        install(model, name, tensor)
    _initialize_missing(model, fit, device, local_state)
    for ties in (fit.matches.copies, fit.adapter.tied):
        share_copies(model, {name: source_name for name, source_name in ties.items() if name in local_state})
    move_buffers(model, device)
    join(model)
    require_written(model)


def _neighboring_shards(
    model: PreTrainedModel, fit: Fit, local_state: Mapping[str, torch.Tensor]
) -> list[tuple[str, ...]]:
    """Return the names of grouped parameters that share a buffer; none with `fsdp`, which allocates its own."""
    if "fsdp" in (sharding_of(model).mesh.mesh_dim_names or ()):
        return []
    return [
        names
        for names in neighboring_parameters(model)
        if all(name in fit.matches.sources for name in names)
        and len({(local_of(local_state[name]).shape[1:], fit.dtypes[name]) for name in names}) == 1
    ]


def _initialize_missing(model: PreTrainedModel, fit: Fit, device: torch.device, local_state: Collection[str]) -> None:
    """Initialize missing parameters of `local_state` as transformers does, module by module, the same on every rank."""
    mesh = sharding_of(model).mesh
    (seed, *_) = gather_over(mesh, torch.initial_seed()) if fit.matches.missing else (0,)
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in (name for name in fit.matches.missing if name in local_state):  # in the same order on each rank
        owner, _, attribute = name.rpartition(".")
        by_module[owner].append(attribute)
    for owner, attributes in by_module.items():
        module = model.get_submodule(owner)
        full_module = copy.copy(module)  # the same module with full tensors to initialize
        full_module.__dict__["_parameters"] = {
            attribute: None if parameter is None else nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            for attribute, parameter in module._parameters.items()
        }
        mark_initialized(full_module, False)
        with random_states_kept(), torch.no_grad():
            torch.manual_seed(seed ^ crc32(owner.encode()))  # modules get different values, ranks the same
            model._init_weights(full_module)
        for attribute in attributes:
            placeholder = module._parameters.get(attribute)
            if placeholder is None:  # a buffer: real already
                continue
            value = full_module.get_parameter(attribute).detach()
            if isinstance(placeholder, DTensor):
                share = share_of(placeholder, value).to(device, copy=True).contiguous()
                value = over_shard(placeholder, share)
            else:
                value = value.to(device)
            install(model, f"{owner}.{attribute}", value)
