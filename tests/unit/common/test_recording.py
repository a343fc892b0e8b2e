"""Names of the modules whose forward is running."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nrl_models.common.recording import modules_running


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot")


def test_running_modules_during_calls_and_after_error() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity()), nn.ReLU(), Fails())
    begun = []
    with modules_running(model, lambda name, module, args: begun.append((name, [*running]))) as running:
        with pytest.raises(ValueError, match="cannot"):
            model(torch.ones(1))
        assert running == []
    assert begun == [("", []), ("0", [""]), ("0.0", ["", "0"]), ("1", [""]), ("2", [""])]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
