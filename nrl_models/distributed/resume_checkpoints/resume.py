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

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.common.checkpoint.writing import folder_to_write
from nrl_models.common.config.comparison import differences
from nrl_models.common.config.ignored import key_names
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.kept_tensors import KeptTensor, keep, keeps_unused, kept_by
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import match
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.common.state_dict.own_tensors import own_state_dict, require_in_memory, require_real
from nrl_models.common.views.view_blocks import Block
from nrl_models.distributed.mesh import agreed, rank_number
from nrl_models.distributed.resume_checkpoints.background import CheckpointSave, finish_last, group_for_saves
from nrl_models.distributed.resume_checkpoints.block_files import (
    BlockedTensor,
    HeldTensor,
    blocks_to_write,
    copied,
    stored_tensors,
)
from nrl_models.distributed.resume_checkpoints.manifest import Manifest, OptimizerFacts, StatePart
from nrl_models.distributed.resume_checkpoints.optimizer_state import (
    facts_of,
    held_states,
    misfits,
    narrowed,
    of_all_stages,
    require_optimizer,
    restore,
)
from nrl_models.distributed.resume_checkpoints.saved_versions import replaced, whole_version
from nrl_models.distributed.resume_checkpoints.version_writing import VersionContents, write_version
from nrl_models.distributed.sharding import require_module, sharded_model, sharding_of
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnknownArgumentError, shown


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    progress: Mapping[str, Any] | None = None,
    *,
    wait: bool = True,
) -> CheckpointSave:
    """Write a resume checkpoint. Every rank has to call this, and all ranks must see the directory.

    Args:
        folder: Directory of the versions. A new version is added, and older ones are deleted. If any rank fails, the
            last version stays.
        model: A sharded model (`parallelize`, or `from_pretrained` with a mesh), which PEFT or torch may wrap.
        optimizer: Optimizer of the model's parameters. Its state may consist of tensors of the parameter's shape, and
            scalars.
        progress: A dictionary of JSON values, the same on all ranks. `step`, if present, must be an integer. To save
            values that differ between ranks, such as RNG states, gather them into a list (`all_gather_object`).
        wait: False copies this rank's state to host memory, and returns. A background thread writes the copy and
            publishes it once all ranks have finished. The next `save_checkpoint`, `load_checkpoint` and the
            interpreter's exit wait for it.

    Returns:
        The save. With `wait=False`, call its `wait()` before `destroy_process_group`.

    Raises:
        CheckpointError: If optimizer state has another shape, or JSON cannot represent progress.
        StateDictError: If weights are on meta or complex.
        SaveError: If the disk is full or read-only, or another process saves into the folder. Also if the previous
            asynchronous save failed and its `wait()` was not called; the new checkpoint is then not written.
        ShardingError: If ranks passed different progress, or another rank failed. The failed rank raises its own error.
            Also if the model is not sharded, or a wrapper has parameters (PEFT's prompts).
        UnknownArgumentError: If `folder` cannot be the path of a directory, `model` is not a module, for example if
            the arguments are swapped, or `optimizer` is not an optimizer, such as a scheduler or a list. Also
            if `wait` is not a bool.

    Examples:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from nrl_models import AutoModelForCausalLM
        >>> from nrl_models.distributed import load_checkpoint, save_checkpoint
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))  # started with torchrun
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint", mesh=mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        >>> save = save_checkpoint("training", model, optimizer, {"step": 100})
        >>> load_checkpoint("training", model, optimizer)
        {'step': 100}
    """
    require_module(model, "save_checkpoint(folder, model, optimizer)")
    model = sharded_model(model)
    sharding = sharding_of(model)
    mesh, action = sharding.mesh, f"save into {folder}"
    facts: OptimizerFacts | None = None
    with agreed(mesh, action):
        require_optimizer(optimizer)
        if not isinstance(wait, bool):
            raise UnknownArgumentError(f"wait={shown(wait)}: expected True or False")
        folder = folder_to_write(folder)
        finish_last(raising=True)
        local_state, adapter = sharding.written(model), sharding.adapter_of(model)
        require_in_memory(local_state)
        require_real(model, adapter.specs, "saved")
        parts = {
            StatePart.WEIGHTS: [
                HeldTensor(name, tensor, local_state) for name, tensor in adapter.exported("hub").items()
            ]
        }
        if optimizer is not None:
            own_facts = facts_of(model, optimizer)
            parts[StatePart.OPTIMIZER] = [
                held for held in held_states(model, optimizer) if held.model_tensors.keys() <= local_state.keys()
            ]
    if optimizer is not None:
        facts = of_all_stages(own_facts, mesh)
    with agreed(mesh, action) as shared:
        saved_progress: Any = {} if progress is None else progress
        saved_progress = dict(saved_progress) if isinstance(saved_progress, Mapping) else saved_progress
        manifest = Manifest({}, saved_progress, facts).checked()  # raises before anything is written
        shared |= {
            "progress": sorted(saved_progress),
            **{f"progress.{key}": value for key, value in saved_progress.items()},
        }
        blocks: dict[StatePart, Iterable[tuple[str, Block]]] = {
            part: blocks_to_write(tensors, mesh) for part, tensors in parts.items()
        }
        config: PreTrainedConfig = model.config
        if not wait:
            blocks = {part: copied(each) for part, each in blocks.items()}
            config = copy.deepcopy(config)
        blocks[StatePart.WEIGHTS] = chain(
            blocks[StatePart.WEIGHTS], _kept_blocks(kept_by(model), rank_number(mesh), mesh.size())
        )
    contents = VersionContents(blocks, rank_number(mesh), config, manifest)
    if wait:
        version = write_version(folder, contents, mesh)
        return CheckpointSave.finished(folder, version)
    save = CheckpointSave(folder, partial(write_version, folder, contents, group_for_saves(sharding)))
    save.start()
    return save


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ignore_config_keys: Collection[str] | str = (),
) -> dict[str, Any]:
    """Load the newest checkpoint of a folder into a model and its optimizer. It may be from any other layout.

    Args:
        folder: Directory written by `save_checkpoint`.
        model: A sharded model of the same architecture and configuration, which PEFT or torch may wrap. Keys of
            training, generation, precision, kernels, paths and versions may differ, and those that it does not read.
        optimizer: Optimizer of the model's parameters, with the same groups. Its state is replaced. None loads the
            weights alone, in the model's dtypes.
        ignore_config_keys: Other configuration keys, by name or path (`text_config.rope_parameters`), that may differ.

    Returns:
        The saved progress.

    Raises:
        CheckpointError: On every rank and before anything is written, if there is no checkpoint, it is damaged, or it
            belongs to another model or optimizer. Also if the optimizer trains parameters that were saved in a wider
            dtype than the model has. Lists every problem. If an older version is intact, the message
            names it, but it is not loaded.
        ShardingError: If a rank died or could not read a file completely. The model's values are then undefined. Also
            if the model is not sharded, or a wrapper has parameters (PEFT's prompts).
        UnknownArgumentError: If `folder` is not a path, `model` is not a module, for example if the arguments are
            swapped, `optimizer` is not an optimizer, or `ignore_config_keys` is neither a string nor a collection of
            strings.

    Examples:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from nrl_models import AutoModelForCausalLM
        >>> from nrl_models.distributed import load_checkpoint, save_checkpoint
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))  # started with torchrun
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint", mesh=mesh)
        >>> version = save_checkpoint("training", model).wait()
        >>> load_checkpoint("training", model)
        {}
    """
    require_module(model, "load_checkpoint(folder, model, optimizer)")
    ignore_config_keys = key_names(ignore_config_keys)
    model = sharded_model(model)
    sharding = sharding_of(model)
    mesh, action = sharding.mesh, f"load {folder}"
    with agreed(mesh, action):
        require_optimizer(optimizer)
    finish_last(raising=False)
    parts = [StatePart.WEIGHTS] if optimizer is None else [StatePart.WEIGHTS, StatePart.OPTIMIZER]
    version, manifest = whole_version(folder, parts, mesh, action)
    here: OptimizerFacts | None = None
    if optimizer is not None:
        with agreed(mesh, action):
            own_facts = facts_of(model, optimizer)
        here = of_all_stages(own_facts, mesh)
    with agreed(mesh, action) as facts:
        sharding.require_same_tensors(model)
        adapter = sharding.adapter_of(model)
        facts |= {"manifest": manifest.rendered(), "adapter": list(adapter.specs)}
        problems: list[Problem] = []
        stored = stored_tensors(version, manifest.files_of(StatePart.WEIGHTS), problems)
        # transformers reads several names for some tensors, and the saved model may have used other ones.
        weights = {
            hf_tensor.name if (hf_tensor := adapter.find(name)) else name: tensor for name, tensor in stored.items()
        }
        kept_tensors = _stored_kept(weights, model, adapter)
        problems += _misfits(weights, adapter)
        problems += _config_problems(version, model, ignore_config_keys)
        if optimizer is not None and here is not None:
            states = stored_tensors(version, manifest.files_of(StatePart.OPTIMIZER), problems)
            problems += misfits(model, optimizer, here, manifest.optimizer, states)
            saved_dtypes = _saved_dtypes(weights, adapter)
            problems += narrowed(model, optimizer, saved_dtypes)
        if problems:
            summary = f"{version} is a checkpoint of another model or optimizer"
            raise CheckpointError(summary, problems, replaced(version))
    with agreed(mesh, action):
        local_state = own_state_dict(model)
        for name, tensor in adapter.exported("hub").items():
            weights[name].fill(HeldTensor(name, tensor, local_state).blocks)
        if optimizer is not None and manifest.optimizer is not None:
            restore(model, optimizer, manifest.optimizer, states, saved_dtypes)
        keep(model, kept_tensors)
        sharding.adapter = sharding.adapter.keeping(model)
    return manifest.progress


