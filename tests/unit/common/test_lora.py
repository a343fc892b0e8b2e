"""LoRA between combined linears and their parts: the update `B A` stays what it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import peft
import pytest
import torch
from checkpoints import problems
from transformers import LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, StateDictError
from nrl_models.common.lora import from_hf, to_hf

HIDDEN = 16
QKV = "layers.0.attn.qkv_proj"
ROWS = {
    QKV: {"layers.0.attn.q_proj": (0, 8), "layers.0.attn.k_proj": (8, 4), "layers.0.attn.v_proj": (12, 4)},
    "layers.0.mlp.gate_up_proj": {"layers.0.mlp.gate_proj": (0, 12), "layers.0.mlp.up_proj": (12, 12)},
}
SIZES = {part: length for rows in ROWS.values() for part, (_, length) in rows.items()}
Q, K, V = ROWS[QKV]


def lora(name: str, rank: int = 3, rows: int | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """An adapter of one linear."""
    rows = SIZES[name] if rows is None else rows
    return {
        f"{name}.lora_A.weight": torch.randn(rank, HIDDEN, **options),
        f"{name}.lora_B.weight": torch.randn(rows, rank, **options),
    }


def update(state_dict: dict[str, torch.Tensor], name: str, rest: str = ".weight") -> torch.Tensor:
    """`B A` of one linear, in fp64; what is not there is no update."""
    a = state_dict.get(f"{name}.lora_A{rest}", torch.zeros(1, HIDDEN)).double()
    b = state_dict.get(f"{name}.lora_B{rest}", torch.zeros(SIZES.get(name, 0), 1)).double()
    return b @ a


def assert_same_update(state_dict: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> None:
    """The combined linear's update is that of its parts, row by row: zeros add nothing, so exactly."""
    expected = torch.cat([update(parts, part) for part in ROWS[QKV]])
    torch.testing.assert_close(update(state_dict, QKV), expected, atol=1e-12, rtol=0)


def rank_of(state_dict: dict[str, torch.Tensor], name: str = QKV) -> tuple[int, int]:
    return state_dict[f"{name}.lora_A.weight"].shape[0], state_dict[f"{name}.lora_B.weight"].shape[1]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Combined to parts


def test_a_combined_adapter_becomes_one_of_each_part() -> None:
    combined = lora(QKV, rows=16)
    parts = to_hf(combined, ROWS)
    assert parts.keys() == {f"{part}.lora_{side}.weight" for part in (Q, K, V) for side in "AB"}
    for part, (start, length) in ROWS[QKV].items():
        assert torch.equal(parts[f"{part}.lora_A.weight"], combined[f"{QKV}.lora_A.weight"])
        assert torch.equal(parts[f"{part}.lora_B.weight"], combined[f"{QKV}.lora_B.weight"][start : start + length])
    assert_same_update(combined, parts)


def test_combined_to_parts_copies_nothing() -> None:
    combined = lora(QKV, rows=16)
    storages = {tensor.untyped_storage().data_ptr() for tensor in combined.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in to_hf(combined, ROWS).values()} == storages


def test_tensors_may_come_one_at_a_time() -> None:
    combined = lora(QKV, rows=16)
    one_by_one = {name: part for key, tensor in combined.items() for name, part in to_hf({key: tensor}, ROWS).items()}
    whole = to_hf(combined, ROWS)
    assert one_by_one.keys() == whole.keys()
    assert all(torch.equal(one_by_one[name], tensor) for name, tensor in whole.items())


# Parts to combined


def test_there_and_back_is_the_same() -> None:
    combined = lora(QKV, rows=16) | lora("layers.0.mlp.gate_up_proj", rank=2, rows=24)
    back = from_hf(to_hf(combined, ROWS), ROWS)
    assert back.keys() == combined.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in combined.items())


def test_parts_with_an_input_matrix_each_keep_all_of_them() -> None:
    # Automodel's import kept q's and dropped k's and v's without a word.
    parts = lora(Q) | lora(K) | lora(V)
    combined = from_hf(parts, ROWS)
    assert combined.keys() == {f"{QKV}.lora_A.weight", f"{QKV}.lora_B.weight"}
    assert rank_of(combined) == (9, 9)
    assert_same_update(combined, parts)


def test_parts_of_different_ranks() -> None:
    parts = lora(Q, rank=4) | lora(K, rank=1) | lora(V, rank=2)
    combined = from_hf(parts, ROWS)
    assert rank_of(combined) == (7, 7)
    assert_same_update(combined, parts)


