"""Replace parameters of sharded models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from jobs.setting import batches, case_of, full, mesh_of, subjects_of_error
from nrl_models.distributed import ParallelPlan, parallelize, save_checkpoint
from nrl_models.errors import ShardingError

TIED = {"tie_word_embeddings": True, "vocab_size": 513}  # fsdp pads the second shard


def later_uses_raise(folder: str, change: str, **sizes: int) -> list[tuple[str, ...]]:
    """Replace a parameter of a sharded model. Returns the parameters named in the error of each later use."""
    case = case_of("LlamaForCausalLM", {"tie_word_embeddings": change == "untied"})
    model: Any = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    (batch,) = batches(case, 1)
    if change == "norm":
        model.model.norm.weight = nn.Parameter(torch.ones(model.config.hidden_size))
    elif change == "untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.3)
        model.config.tie_word_embeddings = False
    elif change == "head after forward":
        model(**batch, use_cache=False).loss.backward()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.3)
    elif change == "frozen":
        model.requires_grad_(False)
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        norm = model.model.layers[0].input_layernorm
        norm.weight = nn.Parameter(torch.ones_like(full(norm.weight)), requires_grad=False)
    elif change == "removed":
        model.model.norm.weight = None
    elif change == "bias":
        model.lm_head.bias = nn.Parameter(torch.zeros(model.config.vocab_size))
    uses: list[Callable[[], Any]] = [
        lambda: model(**batch, use_cache=False),
        lambda: model.model(batch["input_ids"]),
        lambda: model.state_dict(),
        lambda: save_checkpoint(folder, model),
        lambda: model.save_pretrained(folder),
        lambda: list(model.state_dict_adapter.iter_export(model)),
    ]
    if change != "bias":  # without gradients, ranks compute with equal values
        uses += [torch.no_grad()(uses[0]), lambda: model.load_state_dict({}, strict=False)]
    return [subjects_of_error(use) for use in uses]


def old_optimizer_raises(**sizes: int) -> bool:
    """Step an optimizer from before sharding, which must raise. Returns True if a new one changes the model."""
    case = case_of("LlamaForCausalLM")
    model: Any = copy.deepcopy(case.model()).train()
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    parallelize(model, mesh_of(**sizes))
    (batch,) = batches(case, 1)
    new, before = torch.optim.AdamW(model.parameters(), lr=0.1), full(model.lm_head.weight).clone()
    model(**batch, use_cache=False).loss.backward()
    with pytest.raises(ShardingError, match=r"optimizer after nrl_models\.distributed\.parallelize"):
        old.step()
    new.step()
    return not torch.equal(full(model.lm_head.weight), before)


def checks_of_decoding() -> tuple[int, int]:
    """Return how often a sharded model checks its parameters in the first forward, and when it continues the cache."""
    model: Any = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()).eval(), mesh_of(tp=2))
    tokens = batches(case_of("LlamaForCausalLM"), 1)[0]["input_ids"]
    check = model.sharding.slots.require_same_parameters
    with torch.no_grad(), mock.patch.object(model.sharding.slots, "require_same_parameters", side_effect=check) as ran:
        cache = model(tokens, use_cache=True).past_key_values
        first = ran.call_count
        model(tokens[:, :1], past_key_values=cache, use_cache=True)
    return first, ran.call_count - first


def permitted_changes(change: str, **sizes: int) -> tuple[float, float]:
    """Apply a change that keeps the parameters of a sharded model. Returns the loss, and that of one process."""
    case = case_of("LlamaForCausalLM", TIED if sizes.get("tp", 1) == 1 else {"tie_word_embeddings": True})
    single: Any = copy.deepcopy(case.model()).train()
    batch = batches(case, 1)[0]
    values = {name: tensor.detach() * 1.1 for name, tensor in single.state_dict().items()}
    plan = ParallelPlan(reshard_after_forward=change != "unsharded", offload=change == "offload")
    model: Any = parallelize(copy.deepcopy(single), mesh_of(**sizes), plan)
    if change == "unsharded":
        model(**batch, use_cache=False)
    elif change == "to":
        model.to(torch.float64).to(torch.float32)
    elif change.startswith("load"):
        if change.endswith("after forward"):
            model(**batch, use_cache=False)
        model.load_state_dict(dict(values), assign="assign" in change)
        single.load_state_dict(values)
    elif change == "optimizer":
        for each in (model, single):
            each(**batch, use_cache=False).loss.backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    elif change == "adopted":
        for each in (model, single):
            each.model.norm.weight = nn.Parameter(each.model.norm.weight.detach() * 1.1)
    elif change == "copy":
        model = copy.deepcopy(model)
    model.state_dict()
    loss = float(model(**batch, use_cache=False).loss)
    if change != "copy":
        state = model.state_dict()
        expected = single.state_dict()
        assert all(torch.allclose(full(state[name]).cpu(), expected[name], atol=1e-5) for name in expected)
    dist.barrier()
    return loss, float(single(**batch, use_cache=False).loss)