def _config_problems(version: Path, model: PreTrainedModel, ignored: Collection[str] | str) -> list[Problem]:
    """Compare the version's configuration with the model's. A newer version may have removed the file."""
    try:
        saved = read_object(version / CONFIG_NAME)
    except CheckpointError as error:
        return list(error.problems)
    return list(differences(saved, model, ignored))


def _kept_blocks(kept_tensors: Mapping[str, KeptTensor], index: int, count: int) -> Iterator[tuple[str, Block]]:
    """Yield the kept tensors (not the model's own) that rank `index` of `count` writes. Each tensor is complete."""
    for name, tensor in list(kept_tensors.items())[index::count]:
        values = tensor.read()
        yield name, Block((0,) * values.ndim, values)


def _stored_kept(
    stored: dict[str, BlockedTensor], model: PreTrainedModel, adapter: StateDictAdapter
) -> dict[str, KeptTensor]:
    """Take out of `stored` the tensors that a model only keeps: over the pages of the files."""
    mtp, held, unused = MTPNames(model), kept_by(model), keeps_unused(model)
    kept_tensors = {}
    for name in [name for name in stored if name not in adapter.hub]:
        is_mtp = mtp.may_be(name)
        if not (is_mtp or name in held or unused.search(name)):
            continue
        tensor = stored.pop(name)
        (block, *_) = tensor.blocks
        kept_tensors[name] = KeptTensor(
            TensorSpec(block.shape, tensor.dtype), (block.handle.get_tensor(block.key),), is_mtp=is_mtp
        )
    return kept_tensors


