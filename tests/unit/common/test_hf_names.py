"""A live model under Hugging Face names: what `load_state_dict` accepts, and what is written."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, hf_tensors, new_model, problems, snapshot, stored
from torch import nn
from transformers import Gemma3Config, PreTrainedModel, Trainer, TrainingArguments
from transformers import LlamaForCausalLM as HFLlama

from nrl_models import AutoModelForCausalLM, AutoModelForImageTextToText, StateDictError
from nrl_models.common.hf_names import to_checkpoint
from nrl_models.testing.tiny import tiny_config

ATTENTION = "model.layers.0.self_attn"
PARTS = [f"{ATTENTION}.{part}_proj.weight" for part in "qkv"]

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(llama: PreTrainedModel) -> PreTrainedModel:
    """A combined Llama of `llama`'s sizes, with other weights."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(llama.config).eval()


@pytest.fixture
def moe(mixtral: PreTrainedModel) -> PreTrainedModel:
    """A combined Mixtral of `mixtral`'s sizes, with other weights."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(mixtral.config).eval()


@pytest.fixture(scope="module")
def vision() -> PreTrainedModel:
    """transformers' Gemma 3 with a vision tower: every name on the hub is another."""
    return new_model(tiny_config(Gemma3Config), "ForConditionalGeneration")


@pytest.fixture
def tensors(llama: PreTrainedModel) -> Tensors:
    """What transformers has of `llama`, to change at will."""
    return {name: tensor.clone() for name, tensor in llama.state_dict().items()}


def refused(model: nn.Module, tensors: Tensors, **options: Any) -> set[tuple[str, str]]:
    """Why `load_state_dict` refuses, whether strict or not; the model stays as it was."""
    before, found = snapshot(model), set()
    for strict in (True, False):
        with pytest.raises(StateDictError) as caught:
            model.load_state_dict(tensors, strict=strict, **options)
        found |= problems(caught.value)
        assert_same(model.state_dict(), before)
    return found


# Names


def test_hugging_face_names_load_strictly(model: PreTrainedModel, llama: PreTrainedModel, tensors: Tensors) -> None:
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert not any(model.load_state_dict(tensors))
    assert_same(hf_tensors(model), tensors)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters  # an optimiser has them


def test_own_names_load_strictly(model: PreTrainedModel, llama: PreTrainedModel) -> None:
    own = model.state_dict_adapter.from_hf(llama.state_dict())
    assert not any(model.load_state_dict(own))
    assert_same(model.state_dict(), own)


