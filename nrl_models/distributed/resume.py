"""Checkpoints for resuming: parameters and optimiser state under Hugging Face names, at any layout.

torch's distributed checkpoint (DCP) does the work: every rank writes its blocks, and loads those it needs at whatever
layout it then has. Names and shapes are Hugging Face's, so nothing in a checkpoint depends on over which ranks the
model was sharded.

The directory has `model/` (safetensors, DCP's Hugging Face storage), `optimizer/` (DCP's own files), `training.json`
(parameter groups, progress, sizes of files), and the model's configuration. It is staged, and moved into place when
every rank is done.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nrl_models.common.projections import own_storage
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.blocks import Block
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import match
from nrl_models.common.state_dict.views import HFTensor
from nrl_models.distributed.mesh import agreed, gather_over, reporting_dead_ranks
from nrl_models.distributed.saving import Attempt, on_meta, split_into_files, write_together
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import DEFAULT_BUCKET, blocks_of, gathered
from nrl_models.errors import CheckpointError, Problem, ProblemKind

MODEL, OPTIMIZER, TRAINING = "model", "optimizer", "training.json"

_FILE_BYTES = 5 * 10**9


class ShardOfTensor(torch.Tensor):
    """A tensor of which this rank has some blocks: what DCP asks of a tensor that several ranks hold.

    Seen as a tensor it is its first block; DCP asks it for all of them.
    """

    blocks: list[Block]
    whole_shape: torch.Size
    is_source: bool

    @staticmethod
    def of(shape: Iterable[int], blocks: list[Block], *, is_source: bool) -> ShardOfTensor:
        """Blocks of a tensor of `shape`; a source is read from, any other written into."""
        shard = torch.Tensor._make_subclass(ShardOfTensor, blocks[0].tensor)
        shard.blocks, shard.whole_shape, shard.is_source = blocks, torch.Size(shape), is_source
        return shard

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole tensor, which is what DCP compares."""
        return self.whole_shape if dim is None else self.whole_shape[dim]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(block.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(block),
                    properties=TensorProperties.create_from_tensor(block.tensor),
                    size=self.whole_shape,
                ),
            )
            for block in self.blocks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(block) for block in self.blocks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for block in self.blocks:
            if index.offset is None or tuple(index.offset) == block.offset:
                return own_storage(block.tensor) if self.is_source else block.tensor
        raise ValueError(f"{index.fqn}: no block at {index.offset}")


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offset), sizes=torch.Size(block.shape))


def save_checkpoint(
    folder: str | Path,
    model: PreTrainedModel,
    optimizer: Optimizer | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint to resume from. Every rank calls it; the directory must be one that all ranks see.

    Args:
        folder: whole afterwards, or as it was before if any rank fails.
        model: a sharded model (`parallelize`, or `from_pretrained` with a mesh).
        optimizer: of the model's parameters. Its state may be tensors of a parameter's shape, and scalars.
        progress: anything JSON can hold, e.g. the step.

    Raises:
        CheckpointError: optimiser state of another shape.
        ShardingError: another rank failed. The rank that failed raises its own error.
    """
    sharding = sharding_of(model)
    adapter, mesh = sharding.adapter, sharding.mesh
    own = model.state_dict()
    exported = adapter._exported("hub")
    weights = _shards(exported, own, mesh, is_source=True)
    states: dict[str, torch.Tensor] = {}
    training: dict[str, Any] = {"progress": dict(progress or {}), "groups": [], "scalars": {}}
    if optimizer is not None:
        states = _optimizer_tensors(model, optimizer, is_source=True)
        training |= {"groups": _groups(model, optimizer), "scalars": _scalars(model, optimizer)}
    json.dumps(training)  # before anything is written
    files = split_into_files(on_meta(exported, own), _FILE_BYTES).filename_to_tensors
    file_of = {name: number for number, names in enumerate(files.values(), start=1) for name in names}

    def write(stage: Path | None, attempt: Attempt) -> None:
        (path, *_) = gather_over(mesh, None if stage is None else str(stage))
        target = Path(path)
        storage = HuggingFaceStorageWriter(str(target / MODEL), fqn_to_index_mapping=file_of, save_distributed=True)
        dcp.save(weights, storage_writer=storage)
        if optimizer is not None:
            dcp.save(states, storage_writer=FileSystemWriter(target / OPTIMIZER))
        if stage is not None:
            attempt(_write_training, stage, training)
            attempt(model.config.save_pretrained, stage)

    write_together(folder, mesh, write)


def load_checkpoint(folder: str | Path, model: PreTrainedModel, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Fill a model, and its optimiser, from a checkpoint that was written at this or any other layout.

    Args:
        folder: what `save_checkpoint` wrote.
        model: a sharded model of the same architecture and configuration.
        optimizer: of the model's parameters, in the same groups; its state is replaced.

    Returns:
        The progress that was saved.

    Raises:
        CheckpointError: no checkpoint, or one of another model or optimiser: everything that does not fit, on every
            rank, before anything is written.
        ShardingError: a rank is gone, or could not read a file to its end; the model's values are then undefined.
    """
    folder = Path(folder)
    sharding = sharding_of(model)
    adapter, mesh = sharding.adapter, sharding.mesh
    own = model.state_dict()
    exported = adapter._exported("hub")
    with agreed(mesh, f"load {folder}") as facts:
        training, saved_states = _read_training(folder), None
        facts |= {"training": training, "adapter": list(adapter.own)}
        _check_files(folder, training, [MODEL] if optimizer is None else [MODEL, OPTIMIZER])
        reader = HuggingFaceStorageReader(str(folder / MODEL))
        _check_tensors(folder, reader.read_metadata(), adapter)
        if optimizer is not None:
            saved_states = FileSystemReader(folder / OPTIMIZER).read_metadata()
            _check_optimizer(folder, model, optimizer, training)
    weights = _shards(exported, own, mesh, is_source=False)
    with reporting_dead_ranks(f"load {folder}"):
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(folder / MODEL)))
    for name, value in weights.items():
        if not isinstance(value, ShardOfTensor):  # loaded whole
            for block in blocks_of(exported[name], own):
                block.take_from(value)
    if optimizer is not None:
        assert saved_states is not None
        _make_states(model, optimizer, training, saved_states)
        states = _optimizer_tensors(model, optimizer, is_source=False)
        with reporting_dead_ranks(f"load {folder}"):
            dcp.load(states, storage_reader=FileSystemReader(folder / OPTIMIZER))
        for group, saved in zip(optimizer.param_groups, training["groups"], strict=True):
            group.update({key: _retyped(group.get(key), value) for key, value in saved["options"].items()})
    return training["progress"]


