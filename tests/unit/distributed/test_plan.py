"""One error lists everything that a mesh does not divide. The tests need no ranks, because nothing is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.parallel_plan import ParallelPlan, Plan, declared_tensor_plan
from nrl_models.errors import ShardingError
from nrl_models.onboarding.estimate import _fake_mesh
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


def test_every_uneven_linear_is_named_once_for_all_layers() -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    found = problems(llama(**sizes, intermediate_size=130), {"tp": 4})
    assert found.keys() == {
        *(f"{ATTENTION}.{name} (2 times)" for name in ("q_proj", "k_proj", "v_proj")),
        *(f"{MLP}.{name} (2 times)" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    assert "6 heads of 16 (num_attention_heads)" in found[f"{ATTENTION}.q_proj (2 times)"]
    assert found[f"{MLP}.down_proj (2 times)"] == "has 130 in dimension 1 which tp=4 does not divide"


def test_a_module_that_does_not_suit_its_rule_hides_no_other() -> None:
    plan = {"model.norm": "colwise"}
    found = problems(llama(intermediate_size=130), {"tp": 4}, plan)
    assert "model.norm" in found
    assert f"{MLP}.up_proj (2 times)" in found


def test_a_rule_that_names_nothing_hides_no_uneven_linear() -> None:
    found = problems(llama(intermediate_size=130), {"tp": 4}, {"model.nowhere": "colwise"})
    assert found["model.nowhere"] == "names no module or parameter of the model"
    assert f"{MLP}.gate_proj (2 times)" in found


def test_an_unknown_word_hides_no_rule_that_names_nothing() -> None:
    found: dict[str, Any] = problems(llama(), {"tp": 2}, {"model.nowhere": "colwise", "model.norm": "sideways"})
    assert found.keys() == {"model.nowhere", "model.norm"}


def test_options_of_fsdp_need_fsdp_in_the_mesh() -> None:
    plan = ParallelPlan(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, offload=True)
    assert problems(llama(intermediate_size=130), {"tp": 4}, plan).keys() == {
        *("param_dtype", "offload"),
        *(f"{MLP}.{name} (2 times)" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    for mesh in ({"pp": 2}, {"ep": 1}, {"tp": 2}):
        found = problems(llama(), mesh, ParallelPlan(param_dtype=torch.bfloat16))
        assert found["param_dtype"] == "is torch.bfloat16, which needs the dimension fsdp in the mesh"
    with _fake_mesh({"fsdp": 1, "tp": 2}) as ranks:
        assert plan_for(llama(), ranks, plan).offload
    with _fake_mesh({"tp": 2}) as ranks:
        assert plan_for(llama(), ranks, ParallelPlan(reduce_dtype=torch.float32)).reduce_dtype == torch.float32


def test_fsdp_cannot_shard_0_dimensional_parameters() -> None:
    model = llama()
    model.scale = torch.nn.Parameter(torch.ones((), device="meta"))
    assert problems(model, {"fsdp": 2}) == {"scale": "has no dimension that fsdp can divide"}
    with _fake_mesh({"tp": 2}) as ranks:
        plan_for(model, ranks)


def test_a_model_that_the_ranks_divide_has_no_problem() -> None:
    with _fake_mesh({"tp": 4}) as ranks:
        assert plan_for(llama(), ranks).tensor
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_rules_that_divide_tied_embeddings_differently_raise(name: str) -> None:
    found = problems(llama(tie_word_embeddings=True), {"tp": 2}, {name: "replicate"})
    assert found.keys() == {"lm_head.weight"}
    assert found["lm_head.weight"].startswith("is tied to model.embed_tokens.weight, which has the style ")


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ({"tie_word_embeddings": True}, dict.fromkeys(["lm_head", "model.embed_tokens"], "replicate")),
        ({"tie_word_embeddings": False}, {"lm_head": "replicate"}),
        ({"tie_word_embeddings": True, "vocab_size": 513}, {"lm_head": "replicate"}),  # whole on every rank
        # The example of docs/scaling.md.
        ({}, {f"{MLP}.{name}": "replicate" for name in ("gate_proj", "up_proj", "down_proj")}),
    ],
)
def test_rules_that_fit_each_other_have_no_problem(sizes: dict[str, Any], plan: Plan) -> None:
    with _fake_mesh({"tp": 2}) as ranks:
        plan_for(llama(**sizes), ranks, plan)


@pytest.mark.parametrize("style", ["replicate", "colwise_gather_output", "rowwise_split_input", "packed_colwise"])
@pytest.mark.parametrize(
    ("name", "others"),
    [(f"{MLP}.down_proj", "gate_proj, up_proj"), (f"{ATTENTION}.q_proj", "k_proj, o_proj, v_proj")],
)
def test_rules_that_split_a_part_of_a_block_raise(name: str, others: str, style: str) -> None:
    found = problems(llama(), {"tp": 2}, {name: style})
    assert found.keys() == {f"{name} (2 times)"}
    (detail,) = found.values()
    has, _, names = detail.partition(", because tp splits ")
    assert has.startswith(f"has the style {style!r}, expected '")
    assert sorted(names.split(", ")) == others.split(", ")


def test_a_complete_plan_without_a_part_of_a_block_raises() -> None:
    model = llama()
    plan = {name: style for name, style in declared_tensor_plan(model).items() if not name.endswith("up_proj")}
    found = problems(model, {"tp": 2}, ParallelPlan(tensor=plan))
    assert found == {
        f"{MLP}.up_proj (2 times)": "has no rule, expected 'colwise', because tp splits gate_proj, down_proj"
    }


def test_gradients_of_norms_are_summed_only_if_heads_are_split() -> None:
    rules = {f"{ATTENTION}.{name}_proj": "replicate" for name in "qkvo"}
    found = problems(tiny(Qwen3Config), {"tp": 2}, rules)
    assert found.keys() == {f"{ATTENTION}.{name}_norm (2 times)" for name in "qk"}
    with _fake_mesh({"tp": 2}) as ranks:
        plan_for(tiny(Qwen3Config), ranks, rules | {f"{ATTENTION}.{name}_norm": "replicate" for name in "qk"})


def test_outputs_of_a_stack_of_experts_are_summed_only_if_its_features_are_split() -> None:
    rules = {f"{MLP}.experts.{name}": "replicate" for name in ("gate_up_proj", "down_proj")}
    assert problems(tiny(Qwen3MoeConfig), {"tp": 2}, rules).keys() == {f"{MLP}.experts (2 times)"}


def test_rules_that_no_plan_declares_split_outputs_and_inputs() -> None:
    found = problems(llama(), {"tp": 2}, {"lm_head": "colwise"})
    assert found == {"lm_head": "has the style 'colwise', but no rule splits the input of another linear in the model"}
