"""Checkpoints for resuming: parameters and optimiser state under Hugging Face names, at any layout.

A folder has versions, `version-1`, `version-2` and so on, of which the newest counts. In one are
`weights-...safetensors` and `optimizer-...safetensors`, in which every rank writes the blocks that it holds,
`config.json`, and `manifest.json`, by which every byte of the others is known. Ranks read the blocks that they need at
whatever layout they then have. Names and shapes are Hugging Face's, so nothing depends on how the model was sharded.

Files that the manifest does not name are never read: they may be a file system's own. No file is a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nrl_models.common.checkpoint.durable import sync
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.common.checkpoint.locks import locked
from nrl_models.common.state_dict.adapter import StateDictAdapter, own_state_dict
from nrl_models.common.state_dict.blocks import Block
from nrl_models.common.state_dict.kept_tensors import KeptTensor, keep, keeps_unused, kept_by
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import match
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.distributed.block_files import Held, StoredTensor, blocks_to_write, stored_tensors, write_blocks
from nrl_models.distributed.manifest import NAME, Manifest, OptimizerFacts, Part, WrittenFile
from nrl_models.distributed.mesh import agreed, gather_over, is_first, place_in, reporting_dead_ranks
from nrl_models.distributed.optimizer_state import facts_of, held_states, misfits, of_all_stages, restore
from nrl_models.distributed.saved_versions import next_version, remove_older, replaced, whole_version
from nrl_models.distributed.saving import Attempt, write_together
from nrl_models.distributed.sharding import sharding_of
from nrl_models.errors import CheckpointError, Problem, ProblemKind


def save_checkpoint(
    folder: str | Path,
    model: PreTrainedModel,
    optimizer: Optimizer | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint to resume from. Every rank calls it; the directory must be one that all ranks see.

    Args:
        folder: gets another version, and older ones are removed; if any rank fails, the last one stays.
        model: a sharded model (`parallelize`, or `from_pretrained` with a mesh).
        optimizer: of the model's parameters. Its state may be tensors of a parameter's shape, and scalars.
        progress: anything JSON can hold; `step`, if it is there, is a whole number.

    Raises:
        CheckpointError: optimiser state of another shape, or progress that cannot be written or read again.
        SaveError: the disk is full or read-only, or another process saves into the folder.
        ShardingError: another rank failed. The rank that failed raises its own error.
    """
    folder = Path(folder)
    sharding = sharding_of(model)
    mesh, what = sharding.mesh, f"save into {folder}"
    facts: OptimizerFacts | None = None
    with agreed(mesh, what):
        own, exported = sharding.written(model), sharding.adapter.retied(model).exported("hub")
        parts = {Part.WEIGHTS: [Held(name, tensor, own) for name, tensor in exported.items()]}
        if optimizer is not None:
            own_facts = facts_of(model, optimizer)
            parts[Part.OPTIMIZER] = [held for held in held_states(model, optimizer) if held.own.keys() <= own.keys()]
    if optimizer is not None:
        facts = of_all_stages(own_facts, mesh)
    with agreed(mesh, what):
        Manifest({}, dict(progress or {}), facts).rendered()  # before anything is written

    def write(stage: Path | None, attempt: Attempt) -> None:
        (path, *_) = gather_over(mesh, None if stage is None else str(stage))
        target = Path(path)
        files: dict[str, WrittenFile] = {}

        def write_own() -> None:
            for part, tensors in parts.items():
                blocks = blocks_to_write(tensors, mesh)
                if part == Part.WEIGHTS:
                    blocks = chain(blocks, _kept_blocks(model, mesh))
                names = write_blocks(target, f"{part}-{place_in(mesh):05d}", blocks)
                for name in names:
                    files[name] = WrittenFile.of(target / name)
                    sync(target / name)  # each its own: another machine has not what this one has not written yet

        attempt(write_own)
        for others in gather_over(mesh, files):
            files |= others
        if stage is not None:
            attempt(_finish, stage, model, Manifest(files, dict(progress or {}), facts))

    with ExitStack() as stack:
        with agreed(mesh, what):
            if is_first(mesh):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder))
            version = next_version(folder)
        with reporting_dead_ranks(what):
            (version, *_) = gather_over(mesh, version)
        write_together(version, mesh, write)
        with agreed(mesh, what):
            if is_first(mesh):
                remove_older(version)