def _saved_dtypes(stored: Mapping[str, BlockedTensor], adapter: StateDictAdapter) -> dict[str, torch.dtype]:
    """Return the stored dtype of each of the model's own tensors."""
    dtypes = {
        parameter: stored[name].dtype
        for name, tensor in adapter.hub.items()
        if name in stored
        for parameter in tensor.parameters
    }
    return dtypes | {name: dtypes[source] for name, source in adapter.tied.items() if source in dtypes}


def _misfits(stored: Mapping[str, BlockedTensor], adapter: StateDictAdapter) -> list[Problem]:
    """Return the reasons why a model cannot load stored weights."""
    problems = match(
        {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored.items()},
        adapter.hub.get,
        adapter.specs,
        adapter.absent,
        adapter.tied,
        why_unexpected=lambda name: "is not a tensor of this model",
    ).problems
    # Tensors that are tied in this model and were not tied in the saved one, or vice versa.
    saved_otherwise = [name for name in adapter.exported("hub") if name not in stored]
    problems = problems or [Problem(ProblemKind.MISSING, name, "not found") for name in saved_otherwise]
    problems += [
        Problem(ProblemKind.TIED, name, f"was saved apart from {source}, but the model ties them")
        for name, tensor in adapter.hub.items()
        if name in stored and (source := adapter.tied.get(tensor.parameters[0])) is not None
    ]
    return problems
