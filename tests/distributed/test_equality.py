"""Sharded models compute the same as one process: loss within 5e-6, gradients within 3e-5, by Hugging Face name.

Every family of `ONE_OF_EACH_PATTERN` is tested. Layouts that a family does not support are skipped with the reason.
Wrong results never are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import edited_weights, equality
from world import RanksFailedError, World

from nrl_models import registry
from nrl_models.families.gemma4.variants import VARIANTS
from tests.patterns import ONE_OF_EACH_PATTERN

LOSS = 5e-6
"""Ten units in the last place of an fp32 loss."""

GRADIENTS = 3e-5
"""Relative to the largest gradient. Ranks sum in another order. Bugs cause differences of several percent."""

ONE_EACH = [registry.FAMILIES[family][0] for family in ONE_OF_EACH_PATTERN]
"""The first class of each family: its language model."""

HEADS = [name for name in registry.FAMILIES["llama"] + registry.FAMILIES["gemma3"] if name not in ONE_EACH]
"""Other heads, and images."""


MIXTURES = [
    name
    for name in [*ONE_EACH, *HEADS]
    if registry.unmet_requirement(name) is None
    and getattr(registry.model_class(name).reference_class().config_class, "base_model_ep_plan", None)
]
"""Mixtures of experts for which transformers has a plan."""


def check(world: World, architecture: str, **sizes: int) -> None:
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"{architecture} needs {unmet}")
    try:
        results = world.run(partial(equality.equals_one_process, **sizes), architecture)
    except RanksFailedError as error:
        if {kind for kind, _ in error.errors.values()} == {"ShardingError"} and len(error.errors) == world.size:
            pytest.skip(error.errors[0][1])
        raise
    assert_equal(results)


def assert_equal(results: list[dict[str, float]]) -> None:
    for rank in results:
        assert rank["loss"] <= LOSS
        assert rank["gradients"] <= GRADIENTS
        assert rank["scale"] > 0.05, "gradients are too small to reveal errors"


@pytest.mark.parametrize("architecture", [*ONE_EACH, *HEADS])
@pytest.mark.parametrize("dimension", ["fsdp", "tp"])
def test_two_ranks_match_one_process(two: World, architecture: str, dimension: str) -> None:
    check(two, architecture, **{dimension: 2})


@pytest.mark.parametrize("architecture", ONE_EACH)
def test_four_ranks_match_one_process(four: World, architecture: str) -> None:
    check(four, architecture, fsdp=2, tp=2)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_expert_parallelism_over_two_ranks(two: World, architecture: str) -> None:
    check(two, architecture, ep=2)


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("other", ["fsdp", "tp"])
def test_expert_parallelism_with_fsdp_or_tp(four: World, architecture: str, other: str) -> None:
    check(four, architecture, **({"fsdp": 2, "ep": 2} if other == "fsdp" else {"ep": 2, "tp": 2}))


# Latent attention whose sharded queries and unsharded key latents share an input. Layers that attend to earlier layers'
# keys. Experts next to dense layers that transformers' expert plan also shards. A norm in the experts, of which each
# rank computes its share. Embeddings that are modified in place.
@pytest.mark.parametrize(
    ("architecture", "config", "dimension"),
    [
        *[("Gemma4ForCausalLM", VARIANTS["E2B"], dimension) for dimension in ("fsdp", "tp")],
        *[("Gemma4ForCausalLM", VARIANTS["26B-A4B"], dimension) for dimension in ("fsdp", "tp", "ep")],
        ("DeepseekV3ForCausalLM", {"q_lora_rank": None}, "tp"),
        *[("MuseSparkForConditionalGeneration", {}, dimension) for dimension in ("tp", "ep")],
        ("VoxtralRealtimeForConditionalGeneration", {}, "tp"),
    ],
)
def test_architecture_specific_plans(two: World, architecture: str, config: dict[str, Any], dimension: str) -> None:
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"{architecture} needs {unmet}")
    results = two.run(partial(equality.equals_one_process, config=config, **{dimension: 2}), architecture)
    assert_equal(results)


# Norms of heads, and a norm in the experts: each rank computes its share of their gradients.
@pytest.mark.parametrize(
    ("architecture", "dimension"), [("Qwen3ForCausalLM", "tp"), ("MuseSparkForConditionalGeneration", "ep")]
)
def test_deep_copy_matches_one_process(two: World, architecture: str, dimension: str) -> None:
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"{architecture} needs {unmet}")
    assert_equal(two.run(partial(equality.equals_one_process, copied=True, **{dimension: 2}), architecture))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_tensor_parallelism_over_four_ranks(four: World, architecture: str) -> None:
    check(four, architecture, tp=4)


def test_every_pattern_has_a_plan(two: World, four: World) -> None:
    for world, sizes in ((two, {"fsdp": 2}), (two, {"tp": 2}), (four, {"fsdp": 2, "tp": 2})):
        world.run(partial(equality.accepts, **sizes), ONE_EACH)
    two.run(partial(equality.accepts, ep=2), ["MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"fsdp": 2}, {"fsdp": 2, "tp": 2}], ids=["tp", "fsdp", "fsdp-tp"])
def test_each_projection_is_sharded_separately(two: World, four: World, sizes: dict[str, int]) -> None:
    world = four if len(sizes) == 2 else two
    for groups in world.run(
        partial(equality.projections_are_dtensors, **sizes), {"attention_bias": True, "mlp_bias": True}
    ):
        assert len(groups) == 4
        for _, fused, reason in groups:
            assert fused == ("fsdp" not in sizes)
            assert (
                reason == ("" if fused else "the weight of q_proj is a DTensor") or "gate_proj is a DTensor" in reason
            )


@pytest.mark.parametrize("heads", [1, 2])
def test_fsdp_with_indivisible_key_value_heads(four: World, heads: int) -> None:
    (results, *_) = four.run(partial(equality.llama_equals_one_process, fsdp=4), {"num_key_value_heads": heads})
    assert results["loss"] <= LOSS
    assert results["gradients"] <= GRADIENTS


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "ep": 2}], ids=["fsdp", "fsdp-ep"])
def test_fsdp_with_indivisible_expert_count(four: World, sizes: dict[str, int]) -> None:
    job = partial(equality.equals_one_process, config={"num_local_experts": 6}, **sizes)
    assert_equal(four.run(job, "MixtralForCausalLM"))


def test_fsdp_and_tp_with_indivisible_rows(four: World) -> None:
    uneven = {"intermediate_size": 258, "vocab_size": 514}  # 129 and 257 rows per tp rank, which fsdp does not divide
    for results in four.run(partial(equality.llama_equals_one_process, fsdp=2, tp=2), uneven):
        assert results["loss"] <= LOSS
        assert results["gradients"] <= GRADIENTS


def test_tp_with_indivisible_key_value_heads_raises(four: World) -> None:
    with pytest.raises(RanksFailedError) as caught:
        four.run(partial(equality.llama_equals_one_process, tp=4), {"num_key_value_heads": 2})
    for rank in range(4):
        kind, message = caught.value.errors[rank]
        assert kind == "ShardingError"
        assert "k_proj (2 times): has 2 heads of 32 (num_key_value_heads), which tp=4 does not divide" in message
        assert "take tp among [1, 2]" in message


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2}], ids=["fsdp", "tp", "fsdp-tp"])
def test_biases_train_as_one_process(two: World, four: World, sizes: dict[str, int]) -> None:
    world = four if len(sizes) == 2 else two
    for difference in world.run(
        partial(equality.trains_as_one_process, **sizes), {"attention_bias": True, "mlp_bias": True}
    ):
        assert difference <= 1e-5


def test_tp_with_indivisible_vocabulary(two: World) -> None:
    for results in two.run(
        partial(equality.llama_equals_one_process, tp=2), {"vocab_size": 513, "tie_word_embeddings": True}
    ):
        assert results["loss"] <= LOSS
        assert results["gradients"] <= GRADIENTS


def test_fsdp_with_indivisible_hidden_size(four: World) -> None:
    uneven = {"hidden_size": 258, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True}
    (results, *_) = four.run(partial(equality.llama_equals_one_process, fsdp=4), uneven)
    assert results["loss"] <= LOSS
    assert results["gradients"] <= GRADIENTS


def test_mixed_precision_dtypes(two: World) -> None:
    for results in two.run(equality.mixed_precision):
        assert results == {"kept": "torch.float32", "gradients": "torch.float32", "computed": "torch.bfloat16"}


KEEP_FP32 = ("DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "BailingHybridForCausalLM", "HYV4ForCausalLM")
"""A router; norms and sinks; parameters of a module that also has linears; the head."""


@pytest.mark.parametrize("architecture", KEEP_FP32)
def test_bf16_fsdp_keeps_fp32_modules(two: World, architecture: str, tmp_path: Path) -> None:
    for results in two.run(equality.computes_in_kept_dtypes, architecture, str(tmp_path)):
        assert results.pop("kept") > 0
        assert results.pop("bf16 loss") <= 2e-4
        assert results.pop("masters loss") <= 2e-4
        assert results == {"bf16": {}, "masters": {}}


@pytest.mark.long
@pytest.mark.timeout(0)
def test_bf16_fsdp_keeps_fp32_modules_of_every_class(two: World, tmp_path: Path) -> None:
    names = [name for name in registry.MODEL_ARCH_MAPPING if not registry.unmet_requirement(name)]
    keep = [name for name in names if registry.model_class(name)._keep_in_fp32_modules_strict]
    assert len(keep) > 30
    wrong, fails = {}, set()
    for name in keep:
        for results in two.run(equality.computes_in_kept_dtypes, name, str(tmp_path / name)):
            if "one process" in results:  # transformers' code does not run in bf16
                fails.add(name)
                continue
            losses = results.pop("bf16 loss"), results.pop("masters loss")
            if results.pop("kept") == 0 or max(losses) > 5e-3 or any(results.values()):
                wrong[name] = (losses, results)
    assert not wrong
    assert len(fails) < 5, fails


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2}], ids=["fsdp", "tp", "fsdp-tp"])
def test_activation_checkpointing_gradients(two: World, four: World, sizes: dict[str, int]) -> None:
    world = four if len(sizes) == 2 else two
    for architecture in ("Qwen3ForCausalLM", "GptOssForCausalLM"):
        for results in world.run(partial(equality.equals_one_process, checkpointing=True, **sizes), architecture):
            assert results["loss"] <= LOSS
            assert results["gradients"] <= GRADIENTS


def test_generation_matches_one_process(two: World) -> None:
    for sizes in ({"fsdp": 2}, {"tp": 2}):
        two.run(partial(equality.generates_as_one_process, **sizes), "Gemma3ForCausalLM")


# Sharding with torch only, and data parallelism


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_fully_shard_matches_transformers(two: World, architecture: str) -> None:
    """Loss, gradients, and names in the full state dicts of the model and its optimizer."""
    two.run(equality.plain_fully_shard, architecture)


def test_data_parallel_gradients_match_one_process(two: World) -> None:
    two.run(equality.data_parallel, "Qwen2ForCausalLM")


# Collectives and matmuls of tensor parallelism


@pytest.mark.parametrize("combine", [True, "auto"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_tp_group_runs_one_matmul_and_one_all_reduce(two: World, architecture: str, combine: Any) -> None:
    for groups in two.run(partial(equality.collectives, tp=2), architecture, combine):
        assert len(groups) == 2
        for group in groups:
            assert group["forward"] == {"matmuls": 1, "all_reduce": 0}
            assert group["backward"] == {"matmuls": 2, "all_reduce": 1}  # the input's and all weights' gradients


def test_tp_group_reduces_input_gradient_once_under_fsdp(four: World) -> None:
    """The linears then run separately, and the input's gradient is still reduced only once."""
    for groups in four.run(partial(equality.collectives, fsdp=2, tp=2), "LlamaForCausalLM"):
        for group, parts in zip(groups, (3, 2), strict=True):
            assert group["forward"] == {"matmuls": parts, "all_reduce": 0}
            assert group["backward"]["matmuls"] == 2 * parts
            assert group["backward"]["all_reduce"] == 1


def test_tp_step_collectives_match_megatron(two: World) -> None:
    for forward, backward in two.run(partial(equality.step_collectives, tp=2), "LlamaForCausalLM"):
        # One collective each on entering and leaving a layer's attention and MLP, after the embedding and before the
        # head. Then the logits, and the sums by which ranks compare their batches.
        assert forward == {"all_reduce": 2 * 2 + 1, "all_gather_into_tensor": 1, "allgather_": 1}
        assert backward == {"all_reduce": 2 * 2 + 1}


def test_fused_matmul_uses_updated_weights(two: World) -> None:
    two.run(partial(equality.fused_matmul_uses_updated_weights, tp=2))


@pytest.mark.parametrize(("factor", "ranks"), [(2.0, 2), (1.0, 1)], ids=["all ranks", "one rank"])
def test_hooks_between_linears_that_edit_data(two: World, factor: float, ranks: int) -> None:
    """Hooks of one rank only must not change the number of collectives."""
    for differences in two.run(partial(edited_weights.hooks_edit_weights, tp=2), factor, ranks):
        assert max(differences) <= 1e-4, differences