def _shards(
    tensors: Mapping[str, HFTensor], own: Mapping[str, torch.Tensor], mesh: DeviceMesh, *, is_source: bool
) -> dict[str, torch.Tensor]:
    """For DCP: this rank's blocks of each tensor of which it has some.

    The storage takes one block of a tensor from each rank at most. Tensors of which a rank has several are whole:
    gathered, or empty and to be divided after loading.

    Args:
        tensors: Hugging Face tensors.
        own: what holds them.
        mesh: over which.
        is_source: whether to save them; otherwise they are loaded into.
    """
    blocks = {name: blocks_of(tensor, own) for name, tensor in tensors.items()}
    torn = set().union(*gather_over(mesh, [name for name, several in blocks.items() if len(several) > 1]))
    result: dict[str, torch.Tensor] = {
        name: ShardOfTensor.of(tensors[name].shape, of, is_source=is_source)
        for name, of in blocks.items()
        if of and name not in torn
    }
    whole = {name: tensor for name, tensor in tensors.items() if name in torn}
    if is_source:
        result |= {name: value.clone() for name, value in gathered(own, whole, mesh, DEFAULT_BUCKET)}
    else:
        for name, tensor in whole.items():
            holder = own[tensor.parameters[0]]
            result[name] = torch.empty(tensor.shape, dtype=holder.dtype, device=holder.device)
    return result


# Optimiser state


def _parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimiser's parameters by the model's own names.

    Raises:
        CheckpointError: a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in names for parameter in given):
        detail = f"{foreign} of its {len(given)} parameters are not the model's: make it after the model is sharded"
        problem = Problem(ProblemKind.UNEXPECTED, "optimizer", detail)
        raise CheckpointError("the optimiser is not this model's", [problem])
    return {names[id(parameter)]: parameter for parameter in given}


