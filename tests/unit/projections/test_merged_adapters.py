"""Fused linears of every architecture with PEFT adapters that are merged and then disabled."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from nrl_models.common.projections.combined import groups_of
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.suite.asserts import assert_close


def test_merged_adapters_can_be_disabled(family_case: FamilyCase) -> None:
    """PEFT then unmerges each linear when it is called, without changing the version counter of its weight."""
    names = {name for *_, group in groups_of(family_case.model()) for name in group.names}
    targets = [
        name
        for name, module in family_case.model().named_modules()
        if type(module) is nn.Linear and name.rpartition(".")[2] in names
    ]
    if not targets:
        return
    inputs, outputs = family_case.inputs(length=12), []
    for model in (family_case.model(), family_case.reference()):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        adapted: Any = get_peft_model(copy.deepcopy(model), config)
        adapted.merge_adapter()
        with torch.no_grad(), adapted.disable_adapter():
            outputs.append(adapted.get_base_model()(**inputs)[0])
    ours, theirs = outputs
    assert_close(ours, theirs, scale=10, message="adapters disabled after merging")
    weights = [family_case.model().get_submodule(target).weight for target in targets]
    if len(set(weights)) < len(weights):
        return  # PEFT merges an adapter into a tied weight for each of its linears, and then unmerges one
    with torch.no_grad():
        assert_close(ours, family_case.model()(**inputs)[0], scale=100, message="the model without adapters")