def test_parts_that_share_an_input_matrix_keep_their_rank() -> None:
    parts = lora(Q) | lora(K) | lora(V)
    for part in (K, V):
        parts[f"{part}.lora_A.weight"] = parts[f"{Q}.lora_A.weight"].clone()
    combined = from_hf(parts, ROWS)
    assert rank_of(combined) == (3, 3)
    assert_same_update(combined, parts)


def test_parts_of_which_only_two_share_an_input_matrix() -> None:
    parts = lora(Q) | lora(K) | lora(V)
    parts[f"{V}.lora_A.weight"] = parts[f"{Q}.lora_A.weight"]
    assert_same_update(from_hf(parts, ROWS), parts)


@pytest.mark.parametrize("given", [(Q,), (V,), (Q, V), (K, V)], ids=lambda given: "".join(name[-6] for name in given))
@pytest.mark.parametrize("shared", [True, False])
def test_a_part_without_an_adapter_is_not_changed(given: tuple[str, ...], shared: bool) -> None:
    parts = {name: tensor for part in given for name, tensor in lora(part).items()}
    if shared:
        parts |= {f"{part}.lora_A.weight": parts[f"{given[0]}.lora_A.weight"] for part in given}
    combined = from_hf(parts, ROWS)
    assert rank_of(combined) == (3, 3) if shared else (3 * len(given), 3 * len(given))
    assert_same_update(combined, parts)


def test_the_order_of_the_tensors_does_not_matter() -> None:
    items = list((lora(Q) | lora(K) | lora(V)).items())
    expected = from_hf(dict(items), ROWS)
    for seed in range(4):
        random.Random(seed).shuffle(items)
        combined = from_hf(dict(items), ROWS)
        assert all(torch.equal(combined[name], tensor) for name, tensor in expected.items())


def test_rows_lie_where_the_combined_linear_has_them() -> None:
    # A family may declare ("up_proj", "gate_proj"): the parts' order in the model is then not that of the rows.
    name = "layers.0.mlp.gate_up_proj"
    rows = {name: {"layers.0.mlp.gate_proj": (12, 12), "layers.0.mlp.up_proj": (0, 12)}}
    parts = lora("layers.0.mlp.gate_proj") | lora("layers.0.mlp.up_proj")
    expected = torch.cat([update(parts, "layers.0.mlp.up_proj"), update(parts, "layers.0.mlp.gate_proj")])
    torch.testing.assert_close(update(from_hf(parts, rows), name), expected, atol=1e-12, rtol=0)


def test_the_widest_dtype_is_kept() -> None:
    parts = lora(Q, dtype=torch.bfloat16) | lora(K)
    parts[f"{K}.lora_A.weight"] = parts[f"{K}.lora_A.weight"].bfloat16()
    combined = from_hf(parts, ROWS)
    assert [tensor.dtype for tensor in combined.values()] == [torch.bfloat16, torch.float32]
    assert_same_update(combined, parts)


def test_given_tensors_are_left_alone() -> None:
    given = lora(Q) | lora(K) | lora(V)
    before = {name: tensor.clone() for name, tensor in given.items()}
    for tensor in from_hf(given, ROWS).values():
        tensor.zero_()
    assert given.keys() == before.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


# Names


@pytest.mark.parametrize("wrap", ["", "base_model.model."])
@pytest.mark.parametrize("rest", [".weight", ".default.weight", ".lora_ref.weight"])
def test_names_as_peft_gives_them(wrap: str, rest: str) -> None:
    parts = {
        f"{wrap}{name.removesuffix('.weight')}{rest}": tensor for name, tensor in (lora(Q) | lora(K) | lora(V)).items()
    }
    combined = from_hf(parts, ROWS)
    assert combined.keys() == {f"{wrap}{QKV}.lora_A{rest}", f"{wrap}{QKV}.lora_B{rest}"}
    back = to_hf(combined, ROWS)
    assert back.keys() == parts.keys()
    for part in (Q, K, V):
        name = wrap + part
        torch.testing.assert_close(update(back, name, rest), update(parts, name, rest), atol=1e-12, rtol=0)


