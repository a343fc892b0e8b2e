"""`evaluating` on every architecture: no dropout and no noise, also if layers are recomputed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nrl_models.common.forward.evaluation import evaluating
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.features import applies_to
from nrl_models.testing.suite.conditions import generates

RANDOM = ("dropout", "drop_path", "layerdrop", "jitter")
"""Parts of the names of attributes that hold a probability or the size of noise."""


def add_randomness(model: nn.Module) -> None:
    """Set every dropout probability and every noise of a model to 0.3."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        for name, value in vars(module).items():
            if type(value) is float and any(part in name for part in RANDOM):
                setattr(module, name, 0.3)


def outcome(model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, and the gradients of all parameters that have one."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.float().square().mean().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@applies_to(generates)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_evaluating_disables_dropout_and_noise(family_case: FamilyCase, checkpointing: bool) -> None:
    model, inputs = copy.deepcopy(family_case.model()), family_case.inputs(length=12)
    add_randomness(model)
    logits, gradients = outcome(model.eval(), inputs)
    if checkpointing:
        if "activation checkpointing" in family_case.model_class.limits:
            return
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    torch.manual_seed(0)
    with evaluating(model):
        found, own = outcome(model, inputs)
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
    assert len(own) == len(gradients)
    largest = max(gradient.abs().max().item() for gradient in gradients)
    for actual, expected in zip(own, gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * largest)
