"""One error lists everything that a mesh does not divide. The tests need no ranks, because nothing is sharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.parallel_plan import ParallelPlan, Plan, declared_tensor_plan
from nrl_models.errors import ShardingError
from nrl_models.families.table import TABLE
from nrl_models.onboarding.estimate import _fake_mesh
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"


def llama(**sizes: int) -> PreTrainedModel:
    return tiny(LlamaConfig, **sizes)


def tiny(config: type[PreTrainedConfig], **sizes: int) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(tiny_config(config, sizes), device="meta")


def problems(model: PreTrainedModel, mesh: Mapping[str, int], plan: Plan | ParallelPlan = "auto") -> dict[str, str]:
    with _fake_mesh(mesh) as ranks, pytest.raises(ShardingError) as caught:
        plan_for(model, ranks, plan)
    return {problem.subject: problem.detail for problem in caught.value.problems}


def test_error_lists_each_uneven_linear_once() -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    details = problems(llama(**sizes, intermediate_size=130), {"tp": 4})
    assert details.keys() == {
        *(f"{ATTENTION}.{name} (2 times)" for name in ("q_proj", "k_proj", "v_proj")),
        *(f"{MLP}.{name} (2 times)" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    assert "6 heads of 16 (num_attention_heads)" in details[f"{ATTENTION}.q_proj (2 times)"]
    assert details[f"{MLP}.down_proj (2 times)"] == "has 130 in dimension 1 which tp=4 does not divide"


def test_error_about_adapters_has_no_consequences() -> None:
    config = LoraConfig(target_modules="all-linear")
    for wrap in (lambda model: model, lambda model: model.get_base_model()):
        details = problems(wrap(get_peft_model(llama(intermediate_size=128), config)), {"tp": 2})
        assert [detail.partition(" more ")[2] for detail in details.values()] == [
            "have LoRA adapters, which tp does not divide"
        ]


def test_error_about_adapters_comes_first() -> None:
    model = get_peft_model(llama(intermediate_size=130), LoraConfig(target_modules=["q_proj"])).get_base_model()
    first, *others = problems(model, {"tp": 4}).items()
    assert "LoRA adapters" in first[1]
    assert f"{MLP}.up_proj (2 times)" in dict(others)


def test_error_includes_module_with_wrong_rule() -> None:
    plan = {"model.norm": "colwise"}
    details = problems(llama(intermediate_size=130), {"tp": 4}, plan)
    assert "model.norm" in details
    assert f"{MLP}.up_proj (2 times)" in details


def test_error_includes_rule_without_module() -> None:
    details = problems(llama(intermediate_size=130), {"tp": 4}, {"model.nowhere": "colwise"})
    assert details["model.nowhere"] == "names no module or parameter of the model"
    assert f"{MLP}.gate_proj (2 times)" in details


def test_error_includes_unknown_style_and_rule_without_module() -> None:
    details: dict[str, Any] = problems(llama(), {"tp": 2}, {"model.nowhere": "colwise", "model.norm": "sideways"})
    assert details.keys() == {"model.nowhere", "model.norm"}


def test_fsdp_options_require_fsdp_dimension() -> None:
    plan = ParallelPlan(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, offload=True)
    assert problems(llama(intermediate_size=130), {"tp": 4}, plan).keys() == {
        *("param_dtype", "offload"),
        *(f"{MLP}.{name} (2 times)" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    for mesh in ({"pp": 2}, {"ep": 1}, {"tp": 2}):
        details = problems(llama(), mesh, ParallelPlan(param_dtype=torch.bfloat16))
        assert details["param_dtype"] == "is torch.bfloat16, which needs the dimension fsdp in the mesh"
    with _fake_mesh({"fsdp": 1, "tp": 2}) as ranks:
        assert plan_for(llama(), ranks, plan).offload
    with _fake_mesh({"tp": 2}) as ranks:
        assert plan_for(llama(), ranks, ParallelPlan(reduce_dtype=torch.float32)).reduce_dtype == torch.float32


def test_invalid_options_of_plan_raise() -> None:
    options: dict[str, Any] = {
        "tensor": "auto",
        "expert": ["colwise"],
        "units": "LlamaDecoderLayer",
        "param_dtype": "bfloat16",
        "reduce_dtype": torch.int32,
        "reshard_after_forward": "yes",
        "offload": "no",
        "schedule": None,
        "stages_per_rank": "2",
    }
    details = problems(llama(), {"fsdp": 2}, ParallelPlan(**options))
    assert details.keys() == options.keys()
    assert details["param_dtype"].startswith("is 'bfloat16', expected a floating-point torch.dtype")
    assert details["offload"] == "is 'no', expected True or False"
    also_uneven = problems(llama(intermediate_size=130), {"fsdp": 1, "tp": 4}, ParallelPlan(**options))
    assert also_uneven.keys() > options.keys()


def test_reshard_after_forward_to_fewer_ranks() -> None:
    with _fake_mesh({"fsdp": 4}) as ranks:
        assert plan_for(llama(), ranks, ParallelPlan(reshard_after_forward=2)).reshard_after_forward == 2
    for value, mesh in ((3, {"fsdp": 4}), (0, {"fsdp": 4}), (2, {"pp": 2, "fsdp": 2})):
        assert "reshard_after_forward" in problems(llama(), mesh, ParallelPlan(reshard_after_forward=value))


def test_fsdp_with_0_dimensional_parameter_raises() -> None:
    model = llama()
    model.scale = torch.nn.Parameter(torch.ones((), device="meta"))
    assert problems(model, {"fsdp": 2}) == {"scale": "has no dimension that fsdp can divide"}
    with _fake_mesh({"tp": 2}) as ranks:
        plan_for(model, ranks)


def test_divisible_model_has_no_problems() -> None:
    with _fake_mesh({"tp": 4}) as ranks:
        assert plan_for(llama(), ranks).tensor
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_different_rules_for_tied_embeddings_raise(name: str) -> None:
    details = problems(llama(tie_word_embeddings=True), {"tp": 2}, {name: "replicate"})
    assert details.keys() == {"lm_head.weight"}
    assert details["lm_head.weight"].startswith("is tied to model.embed_tokens.weight, which has the style ")


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ({"tie_word_embeddings": True}, dict.fromkeys(["lm_head", "model.embed_tokens"], "replicate")),
        ({"tie_word_embeddings": False}, {"lm_head": "replicate"}),
        ({"tie_word_embeddings": True, "vocab_size": 513}, {"lm_head": "replicate"}),  # replicated
        # The example of docs/scaling.md.
        ({}, {f"{MLP}.{name}": "replicate" for name in ("gate_proj", "up_proj", "down_proj")}),
    ],
)
def test_consistent_rules_have_no_problems(sizes: dict[str, Any], plan: Plan) -> None:
    with _fake_mesh({"tp": 2}) as ranks:
        plan_for(llama(**sizes), ranks, plan)


@pytest.mark.parametrize("style", ["replicate", "colwise_gather_output", "rowwise_split_input", "packed_colwise"])
@pytest.mark.parametrize(
    ("name", "others"),
    [(f"{MLP}.down_proj", "gate_proj, up_proj"), (f"{ATTENTION}.q_proj", "k_proj, o_proj, v_proj")],
)
def test_rule_for_part_of_block_raises(name: str, others: str, style: str) -> None:
    details = problems(llama(), {"tp": 2}, {name: style})
    assert details.keys() == {f"{name} (2 times)"}
    (detail,) = details.values()
    has, _, names = detail.partition(", because tp splits ")
    assert has.startswith(f"has the style {style!r}, expected '")
    assert sorted(names.split(", ")) == others.split(", ")


def test_complete_plan_missing_part_of_block_raises() -> None:
    model = llama()
    plan = {name: style for name, style in declared_tensor_plan(model).items() if not name.endswith("up_proj")}
    details = problems(model, {"tp": 2}, ParallelPlan(tensor=plan))
    assert details == {
        f"{MLP}.up_proj (2 times)": "has no rule, expected 'colwise', because tp splits gate_proj, down_proj"
    }


def test_norm_gradient_reduction_requires_split_heads() -> None:
    rules = {f"{ATTENTION}.{name}_proj": "replicate" for name in "qkvo"}
    details = problems(tiny(Qwen3Config), {"tp": 2}, rules)
    assert details.keys() == {f"{ATTENTION}.{name}_norm (2 times)" for name in "qk"}
    with _fake_mesh({"tp": 2}) as ranks:
        plan_for(tiny(Qwen3Config), ranks, rules | {f"{ATTENTION}.{name}_norm": "replicate" for name in "qk"})


def test_expert_output_reduction_requires_split_features() -> None:
    rules = {f"{MLP}.experts.{name}": "replicate" for name in ("gate_up_proj", "down_proj")}
    assert problems(tiny(Qwen3MoeConfig), {"tp": 2}, rules).keys() == {f"{MLP}.experts (2 times)"}


def test_colwise_without_rowwise_raises() -> None:
    details = problems(llama(), {"tp": 2}, {"lm_head": "colwise"})
    assert details == {
        "lm_head": "has the style 'colwise', but no rule splits the input of another linear in the model"
    }


WITH_STYLES = [
    name
    for row in TABLE.values()
    if row.tensor_parallel
    for name in row.architectures
    if name in registry.architectures()
]


@pytest.mark.parametrize("architecture", WITH_STYLES)
def test_declared_styles_name_modules_of_each_class(architecture: str) -> None:
    """Classes of one family may have other module names. A style without modules would silently do nothing."""
    case = FamilyCase(registry.model_class(architecture))
    names = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in case.model().named_modules()}
    assert names & set(case.model_class.tensor_parallel), architecture