def test_adapters_of_one_model_stay_apart() -> None:
    first = {name.replace(".weight", ".first.weight"): tensor for name, tensor in (lora(Q) | lora(K)).items()}
    second = {name.replace(".weight", ".second.weight"): tensor for name, tensor in lora(V).items()}
    combined = from_hf(first | second, ROWS)
    assert {name: tuple(tensor.shape) for name, tensor in combined.items()} == {
        f"{QKV}.lora_A.first.weight": (6, HIDDEN),
        f"{QKV}.lora_B.first.weight": (16, 6),
        f"{QKV}.lora_A.second.weight": (3, HIDDEN),
        f"{QKV}.lora_B.second.weight": (16, 3),
    }


def test_what_concerns_no_combined_linear_passes_through() -> None:
    others = {
        **lora("layers.0.attn.o_proj", rows=HIDDEN),
        "layers.0.attn.o_proj.lora_magnitude_vector.weight": torch.ones(HIDDEN),
        "embed_tokens.lora_embedding_A.weight": torch.ones(2, 8),
        "other.layers.0.attn.q_proj.lora_A.weight": torch.ones(3, HIDDEN),
        "score.weight": torch.ones(2, HIDDEN),
    }
    for convert in (to_hf, from_hf):
        result = convert(others, ROWS)
        assert result.keys() == others.keys()
        assert all(result[name] is tensor for name, tensor in others.items())


# What does not fit


def test_a_combined_adapter_of_other_rows_is_refused() -> None:
    with pytest.raises(StateDictError, match=rf"{QKV} has 16") as caught:
        to_hf(lora(QKV, rows=24) | lora("layers.0.mlp.gate_up_proj", rows=23), ROWS)
    assert problems(caught.value) == {
        ("shape", f"{QKV}.lora_B.weight"),
        ("shape", "layers.0.mlp.gate_up_proj.lora_B.weight"),
    }


def test_everything_that_is_wrong_with_the_parts_is_listed() -> None:
    given = lora(Q, rows=9) | lora(K) | lora(V) | lora("layers.0.mlp.gate_proj")
    del given[f"{K}.lora_A.weight"], given[f"{V}.lora_B.weight"]
    given["layers.0.mlp.gate_proj.lora_A.weight"] = torch.ones(2, HIDDEN)
    with pytest.raises(StateDictError) as caught:
        from_hf(given, ROWS)
    assert problems(caught.value) == {
        ("shape", Q),
        ("partial", K),
        ("partial", V),
        ("shape", "layers.0.mlp.gate_proj"),
    }


def test_matrices_of_another_rank_are_refused_and_not_broadcast() -> None:
    given = lora(Q) | lora(K)
    given[f"{K}.lora_B.weight"] = torch.ones(4, 1)
    with pytest.raises(StateDictError, match="lora_A has rank 3, lora_B has rank 1"):
        from_hf(given, ROWS)


def test_parts_that_read_other_inputs_are_refused() -> None:
    given = lora(Q) | lora(K)
    given[f"{K}.lora_A.weight"] = torch.ones(3, HIDDEN + 1)
    with pytest.raises(StateDictError, match="different sizes"):
        from_hf(given, ROWS)


def test_an_adapter_of_a_combined_linear_and_of_a_part_of_it_is_refused() -> None:
    given = lora(QKV, rows=16) | lora(K)
    expected = {("duplicated", name) for name in lora(K)}
    for convert in (to_hf, from_hf):
        for items in (given.items(), reversed(given.items())):
            with pytest.raises(StateDictError, match="which is given too") as caught:
                convert(dict(items), ROWS)
            assert problems(caught.value) == expected


@pytest.mark.parametrize("what", ["lora_magnitude_vector.weight", "lora_B.default.bias"])
def test_what_is_not_known_to_convert_is_refused(what: str) -> None:
    # DoRA, and `lora_bias=True`: dropping the one or leaving it under the part's name would change the model.
    for convert, name, rows in ((to_hf, QKV, 16), (from_hf, Q, 8)):
        with pytest.raises(StateDictError) as caught:
            convert(lora(name, rows=rows) | {f"{name}.{what}": torch.ones(rows)}, ROWS)
        assert problems(caught.value) == {("unexpected", f"{name}.{what}")}


# With a model, and PEFT


