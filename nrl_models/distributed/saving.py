"""`save_pretrained` of a sharded model: gather and write a regular Hugging Face checkpoint, one file at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from nrl_models.common.checkpoint.files import INDEX_NAME
from nrl_models.common.checkpoint.writing import staged
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.modules import class_name
from nrl_models.common.projections import own_storage
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.kept_tensors import KeptTensor, kept_by
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.savable import check_shapes, check_ties, require_savable, require_wide_weights
from nrl_models.common.state_dict.ties import ties_as_read
from nrl_models.common.state_dict.to_checkpoint import checkpoint_layout
from nrl_models.common.views.view import HFTensor
from nrl_models.distributed.mesh import Ranks, agree, agreed, gather_over, is_first, reporting_dead_ranks
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import DEFAULT_BUCKET
from nrl_models.distributed.tensor.local_tensors import unsharded_class
from nrl_models.errors import UnknownArgumentError


def save_pretrained(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    save_original_format: bool = True,
    **options: Any,
) -> None:
    """Write the same files as `save_pretrained` of the unsharded model.

    Every rank has to call this; the first rank writes. It holds the tensors of one file, and the other ranks those of
    one bucket. Files are staged, and moved into place once all are written and no rank has failed.

    Args:
        model: A sharded model.
        folder: Directory on the first rank; created if necessary.
        max_shard_size: Maximum size of a file, unless a single tensor is larger.
        save_original_format: See `FamilyModel.save_pretrained`.
        options: Not supported, because transformers' other keywords need the unsharded model.

    Raises:
        UnknownArgumentError: If there are `options`.
        CheckpointError: If configuration and model disagree about shapes or tied embeddings.
        StateDictError: If weights were quantized in place.
        ShardingError: If another rank failed. The failed rank raises its own error.
    """
    if options := {name: value for name, value in options.items() if name not in _IMPLIED}:
        raise UnknownArgumentError(
            f"save_pretrained of a sharded model does not support {', '.join(options)}: use the directory it saves"
        )
    sharding = sharding_of(model)
    mesh, gather = sharding.mesh, sharding.gatherer(model)
    adapter = sharding.adapter_of(model)
    check_shapes(model, adapter)
    check_ties(model, adapter)
    require_savable(model)
    require_wide_weights(model, adapter, adapter.specs)
    table = checkpoint_layout(model, adapter, original_format=save_original_format)
    kept_tensors = kept_by(model)  # the first rank's, which writes them
    with reporting_dead_ranks(f"save into {folder}"):
        (kept_specs, *_) = gather_over(mesh, {name: tensor.spec for name, tensor in kept_tensors.items()})
    kept_on_meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in kept_specs.items()}
    split = split_torch_state_dict_into_shards(
        on_meta(table, adapter.specs) | kept_on_meta,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )

    def write(stage: Path | None, attempt: Attempt) -> None:
        for file, names in split.filename_to_tensors.items():
            hf_tensors = {name: table[name] for name in names if name in table}
            tensors: dict[str, torch.Tensor] = {}
            for name, tensor in gather(hf_tensors, DEFAULT_BUCKET):
                if stage is not None:  # copy to a separate storage; other ranks keep nothing
                    tensors[name] = attempt(tensor.to, "cpu", copy=True)
            if stage is not None:
                tensors |= {name: attempt(_read, kept_tensors[name]) for name in names if name not in table}
                attempt(save_file, tensors, stage / file, metadata={"format": "pt"})
        if stage is not None:
            attempt(_write_configuration, model, adapter, stage)
            if split.is_sharded:
                metadata = {"total_parameters": sharding.total_parameters, **split.metadata}
                index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
                attempt((stage / INDEX_NAME).write_text, json.dumps(index, indent=2, sort_keys=True) + "\n")

    write_together(folder, mesh, write)


def _read(kept_tensor: KeptTensor) -> torch.Tensor:
    return own_storage(kept_tensor.read())


def on_meta(table: Mapping[str, HFTensor], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Return Hugging Face tensors on meta, with the dtypes in `specs`."""
    return {
        name: torch.empty(tensor.shape, dtype=specs[tensor.parameters[0]].dtype, device="meta")
        for name, tensor in table.items()
    }


_IMPLIED = ("is_main_process", "safe_serialization")
"""Keywords that trainers pass and that have no effect here."""


class Attempt:
    """Calls functions until one fails, and keeps its error, because other ranks wait for the following collectives.

    Attributes:
        error: The first error.
    """

    error: Exception | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, unless an earlier call failed. Returns its result; None if a call failed."""
        if self.error is None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.error = error
        return None


def write_together(folder: str | Path, ranks: Ranks, write: Callable[[Path | None, Attempt], None]) -> None:
    """Write a directory from all ranks, atomically.

    The first rank creates a staging directory, and renames it when all ranks have succeeded.

    Args:
        folder: The directory.
        ranks: The ranks that write.
        write: Function that each rank calls with the staging directory (None except on the first rank) and an
            `Attempt`. Use the `Attempt` for steps that only the first rank runs and that may fail.

    Raises:
        ShardingError: If another rank failed. The failed rank raises its own error.
    """
    action = f"save into {folder}"
    attempt = Attempt()
    with ExitStack() as stack:
        with agreed(ranks, action):
            stage = stack.enter_context(staged(folder)) if is_first(ranks) else None
        with reporting_dead_ranks(action):
            write(stage, attempt)
        agree(ranks, action, {}, attempt.error)
        with agreed(ranks, action):
            stack.close()  # renames the staging directory


def _write_configuration(model: PreTrainedModel, adapter: StateDictAdapter, stage: Path) -> None:
    """Write the configuration, and the Python code of a registered class, as transformers does with weights."""
    dtype = next(spec.dtype for spec in adapter.specs.values() if spec.dtype.is_floating_point)
    model.config.dtype = dtype_name(dtype)
    model.config.architectures = [class_name(model)]
    if model.is_remote_code():
        whole_class = unsharded_class(model)
        config: Any = model.config  # annotated as a dictionary
        custom_object_save(whole_class.__new__(whole_class), stage, config=config)
    with ties_as_read(model):
        model.config.save_pretrained(stage)
    if model.can_generate():
        model.generation_config.save_pretrained(stage)