def test_names_may_be_mixed(model: PreTrainedModel, llama: PreTrainedModel, tensors: Tensors) -> None:
    own = model.state_dict_adapter.from_hf(tensors)
    mixed = {name: tensor for name, tensor in own.items() if "layers.0" in name}
    mixed |= {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    assert f"{ATTENTION}.qkv_proj.weight" in mixed
    assert "model.layers.1.self_attn.q_proj.weight" in mixed
    assert not any(model.load_state_dict(mixed))
    assert_same(hf_tensors(model), tensors)


def test_hub_names_of_experts(moe: PreTrainedModel, mixtral: PreTrainedModel, mixtral_checkpoint: Path) -> None:
    assert not any(moe.load_state_dict(stored(mixtral_checkpoint)))
    assert_same(hf_tensors(moe), mixtral.state_dict())


def test_parts_of_one_tensor_may_be_named_in_several_layouts(vision: PreTrainedModel) -> None:
    model = AutoModelForImageTextToText.from_config(vision.config)
    adapter = model.state_dict_adapter
    hub_name = {tensor.pieces: name for name, tensor in adapter.hub.items()}
    mixed = {
        hub_name[adapter.transformers[name].pieces] if index % 2 else name: tensor
        for index, (name, tensor) in enumerate(vision.state_dict().items())
    }
    for layer in range(2):  # q, k and v follow one another
        names = [name for name in mixed if re.search(rf"language_model.*layers\.{layer}.self_attn.[qkv]_proj", name)]
        assert {name.startswith("language_model.") for name in names} == {True, False}
    assert not any(model.load_state_dict(mixed))
    assert_same(hf_tensors(model), vision.state_dict())


def test_the_order_of_the_names_does_not_matter(model: PreTrainedModel, tensors: Tensors) -> None:
    items = list(tensors.items())
    random.Random(0).shuffle(items)
    model.load_state_dict(dict(items))
    assert_same(hf_tensors(model), tensors)


def test_the_given_dict_is_left_alone(model: PreTrainedModel, tensors: Tensors) -> None:
    names, before = list(tensors), {name: tensor.clone() for name, tensor in tensors.items()}
    model.load_state_dict(tensors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert list(tensors) == names
    assert_same(tensors, before)


def test_an_uncombined_model_takes_the_same_names(llama: PreTrainedModel, tensors: Tensors) -> None:
    model = AutoModelForCausalLM.from_config(llama.config, combine=False)
    assert not any(model.load_state_dict(tensors))
    assert_same(model.state_dict(), tensors)


def test_tied_weights_are_missing_where_transformers_misses_them(tensors: Tensors, llama: PreTrainedModel) -> None:
    config = type(llama.config)(**llama.config.to_diff_dict() | {"tie_word_embeddings": True})
    del tensors["lm_head.weight"]
    model = AutoModelForCausalLM.from_config(config)
    expected = HFLlama._from_config(config).load_state_dict(tensors, strict=False)
    assert model.load_state_dict(tensors, strict=False) == expected
    assert expected.missing_keys == ["lm_head.weight"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


# Some of it


def test_a_missing_part_is_an_error_that_names_it(model: PreTrainedModel, tensors: Tensors) -> None:
    del tensors[PARTS[1]]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{PARTS[1]}"'):
        model.load_state_dict(tensors)


@pytest.mark.parametrize("given", [PARTS[:1], PARTS[1:], PARTS[:0]], ids=["q", "kv", "none"])
def test_parts_that_are_not_given_stay_and_are_reported(
    model: PreTrainedModel, tensors: Tensors, given: list[str]
) -> None:
    before = hf_tensors(model)
    expected = {name: (tensors if name in given else before)[name].clone() for name in before}
    result = model.load_state_dict({name: tensors[name] for name in given}, strict=False)
    assert_same(hf_tensors(model), expected)
    assert not result.unexpected_keys
    assert [name for name in result.missing_keys if name in PARTS] == [name for name in PARTS if name not in given] * (
        bool(given)
    )
    # Of what nothing is given, torch reports its own name.
    assert (f"{ATTENTION}.qkv_proj.weight" in result.missing_keys) is (not given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_that_are_not_given_keep_their_precision(
    model: PreTrainedModel, tensors: Tensors, dtype: torch.dtype
) -> None:
    expected = model.get_parameter(f"{ATTENTION}.qkv_proj.weight").detach().clone()
    expected[:256] = tensors[PARTS[0]].to(dtype)
    model.load_state_dict({PARTS[0]: tensors[PARTS[0]].to(dtype)}, strict=False)
    assert torch.equal(model.get_parameter(f"{ATTENTION}.qkv_proj.weight"), expected)


def test_a_checkpoint_loads_shard_by_shard(model: PreTrainedModel, tensors: Tensors) -> None:
    # The three parts of every attention lie in three shards.
    for shard in range(3):
        some = dict(list(tensors.items())[shard::3])
        assert sum(name in some for name in PARTS) == 1
        assert not model.load_state_dict(some, strict=False).unexpected_keys
    assert_same(hf_tensors(model), tensors)


def test_experts_that_are_not_given_stay_and_are_reported(
    moe: PreTrainedModel, mixtral: PreTrainedModel, mixtral_checkpoint: Path
) -> None:
    tensors = stored(mixtral_checkpoint)
    gone = [name for name in tensors if "layers.1" in name and "experts.2.w" in name]
    assert len(gone) == 3
    before = {name: tensor.clone() for name, tensor in hf_tensors(moe).items()}
    for name in gone:
        del tensors[name]
    assert sorted(moe.load_state_dict(tensors, strict=False).missing_keys) == sorted(gone)
    experts = "model.layers.1.mlp.experts"
    for name, tensor in hf_tensors(moe).items():
        expected = mixtral.state_dict()[name].clone()
        if name.startswith(experts):
            expected[2] = before[name][2]
        assert torch.equal(tensor, expected), name


def test_a_trainer_resumes_exactly(llama: PreTrainedModel, tensors: Tensors, tmp_path: Path) -> None:
    # `Trainer` loads what it saved with `load_state_dict(..., strict=False)`, under Hugging Face names.
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(16, 480, (8, 8))]

    def trained(folder: str, steps: int, resume: str | None = None) -> Tensors:
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(llama.config)
        if resume is None:
            model.load_state_dict(tensors)
        arguments = TrainingArguments(
            str(tmp_path / folder),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return {name: tensor.clone() for name, tensor in hf_tensors(model).items()}

    whole = trained("whole", 4)
    resumed = trained("resumed", 4, resume=str(tmp_path / "whole" / "checkpoint-2"))
    for name, tensor in whole.items():
        assert not torch.equal(tensor, tensors[name])
        torch.testing.assert_close(resumed[name], tensor, atol=1e-6, rtol=1e-5)


# What does not fit


def test_shapes_that_do_not_fit_are_listed(model: PreTrainedModel, tensors: Tensors) -> None:
    wrong = [PARTS[1], f"{ATTENTION}.v_proj.bias", "model.layers.1.mlp.up_proj.weight"]
    for name in wrong:
        tensors[name] = tensors[name][:-1]
    assert refused(model, tensors) == {("shape", name) for name in wrong}


def test_q_and_k_exchanged_under_grouped_query_attention_are_refused(model: PreTrainedModel, tensors: Tensors) -> None:
    # Together they have as many rows as they should.
    tensors[PARTS[0]], tensors[PARTS[1]] = tensors[PARTS[1]], tensors[PARTS[0]]
    assert refused(model, tensors) == {("shape", PARTS[0]), ("shape", PARTS[1])}


def test_a_combined_tensor_beside_its_parts_is_refused(model: PreTrainedModel, tensors: Tensors) -> None:
    name = f"{ATTENTION}.qkv_proj.weight"
    tensors[name] = model.state_dict()[name]
    assert refused(model, tensors) == {("duplicated", part) for part in PARTS}


def test_stacked_experts_beside_single_ones_are_refused(moe: PreTrainedModel, mixtral_checkpoint: Path) -> None:
    tensors = stored(mixtral_checkpoint)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = moe.state_dict()[name]
    experts = {f"model.layers.0.block_sparse_moe.experts.{index}.w2.weight" for index in range(4)}
    assert refused(moe, tensors) == {("duplicated", one) for one in experts}


def test_a_part_under_two_names_is_refused(vision: PreTrainedModel) -> None:
    model = AutoModelForImageTextToText.from_config(vision.config)
    tensors = dict(vision.state_dict())
    name = "language_model.model.layers.0.self_attn.k_proj.weight"
    tensors[name] = torch.zeros_like(tensors["model.language_model.layers.0.self_attn.k_proj.weight"])
    ((kind, subject),) = refused(model, tensors)
    assert kind == "duplicated"
    assert name in subject


def test_parts_that_need_scales_are_refused(model: PreTrainedModel, tensors: Tensors) -> None:
    tensors[PARTS[2]] = tensors[PARTS[2]].to(torch.int8)
    assert refused(model, tensors) == {("dtype", ", ".join(PARTS))}


def test_a_name_that_nobody_knows_is_torchs_to_report(model: PreTrainedModel, tensors: Tensors) -> None:
    names = ["extra.weight", f"{ATTENTION}.q_proj.scale", f"{ATTENTION}.qk_proj.weight"]
    tensors |= {name: torch.ones(1) for name in names}
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict(tensors)
    assert sorted(model.load_state_dict(tensors, strict=False).unexpected_keys) == sorted(names)
    assert_same(hf_tensors(model), {name: tensor for name, tensor in tensors.items() if name not in names})


# A model inside another module, and `assign`


class Wrapped(nn.Module):
    """As trainers put a value head on a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = model
        self.head = nn.Linear(256, 1)


@pytest.fixture
def wrapped(model: PreTrainedModel) -> Wrapped:
    return Wrapped(model)


def prefixed(tensors: Tensors, prefix: str = "pretrained.") -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def test_a_model_inside_another_module(wrapped: Wrapped, tensors: Tensors) -> None:
    head = {f"head.{name}": tensor.clone() for name, tensor in wrapped.head.state_dict().items()}
    assert not any(wrapped.load_state_dict(prefixed(tensors) | head))
    assert_same(hf_tensors(wrapped.pretrained), tensors)


def test_names_are_told_with_their_prefix(wrapped: Wrapped, tensors: Tensors) -> None:
    del tensors[PARTS[2]]
    given = prefixed(tensors)
    result = wrapped.load_state_dict(given, strict=False)
    assert set(result.missing_keys) == {"head.weight", "head.bias", f"pretrained.{PARTS[2]}"}
    given[f"pretrained.{PARTS[0]}"] = torch.ones(3)
    given[f"pretrained.{ATTENTION}.qkv_proj.weight"] = torch.ones(512, 256)
    with pytest.raises(StateDictError) as caught:
        wrapped.load_state_dict(given)
    assert problems(caught.value) == {
        ("shape", f"pretrained.{PARTS[0]}"),
        ("duplicated", f"pretrained.{PARTS[1]}"),
    }


def test_names_without_the_prefix_are_not_taken(wrapped: Wrapped, tensors: Tensors) -> None:
    before = snapshot(wrapped)
    result = wrapped.load_state_dict(tensors, strict=False)
    assert set(result.unexpected_keys) == set(tensors)
    assert_same(wrapped.state_dict(), before)


def test_two_models_side_by_side(llama: PreTrainedModel, mixtral: PreTrainedModel) -> None:
    pair = nn.ModuleDict(
        {name: AutoModelForCausalLM.from_config(one.config) for name, one in (("a", llama), ("b", mixtral))}
    )
    pair.load_state_dict(prefixed(llama.state_dict(), "a.") | prefixed(mixtral.state_dict(), "b."))
    assert_same(hf_tensors(pair["a"]), llama.state_dict())
    assert_same(hf_tensors(pair["b"]), mixtral.state_dict())


def test_assigning_keeps_parts_views_and_takes_the_dtype(model: PreTrainedModel, tensors: Tensors) -> None:
    given = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    model.load_state_dict(given, assign=True)
    assert_same(hf_tensors(model), given)
    attention = model.model.layers[0].self_attn
    assert (
        attention.v_proj.weight.untyped_storage().data_ptr() == attention.qkv_proj.weight.untyped_storage().data_ptr()
    )
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())


def test_assigning_to_a_model_on_meta(llama: PreTrainedModel, tensors: Tensors) -> None:
    model = AutoModelForCausalLM.from_config(llama.config, device="meta")
    model.load_state_dict(tensors, assign=True)
    assert_same(hf_tensors(model), tensors)


def test_some_parts_for_a_model_on_meta_are_refused(llama: PreTrainedModel, tensors: Tensors) -> None:
    # The others have no rows to keep: the combined tensor would stay on meta, and these be lost.
    model = AutoModelForCausalLM.from_config(llama.config, device="meta")
    with pytest.raises(StateDictError, match=PARTS[2].replace(".", r"\.")) as caught:
        model.load_state_dict({name: tensors[name] for name in PARTS[:2]}, strict=False, assign=True)
    assert problems(caught.value) == {("partial", f"{ATTENTION}.qkv_proj.weight")}


# Writing


@pytest.fixture
def same(model: PreTrainedModel, tensors: Tensors) -> PreTrainedModel:
    """`model` with `llama`'s weights."""
    model.load_state_dict(tensors)
    return model


def test_a_checkpoint_has_the_models_memory_under_hugging_face_names(same: PreTrainedModel, tensors: Tensors) -> None:
    written = to_checkpoint(same)
    assert_same(written, tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in same.state_dict().values()}
    inside = [tensor.data_ptr() for tensor in written.values()]
    assert written[PARTS[0]].data_ptr() in storages
    assert written[PARTS[1]].data_ptr() == same.model.layers[0].self_attn.k_proj.weight.data_ptr()
    assert len(set(inside)) == len(inside)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in written.values())  # as safetensors asks


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda name: name == f"{ATTENTION}.qkv_proj.weight", PARTS),
        (lambda name: name == "lm_head.weight", ["lm_head.weight"]),
        (lambda name: False, []),
    ],
)
def test_some_tensors_give_what_they_hold(
    same: PreTrainedModel, pick: Callable[[str], bool], expected: list[str], tensors: Tensors
) -> None:
    given = {name: tensor for name, tensor in same.state_dict().items() if pick(name)}
    assert_same(to_checkpoint(same, given), {name: tensors[name] for name in expected})


