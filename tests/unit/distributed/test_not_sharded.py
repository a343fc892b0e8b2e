"""Functions for sharded models, called with a model that is not sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.distributed import clip_grad_norm_, load_checkpoint, save_checkpoint
from nrl_models.errors import ShardingError, StateDictError, UnknownArgumentError


@pytest.fixture
def model() -> Any:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("function", [save_checkpoint, load_checkpoint])
def test_checkpoint_of_unsharded_model_raises(model: Any, function: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match=r"is not sharded\n.*parallelize\(model, mesh\)") as caught:
        function(tmp_path / "checkpoint", model)
    assert [problem.subject for problem in caught.value.problems] == ["LlamaForCausalLM"]
    with pytest.raises(StateDictError, match=r"model\.module"):
        function(tmp_path / "checkpoint", AveragedModel(model))
    assert not (tmp_path / "checkpoint").exists()


def test_clip_grad_norm_matches_torch(model: Any) -> None:
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    expected = copy.deepcopy(model)
    for parameter, clipped in zip(model.parameters(), expected.parameters(), strict=True):
        clipped.grad = parameter.grad.clone()
    assert torch.equal(clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1))
    for parameter, clipped in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, clipped.grad)


@pytest.mark.parametrize("function", [save_checkpoint, load_checkpoint])
def test_swapped_arguments_of_checkpoints_raise(model: Any, function: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError, match=rf"model is a str, .*: call {function.__name__}\(folder, model"):
        function(model, str(tmp_path))


def test_clip_grad_norm_of_parameters_raises(model: Any) -> None:
    with pytest.raises(UnknownArgumentError, match=r"model is a generator, .*: call clip_grad_norm_\(model, "):
        clip_grad_norm_(model.parameters(), 1.0)