@pytest.fixture
def model(llama: PreTrainedModel) -> PreTrainedModel:
    """`llama`, combined."""
    model = AutoModelForCausalLM.from_config(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    return model


def test_an_adapter_trained_on_combined_names_serves_transformers_model_through_peft(
    model: PreTrainedModel, llama: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    trained, scale = {}, 2.0
    for name, module in model.named_modules():
        if name.endswith(("qkv_proj", "gate_up_proj")):
            a, b = 0.1 * torch.randn(4, module.in_features), 0.1 * torch.randn(module.out_features, 4)
            trained |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            with torch.no_grad():
                module.weight += scale * b @ a
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
    with_lora = peft.get_peft_model(copy.deepcopy(llama), config)
    loaded = peft.set_peft_model_state_dict(with_lora, model.state_dict_adapter.lora_to_hf(trained))
    assert not loaded.unexpected_keys
    assert not [key for key in loaded.missing_keys if "lora" in key]
    with torch.no_grad():
        expected, actual = model(input_ids).logits, with_lora(input_ids).logits
        assert not torch.allclose(expected, llama(input_ids).logits, atol=1e-2)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_peft_trained_becomes_one_of_the_combined_linears(
    model: PreTrainedModel, llama: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with_lora = peft.get_peft_model(copy.deepcopy(llama), config).eval()
    combined = model.state_dict_adapter.lora_from_hf(peft.get_peft_model_state_dict(with_lora))
    wrap = "base_model.model."
    with torch.no_grad():
        for name in {key.partition(".lora_")[0] for key in combined}:
            module = model.get_submodule(name.removeprefix(wrap))
            module.weight += combined[f"{name}.lora_B.weight"] @ combined[f"{name}.lora_A.weight"]
        expected, actual = with_lora(input_ids).logits, model(input_ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_what_peft_saves_of_a_combined_model_names_hugging_faces_linears(model: PreTrainedModel) -> None:
    # Automodel saved adapters under `qkv_proj`, which neither PEFT nor an engine loads.
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    saved = peft.get_peft_model_state_dict(peft.get_peft_model(model, config))
    adapted = {key.partition(".lora_")[0].rpartition(".")[2] for key in saved}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_adapter_of_a_model_that_peft_wraps_has_transformers_names(
    model: PreTrainedModel, llama: PreTrainedModel
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    trained = {}
    for name, one in (("ours", model), ("theirs", copy.deepcopy(llama))):
        torch.manual_seed(0)
        trained[name] = peft.get_peft_model(one, config).base_model.model
    adapter, own = trained["ours"].state_dict_adapter, trained["ours"].state_dict()
    exported, expected = adapter.to_hf(own, layout="transformers"), trained["theirs"].state_dict()
    assert list(exported) == list(expected)
    for name, tensor in expected.items():
        if "lora_" not in name:  # their random numbers are drawn in the order PEFT finds linears in
            assert torch.equal(exported[name], tensor)
    back = adapter.from_hf(expected)
    assert back.keys() == own.keys()
    # And LoRA's names are still those of the linears.
    name = "model.layers.0.self_attn.qkv_proj"
    parts = adapter.lora_to_hf({f"{name}.lora_A.weight": torch.ones(2, 256)})
    assert sorted(parts) == [f"model.layers.0.self_attn.{part}_proj.lora_A.weight" for part in "kqv"]


def test_a_family_that_declares_its_rows_in_another_order(llama_config: LlamaConfig) -> None:
    # The adapter's own table, not one written here.
    from transformers.models.llama import modeling_llama as hf

    from nrl_models.common import CombinedProjections, FamilyModel

    class LlamaMLP(CombinedProjections, hf.LlamaMLP):
        combined = {"gate_up_proj": ("up_proj", "gate_proj")}

    class LlamaForCausalLM(FamilyModel, hf.LlamaForCausalLM):
        rewrites = {hf.LlamaMLP: LlamaMLP}

    mlp = "model.layers.1.mlp"
    sides = {f"{mlp}.{part}.lora_{side}.weight" for part in ("gate_proj", "up_proj") for side in "AB"}
    parts = {name: torch.randn(*((2, 256) if "lora_A" in name else (384, 2))) for name in sorted(sides)}
    combined = LlamaForCausalLM(llama_config).state_dict_adapter.lora_from_hf(parts)
    b_a = combined[f"{mlp}.gate_up_proj.lora_B.weight"] @ combined[f"{mlp}.gate_up_proj.lora_A.weight"]
    expected = parts[f"{mlp}.up_proj.lora_B.weight"] @ parts[f"{mlp}.up_proj.lora_A.weight"]
    torch.testing.assert_close(b_a[:384], expected)
