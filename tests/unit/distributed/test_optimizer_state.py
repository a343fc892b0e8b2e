"""Restored optimizer state has the types it was saved with, on the same device as after torch's `load_state_dict`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nrl_models.distributed.resume_checkpoints.manifest import Manifest, OptimizerFacts, ParameterGroup, States
from nrl_models.distributed.resume_checkpoints.optimizer_state import facts_of, restore
from nrl_models.distributed.resume_checkpoints.scalars import Scalar
from nrl_models.errors import CheckpointError


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_restored_step_device_matches_torch(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    model: Any = nn.Linear(2, 2, bias=False, device="meta")
    model.sharding = SimpleNamespace(adapter=SimpleNamespace(transformers={}))
    expected = torch.optim.AdamW(model.parameters(), **options)
    state = {"step": torch.tensor(3.0)}
    expected.load_state_dict({"state": {0: state}, "param_groups": expected.state_dict()["param_groups"]})

    optimizer = torch.optim.AdamW(model.parameters())
    options = {key: value for key, value in expected.param_groups[0].items() if key != "params"}
    step = Scalar("torch.float32", 3.0)
    restore(
        model,
        optimizer,
        OptimizerFacts([ParameterGroup(options, ["weight"])], {"weight": States({"step": step}, [])}),
        {},
        {},
    )
    restored = optimizer.state[model.weight]["step"]
    assert restored.device == expected.state[model.weight]["step"].device
    assert restored.dtype == torch.float32


def test_restored_numbers_keep_type_and_value() -> None:
    model: Any = nn.Linear(2, 2, bias=False, device="meta")
    model.sharding = SimpleNamespace(adapter=SimpleNamespace(transformers={}))
    optimizer = torch.optim.SGD(model.parameters())
    saved = {
        "step": 2**24 + 1,
        "on": True,
        "mean": 0.1,
        "count": torch.tensor(2**24 + 1),
        "scale": torch.tensor(0.1, dtype=torch.float64),
        "half": torch.tensor(0.1, dtype=torch.bfloat16),
        "done": torch.tensor(False),
    }
    optimizer.state[model.weight] = dict(saved)
    facts = Manifest({}, {}, facts_of(model, optimizer)).checked().optimizer
    assert facts is not None
    restore(model, optimizer, facts, {}, {})
    restored = optimizer.state[model.weight]
    assert restored.keys() == saved.keys()
    for key, value in saved.items():
        assert type(restored[key]) is type(value)
        assert restored[key] == value
        assert getattr(restored[key], "dtype", None) == getattr(value, "dtype", None)


def test_option_with_several_elements_raises() -> None:
    model = nn.Linear(2, 2, bias=False)
    groups = [{"params": [model.weight], "scale": torch.ones(2)}]
    with pytest.raises(CheckpointError, match=r"scale of group 0: is a tensor of shape \(2,\); expected a number"):
        facts_of(model, torch.optim.SGD(groups, lr=torch.tensor([0.1])))
    assert facts_of(model, torch.optim.SGD(model.parameters(), lr=torch.tensor([0.1]))).groups[0].options["lr"] > 0
