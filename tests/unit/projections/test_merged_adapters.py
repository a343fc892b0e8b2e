"""Fused linears of every architecture with PEFT adapters that are merged and then disabled."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from nrl_models.common.projections.combined import groups_of
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.suite.asserts import assert_close


def with_lora(case: FamilyCase, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(copy.deepcopy(case.model()), config)


def test_merged_adapters_can_be_disabled(family_case: FamilyCase) -> None:
    """PEFT then unmerges each linear when it is called, without changing the version counter of its weight."""
    if not any(groups_of(family_case.model())):
        return
    try:
        adapted = with_lora(family_case)
    except ValueError:  # PEFT does not adapt all linears of Mamba models
        adapted = with_lora(family_case, exclude_modules=["out_proj"])
    model, inputs = adapted.get_base_model(), family_case.inputs(length=12)

    @torch.no_grad()
    def output() -> torch.Tensor:
        result: torch.Tensor = model(**inputs)[0]
        return result

    adapted.merge_adapter()
    with adapted.disable_adapter():
        first, second = output(), output()
    assert torch.equal(first, second)
    with torch.no_grad():
        assert_close(first, family_case.model()(**inputs)[0], scale=100, message="adapters disabled after merging")
