"""Checkpoints to resume from."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from jobs.setting import case_of, mesh_of, new_optimizer, train
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.distributed import resume as dcp_checkpoint


def train_and_save(folder: str, architecture: str, **sizes: int) -> list[float]:
    """Two steps, a checkpoint, and two more steps; all losses."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    losses = train(model, optimizer, case, range(2))
    save_checkpoint(folder, model, optimizer, {"step": 2})
    return losses + train(model, optimizer, case, range(2, 4))


def resume(folder: str, architecture: str, combine: bool = True, **sizes: int) -> list[float]:
    """The two steps after the checkpoint, by a model that began with other weights."""
    case = case_of(architecture)
    torch.manual_seed(7)
    model = case.model_class.from_config(case.config, combine=combine).train()
    model = parallelize(model, mesh_of(**sizes))
    optimizer = new_optimizer(model)
    optimizer.param_groups[0]["lr"] = 7.0
    progress = load_checkpoint(folder, model, optimizer)
    assert progress == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 1e-3
    return train(model, optimizer, case, range(progress["step"], 4))


def resume_without_optimizer(folder: str, **sizes: int) -> list[float]:
    """Go on with the weights alone."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(case.model_class.from_config(case.config).train(), mesh_of(**sizes))
    load_checkpoint(folder, model)
    return train(model, new_optimizer(model), case, range(2, 4))


def dies_while_resuming(folder: str, dying: int, **sizes: int) -> None:
    """One rank ends when all have agreed that the checkpoint fits."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    optimizer = new_optimizer(model)
    if dist.get_rank() == dying:
        dcp_checkpoint.dcp = SimpleNamespace(load=lambda *_, **__: os._exit(3))  # type: ignore[assignment]
    load_checkpoint(folder, model, optimizer)


def resume_with_one_group(folder: str, **sizes: int) -> None:
    """An optimiser that was made otherwise."""
    case = case_of("LlamaForCausalLM")
    model = parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))
    load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def names_in_checkpoint(folder: str) -> dict[str, list[str]]:
    """The tensors of its two parts."""
    readers = {
        "model": HuggingFaceStorageReader(f"{folder}/model"),
        "optimizer": FileSystemReader(f"{folder}/optimizer"),
    }
    return {kind: list(reader.read_metadata().state_dict_metadata) for kind, reader in readers.items()}
