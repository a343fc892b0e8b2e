"""Resume checkpoints: progress, configurations and optimizer states that are compared or restored value by value."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jobs.setting import LENGTH, case_of, full, mesh_of
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint


def resumes_a_scale(folder: str, **sizes: int) -> list[tuple[float, float]]:
    """Train a 0-dimensional parameter. Returns its value after a step from a saved state, and after the same step from
    the loaded state, for each optimizer.
    """
    case, values = case_of("LlamaForCausalLM"), []
    batch = case.inputs(batch=2, length=LENGTH, seed=0, labels=True)
    for optimizer_class in (torch.optim.AdamW, torch.optim.NAdam):  # NAdam has another 0-dimensional state than `step`
        model = copy.deepcopy(case.model()).train()
        model.scale = nn.Parameter(torch.tensor(1.0))
        model = parallelize(model, mesh_of(**sizes))
        optimizer = optimizer_class(model.parameters(), lr=0.1)

        def step(model: Any = model, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            (model(**batch, use_cache=False).loss * full(model.scale)).backward()
            optimizer.step()
            return full(model.scale).item()

        step()
        save_checkpoint(folder, model, optimizer)
        types = {key: type(value) for key, value in optimizer.state[model.scale].items()}
        before = step()
        load_checkpoint(folder, model, optimizer)
        assert {key: type(value) for key, value in optimizer.state[model.scale].items()} == types
        values.append((before, step()))
    return values


def saves_progress_of_each_rank(folder: str, **sizes: int) -> None:
    """Save another progress on each rank."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    save_checkpoint(folder, model, None, {"step": 3, "rng": [dist.get_rank()]})


def saves_configuration(folder: str, config: dict[str, Any], **sizes: int) -> None:
    """Save a model with other configuration values."""
    save_checkpoint(folder, parallelize(case_of("LlamaForCausalLM", config).model(), mesh_of(**sizes)))


def loads_configuration(folder: str, config: dict[str, Any], ignored: str = "", **sizes: int) -> None:
    """Load into a model with other configuration values."""
    model = parallelize(case_of("LlamaForCausalLM", config).model(), mesh_of(**sizes))
    load_checkpoint(folder, model, ignore_config_keys=ignored or ())
