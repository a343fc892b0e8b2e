"""Parameters that need a separate group under FSDP, because they compute in another dtype."""

from __future__ import annotations

import torch
from versions import since

from nrl_models import registry
from nrl_models.distributed import ParallelPlan
from nrl_models.distributed.kept_dtypes import kept_parameters
from nrl_models.testing.case import FamilyCase

BF16 = ParallelPlan(param_dtype=torch.bfloat16)


def model(name: str) -> torch.nn.Module:
    return FamilyCase(registry.model_class(name)).model()


@since("5.24")  # before, routers of DeepSeek-V3 are not kept in fp32
def test_kept_parameters_match_transformers_fp32_modules() -> None:
    assert kept_parameters(model("LlamaForCausalLM"), BF16) == {}
    fp32_parameters = kept_parameters(model("DeepseekV3ForCausalLM"), BF16)
    assert set(fp32_parameters) == {"model.layers.1.mlp.gate.weight"}


def test_trainable_parameters_of_minority_dtype_are_kept() -> None:
    llama = model("LlamaForCausalLM").bfloat16()
    assert kept_parameters(llama, ParallelPlan()) == {}
    llama.model.norm.float()
    assert set(kept_parameters(llama, ParallelPlan())) == {"model.norm.weight"}


def test_frozen_parameters_need_no_separate_group() -> None:
    """FSDP accepts fp32 adapters on a frozen bf16 model as they are."""
    llama = model("LlamaForCausalLM").bfloat16().requires_grad_(False)
    llama.model.norm.float().requires_grad_(True)
    assert kept_parameters(llama, ParallelPlan()) == {}