def test_names_that_transformers_does_not_save_are_left_out(same: PreTrainedModel) -> None:
    same._keys_to_ignore_on_save = {"model.norm.weight"}
    assert set(hf_tensors(same)) - set(to_checkpoint(same)) == {"model.norm.weight"}


def test_a_model_is_written_in_the_layout_it_was_read_from(mixtral: PreTrainedModel, tmp_path: Path) -> None:
    # With stacked experts, say, which is not the hub's layout.
    mixtral.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in stored(tmp_path / "stacked")
    ours, theirs = (of.from_pretrained(tmp_path / "stacked") for of in (AutoModelForCausalLM, type(mixtral)))
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(to_checkpoint(ours), stored(tmp_path / "theirs"))
    # A model that was read from nowhere is written as the hub has it.
    assert "model.layers.0.block_sparse_moe.experts.0.w2.weight" in to_checkpoint(
        AutoModelForCausalLM.from_config(mixtral.config)
    )


def test_a_state_dict_that_is_not_the_models_is_refused(same: PreTrainedModel, tensors: Tensors) -> None:
    with pytest.raises(StateDictError) as caught:
        to_checkpoint(same, {PARTS[0]: tensors[PARTS[0]], "model.norm.weight": torch.ones(2)})
    assert problems(caught.value) == {("unexpected", PARTS[0]), ("shape", "model.norm.weight")}