def _optimizer_tensors(model: PreTrainedModel, optimizer: Optimizer, *, is_source: bool) -> dict[str, torch.Tensor]:
    """`{parameter}.{state}` for every state that has the parameter's shape."""
    tensors = sharding_of(model).adapter.transformers
    result: dict[str, torch.Tensor] = {}
    problems = []
    for name, parameter in _parameters(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_scalar(value):
                continue
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                detail = f"is {shape}, neither a scalar nor of the parameter's shape {tuple(parameter.shape)}"
                problems.append(Problem(ProblemKind.SHAPE, f"{name}: {key}", detail))
                continue
            if blocks := blocks_of(tensors[name], {name: value.detach()}):
                result[f"{name}.{key}"] = ShardOfTensor.of(parameter.shape, blocks, is_source=is_source)
    if problems:
        raise CheckpointError("the optimiser's state cannot be saved", problems)
    return result


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _scalars(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, dict[str, float]]:
    """The scalar states of each parameter."""
    return {
        name: {key: float(_plain(value)) for key, value in state.items() if _is_scalar(value)}
        for name, parameter in _parameters(model, optimizer).items()
        if (state := optimizer.state.get(parameter))
    }


def _plain(value: Any) -> Any:
    """A scalar as JSON takes it."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.item() if isinstance(value, torch.Tensor) else value


def _groups(model: PreTrainedModel, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Parameter groups: their options, and the names of the parameters in them."""
    names = {id(parameter): name for name, parameter in _parameters(model, optimizer).items()}
    return [
        {
            "options": {key: _plain(value) for key, value in group.items() if key != "params"},
            "tensors": sorted(names[id(parameter)] for parameter in group["params"]),
        }
        for group in optimizer.param_groups
    ]


def _retyped(current: Any, value: Any) -> Any:
    """An option as JSON has it, in the type of its current value."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value


def _make_states(model: PreTrainedModel, optimizer: Optimizer, training: Mapping[str, Any], saved: Metadata) -> None:
    """Give the optimiser a state, still empty, of every kind that was saved."""
    kinds: dict[str, dict[str, torch.dtype]] = {}
    for key, metadata in saved.state_dict_metadata.items():
        name, _, kind = key.rpartition(".")
        kinds.setdefault(name, {})[kind] = metadata.properties.dtype  # type: ignore[union-attr]
    optimizer.state.clear()
    for name, parameter in _parameters(model, optimizer).items():
        scalars = training["scalars"].get(name, {})
        data = parameter.detach()
        state: dict[str, Any] = {key: torch.tensor(value, dtype=torch.float32) for key, value in scalars.items()}
        for kind, dtype in kinds.get(name, {}).items():
            state[kind] = torch.zeros_like(data, dtype=dtype)
        if state:
            optimizer.state[parameter] = state


# What does not fit


def _write_training(folder: Path, training: Mapping[str, Any]) -> None:
    """Write `training.json`, with the size of every other file, so that an incomplete checkpoint is refused."""
    files = {
        str(file.relative_to(folder)): file.stat().st_size
        for directory in (MODEL, OPTIMIZER)
        for file in sorted((folder / directory).glob("*"))
    }
    (folder / TRAINING).write_text(json.dumps({**training, "files": files}, indent=1) + "\n")


def _check_files(folder: Path, training: Mapping[str, Any], directories: Collection[str]) -> None:
    problems = []
    for name, size in training["files"].items():
        if name.partition("/")[0] not in directories:
            continue
        if not (folder / name).is_file():
            problems.append(Problem(ProblemKind.FILE, name, "is not there"))
        elif (found := (folder / name).stat().st_size) != size:
            problems.append(Problem(ProblemKind.FILE, name, f"has {found} bytes; {size} were written"))
    if problems:
        raise CheckpointError(f"{folder} is incomplete", problems, ["take an earlier checkpoint, or copy it again"])


def _read_training(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / TRAINING).read_text())
    except (OSError, ValueError) as error:
        detail = f"cannot be read, so this is not a complete checkpoint: {error}"
        raise CheckpointError(
            f"cannot resume from {folder}",
            [Problem(ProblemKind.FILE, TRAINING, detail)],
            ["give a directory that save_checkpoint wrote; a plain Hugging Face checkpoint loads with from_pretrained"],
        ) from error


def _check_tensors(folder: Path, saved: Metadata, adapter: StateDictAdapter) -> None:
    stored: dict[str, Any] = saved.state_dict_metadata
    found = match(
        {name: TensorSpec(tuple(tensor.size), tensor.properties.dtype) for name, tensor in stored.items()},
        adapter.hub.get,
        adapter.own,
        adapter.absent,
        adapter.tied,
        why_unexpected=lambda name: "is no tensor of this model",
    )
    if found.problems:
        raise CheckpointError(f"{folder} is a checkpoint of another model", found.problems)


def _check_optimizer(folder: Path, model: PreTrainedModel, optimizer: Optimizer, training: Mapping[str, Any]) -> None:
    groups = [set(group["tensors"]) for group in _groups(model, optimizer)]
    stored = [set(group["tensors"]) for group in training["groups"]]
    problems = []
    if len(groups) != len(stored):
        detail = f"has {len(stored)} parameter groups, this optimiser {len(groups)}"
        problems.append(Problem(ProblemKind.UNEXPECTED, "optimizer", detail))
    for number, (ours, theirs) in enumerate(zip(groups, stored, strict=False)):
        where = f"is in group {number}"
        problems += [
            Problem(ProblemKind.MISSING, name, f"{where} here, and not there") for name in sorted(ours - theirs)
        ]
        problems += [
            Problem(ProblemKind.UNEXPECTED, name, f"{where} there, and not here") for name in sorted(theirs - ours)
        ]
    if problems:
        raise CheckpointError(f"{folder} is a checkpoint of another optimiser", problems)
