"""Resume checkpoints: parameters and optimizer state under Hugging Face names, loadable at any layout.

A folder has versions, `version-1`, `version-2` and so on. The newest is used. A version consists of:

- `weights-...safetensors` and `optimizer-...safetensors`: each rank writes the blocks that it holds.
- `config.json`.
- `manifest.json`: size and hash of each other file.

When loading, each rank reads the blocks that it needs for its current layout. Names and shapes are Hugging Face's, so
they do not depend on the sharding. Files that are not in the manifest are ignored, because some file systems add files.
No file is a pickle.
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
    """Write a resume checkpoint. Every rank has to call this, and all ranks must see the directory.

    Args:
        folder: Directory of the versions. A new version is added, and older ones are deleted. If any rank fails, the
            last version stays.
        model: A sharded model (`parallelize`, or `from_pretrained` with a mesh).
        optimizer: Optimizer of the model's parameters. Its state may consist of tensors of the parameter's shape, and
            scalars.
        progress: Any JSON value. `step`, if present, must be an integer.

    Raises:
        CheckpointError: If optimizer state has another shape, or progress cannot be written and read again.
        SaveError: If the disk is full or read-only, or another process saves into the folder.
        ShardingError: If another rank failed. The failed rank raises its own error.
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
        Manifest({}, dict(progress or {}), facts).rendered()  # raises before anything is written

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
                    sync(target / name)  # each rank syncs its own files, because other machines may not have them yet

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
    """Load the newest checkpoint of a folder into a model and its optimizer. It may be from any other layout.

    Args:
        folder: Directory written by `save_checkpoint`.
        model: A sharded model of the same architecture and configuration.
        optimizer: Optimizer of the model's parameters, with the same groups. Its state is replaced.

    Returns:
        The saved progress.

    Raises:
        CheckpointError: On every rank and before anything is written, if there is no checkpoint, it is damaged, or it
            belongs to another model or optimizer. Lists every problem. If an older version is intact, the message
            names it, but it is not loaded.
        ShardingError: If a rank died or could not read a file completely. The model's values are then undefined.
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
        # transformers reads several names for some tensors, and the saved model may have used other ones.
        weights = {found.name if (found := adapter.find(name)) else name: tensor for name, tensor in stored.items()}
        kept = _stored_kept(weights, model, adapter)
        problems += _misfits(weights, adapter)
        if optimizer is not None and here is not None:
            states = stored_tensors(version, manifest.files_of(Part.OPTIMIZER), problems)
            problems += misfits(model, optimizer, here, manifest.optimizer, states)
        if problems:
            summary = f"{version} is a checkpoint of another model or optimizer"
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
    """Yield the kept tensors (not the model's own) that this rank writes. Ranks take turns; each tensor is complete."""
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
    """Return the reasons why a model cannot load stored weights."""
    problems = match(
        {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored.items()},
        adapter.hub.get,
        adapter.own,
        adapter.absent,
        adapter.tied,
        why_unexpected=lambda name: "is not a tensor of this model",
    ).problems
    # Tensors that are tied in this model and were not tied in the saved one, or vice versa.
    saved_otherwise = [name for name in adapter.exported("hub") if name not in stored]
    problems = problems or [Problem(ProblemKind.MISSING, name, "is not there") for name in saved_otherwise]
    problems += [
        Problem(ProblemKind.TIED, name, f"was saved apart from {kept}, but the model ties them")
        for name, tensor in adapter.hub.items()
        if name in stored and (kept := adapter.tied.get(tensor.parameters[0])) is not None
    ]
    return problems
