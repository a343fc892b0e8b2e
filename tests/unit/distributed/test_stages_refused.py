"""Plans and models for which `pp` raises an error before it allocates memory."""

from __future__ import annotations

import pytest
import torch

from nrl_models import registry
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.parallel_plan import ParallelPlan
from nrl_models.distributed.pipeline.cut import cut_into
from nrl_models.distributed.pipeline.schedules import Schedule
from nrl_models.errors import ShardingError
from nrl_models.onboarding.estimate import _fake_mesh
from nrl_models.testing.case import FamilyCase


def case(architecture: str) -> FamilyCase:
    return FamilyCase(registry.model_class(architecture), torch.device("cpu"), {})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ParallelPlan(schedule="1F2B"), "'1F2B'.*is not a schedule"),
        (ParallelPlan(schedule=Schedule.GPIPE, stages_per_rank=2), "stages_per_rank.*is 2; a rank has 1 by GPipe"),
        (ParallelPlan(schedule=Schedule.INTERLEAVED, stages_per_rank=1), "a rank has 2 or more by Interleaved1F1B"),
        (ParallelPlan(offload=True), "offload.*keeps gradients on the CPU"),
    ],
)
def test_plan_incompatible_with_stages_raises(plan: ParallelPlan, message: str) -> None:
    with _fake_mesh({"pp": 2, "fsdp": 2}) as mesh, pytest.raises(ShardingError, match=message):
        plan_for(case("LlamaForCausalLM").model(), mesh, plan)


def test_more_stages_than_layers_raises() -> None:
    with pytest.raises(ShardingError, match="layers, which are not enough for 64 stages"):
        cut_into(case("LlamaForCausalLM").model(), 64)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("XLMWithLMHeadModel", "reads more of layer 0 than hidden states"),
        ("Gemma3nForCausalLM", "hidden states do not have the shape"),
    ],
)
def test_non_sequential_layers_raise(architecture: str, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        cut_into(case(architecture).model(), 2)