def load_checkpoint(folder: str | Path, model: PreTrainedModel, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Fill a model, and its optimiser, from the newest checkpoint in a folder, written at this or any other layout.

    Args:
        folder: what `save_checkpoint` wrote.
        model: a sharded model of the same architecture and configuration.
        optimizer: of the model's parameters, in the same groups; its state is replaced.

    Returns:
        The progress that was saved.

    Raises:
        CheckpointError: no checkpoint, one of which a byte is another than was written, or one of another model or
            optimiser: everything that is wrong, on every rank, before anything is written. Where an older version is
            whole, it says so, and does not take that.
        ShardingError: a rank is gone, or could not read a file to its end; the model's values are then undefined.
    """
    folder = Path(folder)
    sharding = sharding_of(model)
    adapter, mesh, what = sharding.adapter.retied(model), sharding.mesh, f"load {folder}"
    parts = [Part.WEIGHTS] if optimizer is None else [Part.WEIGHTS, Part.OPTIMIZER]
    version, manifest = whole_version(folder, parts, mesh, what)
    here: OptimizerFacts | None = None
    if optimizer is not None:
        with agreed(mesh, what):
            own_facts = facts_of(model, optimizer)
        here = of_all_stages(own_facts, mesh)
    with agreed(mesh, what) as facts:
        facts |= {"manifest": manifest.rendered(), "adapter": list(adapter.own)}
        problems: list[Problem] = []
        stored = stored_tensors(version, manifest.files_of(Part.WEIGHTS), problems)
        # A model of another origin, or a new one, may have saved others of the names that transformers reads.
        weights = {found.name if (found := adapter.find(name)) else name: tensor for name, tensor in stored.items()}
        kept = _stored_kept(weights, model, adapter)
        problems += _misfits(weights, adapter)
        if optimizer is not None and here is not None:
            states = stored_tensors(version, manifest.files_of(Part.OPTIMIZER), problems)
            problems += misfits(model, optimizer, here, manifest.optimizer, states)
        if problems:
            summary = f"{version} is a checkpoint of another model or optimiser"
            raise CheckpointError(summary, problems, replaced(version))
    with agreed(mesh, what):
        own = own_state_dict(model)
        for name, tensor in adapter.exported("hub").items():
            weights[name].fill(Held(name, tensor, own).blocks)
        if optimizer is not None and manifest.optimizer is not None:
            restore(model, optimizer, manifest.optimizer, states)
        keep(model, kept)
        sharding.adapter = sharding.adapter.keeping(model)
    return manifest.progress


def _finish(stage: Path, model: PreTrainedModel, manifest: Manifest) -> None:
    model.config.save_pretrained(stage)
    manifest.files[CONFIG_NAME] = WrittenFile.of(stage / CONFIG_NAME)
    (stage / NAME).write_bytes(manifest.rendered())


def _kept_blocks(model: PreTrainedModel, mesh: DeviceMesh) -> Iterator[tuple[str, Block]]:
    """Of the tensors that the model keeps beside its own, each whole, those that this rank writes: in turns."""
    for number, (name, kept) in enumerate(kept_by(model).items()):
        if number % mesh.size() == place_in(mesh):
            values = kept.read()
            yield name, Block((0,) * values.ndim, values)


def _stored_kept(
    stored: dict[str, StoredTensor], model: PreTrainedModel, adapter: StateDictAdapter
) -> dict[str, KeptTensor]:
    """Take out of `stored` the tensors that a model only keeps: over the pages of the files."""
    mtp, held, unused = MTPNames(model), kept_by(model), keeps_unused(model)
    found = {}
    for name in [name for name in stored if name not in adapter.hub]:
        is_mtp = mtp.may_be(name)
        if not (is_mtp or name in held or unused.search(name)):
            continue
        tensor = stored.pop(name)
        (block, *_) = tensor.blocks
        found[name] = KeptTensor(
            TensorSpec(block.shape, tensor.dtype), (block.handle.get_tensor(block.key),), is_mtp=is_mtp
        )
    return found


def _misfits(stored: Mapping[str, StoredTensor], adapter: StateDictAdapter) -> list[Problem]:
    """What keeps a model from taking stored weights."""
    problems = match(
        {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored.items()},
        adapter.hub.get,
        adapter.own,
        adapter.absent,
        adapter.tied,
        why_unexpected=lambda name: "is no tensor of this model",
    ).problems
    # What a model with other ties saved.
    saved_otherwise = [name for name in adapter.exported("hub") if name not in stored]
    problems = problems or [Problem(ProblemKind.MISSING, name, "is not there") for name in saved_otherwise]
    problems += [
        Problem(ProblemKind.TIED, name, f"was saved apart from {kept}, but the model ties them")
        for name, tensor in adapter.hub.items()
        if name in stored and (kept := adapter.tied.get(tensor.parameters[0])) is not None
    ]
    return problems
