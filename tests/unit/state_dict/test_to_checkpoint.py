"""`load_state_dict` of a live model accepts Hugging Face names, and saved files equal transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, hf_tensors, new_model, problems, stored
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from transformers import LlamaConfig, PreTrainedModel
from versions import since

from nrl_models import AutoModelForCausalLM, CheckpointError, StateDictError, registry
from nrl_models.common.projections import report
from nrl_models.common.state_dict.to_checkpoint import to_checkpoint
from nrl_models.testing.case import FamilyCase

ATTENTION = "model.layers.0.self_attn"
PARTS = [f"{ATTENTION}.{part}_proj.weight" for part in "qkv"]

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(llama: PreTrainedModel) -> PreTrainedModel:
    """Our Llama with the sizes of `llama` and other weights."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(llama.config, combine=True).eval()


@pytest.fixture
def tensors(llama: PreTrainedModel) -> Tensors:
    """transformers' state dict of `llama`. Tests may change it."""
    return {name: tensor.clone() for name, tensor in llama.state_dict().items()}


# Reading


def test_load_state_dict_keeps_parameters(model: PreTrainedModel, tensors: Tensors) -> None:
    parameters = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    assert not any(model.load_state_dict(tensors))
    assert_same(model.state_dict(), tensors)
    assert list(model.state_dict()) == list(tensors)
    after = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    assert after == parameters  # an optimizer holds them
    assert [group.joined for group in report(model)] == [True] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.pop(PARTS[1]),
        lambda tensors: tensors.update({f"{ATTENTION}.qkv_proj.weight": torch.zeros(512, 256)}),
        lambda tensors: tensors.update({PARTS[1]: tensors[PARTS[0]], PARTS[0]: tensors[PARTS[1]]}),
        lambda tensors: tensors.update({PARTS[2]: tensors[PARTS[2]].to(torch.int8)}),
        lambda tensors: tensors.update({PARTS[2]: tensors[PARTS[2]].bfloat16()}),
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name not in PARTS[:2]],
    ],
    ids=["missing", "fused name", "swapped", "integers", "bfloat16", "two parts"],
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_load_state_dict_result_matches_transformers(
    edit: Callable[[Tensors], object], strict: bool, tied: bool, llama: PreTrainedModel, tensors: Tensors
) -> None:
    """The names are the same, so torch reports the same messages as for transformers' class."""
    config = type(llama.config)(**llama.config.to_diff_dict() | {"tie_word_embeddings": tied})
    if tied:  # two different tensors for one raise an error
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    edit(tensors)
    results, models = [], []
    for reference in (new_model(config), AutoModelForCausalLM.from_config(config)):
        reference.load_state_dict(new_model(config, seed=2).state_dict())
        try:
            results.append(reference.load_state_dict(tensors, strict=strict))
        except RuntimeError as error:
            results.append(str(error))
        models.append(reference)
    assert results[1] == results[0]
    assert_same(models[1].state_dict(), models[0].state_dict())


def test_hub_names_load(mixtral: PreTrainedModel, mixtral_checkpoint: Path) -> None:
    """Trainer and accelerate load a checkpoint's file this way, also into a wrapped model."""
    tensors = stored(mixtral_checkpoint)
    assert not tensors.keys() <= mixtral.state_dict().keys()
    for strict in (True, False):
        model = AutoModelForCausalLM.from_config(mixtral.config)
        parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
        assert not any(model.load_state_dict(tensors, strict=strict))
        assert_same(model.state_dict(), mixtral.state_dict())
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    model = AutoModelForCausalLM.from_config(mixtral.config)
    nn.ModuleDict({"a": model}).load_state_dict({f"a.{name}": tensor for name, tensor in tensors.items()}, assign=True)
    assert_same(model.state_dict(), mixtral.state_dict())


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def test_partial_hub_state_dict_keeps_other_weights(mixtral: PreTrainedModel, mixtral_checkpoint: Path) -> None:
    """Each shard of a checkpoint is loaded separately. Experts of one stack may be in different shards."""
    tensors = stored(mixtral_checkpoint)
    model = AutoModelForCausalLM.from_config(mixtral.config)
    before = {name: tensor.clone() for name, tensor in model.state_dict_adapter.to_hf(model.state_dict()).items()}
    state_dict = {EXPERT: tensors[EXPERT], "model.norm.weight": tensors["model.norm.weight"]}
    result = model.load_state_dict(state_dict, strict=False)
    assert not result.unexpected_keys
    assert {EXPERT.replace("experts.1", "experts.0"), "lm_head.weight"} <= set(result.missing_keys)
    assert EXPERT not in result.missing_keys
    assert_same(model.state_dict_adapter.to_hf(model.state_dict()), before | state_dict)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*experts\.0\.w1"):
        model.load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda tensors: tensors.update({EXPERT: tensors[EXPERT].t()}), ("shape", EXPERT)),
        (lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}), ("dtype", None)),
        (lambda tensors: tensors.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 768, 256)}), None),
    ],
    ids=["shape", "dtype", "duplicated"],
)
def test_mismatched_hub_state_dict_raises_without_changes(
    edit: Callable[[Tensors], object],
    problem: tuple[str, str | None] | None,
    mixtral: PreTrainedModel,
    mixtral_checkpoint: Path,
) -> None:
    tensors = stored(mixtral_checkpoint)
    edit(tensors)
    model = AutoModelForCausalLM.from_config(mixtral.config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateDictError, match="does not fit the model") as caught:
        model.load_state_dict(tensors, strict=False)
    ((kind, subject),) = problems(caught.value)
    assert kind == ("duplicated" if problem is None else problem[0])
    assert problem is None or problem[1] in (None, subject)
    assert_same(model.state_dict(), before)


def test_load_state_dict_of_module_with_two_models(llama: PreTrainedModel, mixtral: PreTrainedModel) -> None:
    pair = nn.ModuleDict(
        {name: AutoModelForCausalLM.from_config(part.config) for name, part in (("a", llama), ("b", mixtral))}
    )
    state_dict = {f"a.{name}": tensor for name, tensor in llama.state_dict().items()}
    state_dict |= {f"b.{name}": tensor for name, tensor in mixtral.state_dict().items()}
    pair.load_state_dict(state_dict)
    assert_same(pair["a"].state_dict(), llama.state_dict())
    assert_same(pair["b"].state_dict(), mixtral.state_dict())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_state_dict_with_assign(
    device: str, llama: PreTrainedModel, tensors: Tensors, input_ids: torch.Tensor
) -> None:
    model = AutoModelForCausalLM.from_config(llama.config, device=device, combine=True).eval()
    model.load_state_dict({name: tensor.bfloat16() for name, tensor in tensors.items()}, assign=True)
    assert_same(model.state_dict(), {name: tensor.bfloat16() for name, tensor in tensors.items()})
    if device == "cpu":  # on meta, rotary embeddings are not computed
        expected = new_model(llama.config).eval()
        expected.load_state_dict({name: tensor.bfloat16() for name, tensor in tensors.items()}, assign=True)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids).logits, expected(input_ids).logits, atol=0.02, rtol=0.02)
    assert [group.joined for group in report(model)] == [True] * 4
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())


# Writing


@pytest.fixture
def same(model: PreTrainedModel, tensors: Tensors) -> PreTrainedModel:
    """`model` with the weights of `llama`."""
    model.load_state_dict(tensors)
    return model


def test_to_checkpoint_shares_memory(same: PreTrainedModel, tensors: Tensors) -> None:
    written = to_checkpoint(same)
    assert_same(written, tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in same.state_dict().values()}
    inside = [tensor.data_ptr() for tensor in written.values()]
    assert written[PARTS[0]].data_ptr() in storages
    assert written[PARTS[1]].data_ptr() == same.model.layers[0].self_attn.k_proj.weight.data_ptr()
    assert len(set(inside)) == len(inside)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in written.values())  # for safetensors


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda name: name in PARTS[:2], PARTS[:2]),
        (lambda name: name == "lm_head.weight", ["lm_head.weight"]),
        (lambda name: False, []),
    ],
)
def test_to_checkpoint_with_partial_state_dict(
    same: PreTrainedModel, pick: Callable[[str], bool], expected: list[str], tensors: Tensors
) -> None:
    state_dict = {name: tensor for name, tensor in same.state_dict().items() if pick(name)}
    assert_same(to_checkpoint(same, state_dict), {name: tensors[name] for name in expected})


def test_keys_to_ignore_on_save_are_skipped(same: PreTrainedModel) -> None:
    same._keys_to_ignore_on_save = {"model.norm.weight"}
    assert set(hf_tensors(same)) - set(to_checkpoint(same)) == {"model.norm.weight"}


@since("5.6")
def test_to_checkpoint_keeps_layout_of_loaded_checkpoint(mixtral: PreTrainedModel, tmp_path: Path) -> None:
    # For example with stacked experts, which the hub's layout does not have.
    mixtral.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in stored(tmp_path / "stacked")
    ours, theirs = (of.from_pretrained(tmp_path / "stacked") for of in (AutoModelForCausalLM, type(mixtral)))
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(to_checkpoint(ours), stored(tmp_path / "theirs"))
    # A model that was not loaded from a checkpoint is saved in the hub's layout.
    assert "model.layers.0.block_sparse_moe.experts.0.w2.weight" in to_checkpoint(
        AutoModelForCausalLM.from_config(mixtral.config)
    )


def test_to_checkpoint_with_mismatched_state_dict_raises(same: PreTrainedModel, tensors: Tensors) -> None:
    with pytest.raises(StateDictError) as caught:
        to_checkpoint(same, {"other": tensors[PARTS[0]], "model.norm.weight": torch.ones(2)})
    assert problems(caught.value) == {("unexpected", "other"), ("shape", "model.norm.weight")}


def test_hub_names_in_state_dict_raise_with_layout(mixtral: PreTrainedModel, mixtral_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral_checkpoint)
    with pytest.raises(StateDictError, match=r'names of the Hub checkpoint: use iter_export\(model, layout="transf'):
        to_checkpoint(model, dict(model.state_dict_adapter.iter_export(model)))


# Shapes


def test_saving_shapes_that_contradict_config_raises(same: PreTrainedModel, tmp_path: Path) -> None:
    embeddings = same.get_input_embeddings()
    embeddings.weight = nn.Parameter(torch.cat([embeddings.weight.detach(), torch.zeros(8, 256)]))
    for save in (to_checkpoint, lambda model: model.save_pretrained(tmp_path / "saved")):
        with pytest.raises(CheckpointError, match="its configuration gives") as caught:
            save(same)
        assert problems(caught.value) == {("shape", "model.embed_tokens.weight")}
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("DeepseekV4ForCausalLM", "model.layers.0.mlp.gate.tid2eid"), ("BltForCausalLM", None)],
)
def test_saving_incomplete_resize_raises(architecture: str, name: str | None, tmp_path: Path) -> None:
    model = registry.model_class(architecture).from_config(FamilyCase(registry.model_class(architecture)).config)
    model.save_pretrained(tmp_path / "before")
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 8)
    with pytest.raises(CheckpointError) as caught:
        model.save_pretrained(tmp_path / "after")
    assert {kind for kind, _ in problems(caught.value)} == {"shape"}
    assert name is None or ("shape", name) in problems(caught.value)


def test_resized_model_is_saved(same: PreTrainedModel, tmp_path: Path) -> None:
    same.resize_token_embeddings(520)
    same.save_pretrained(tmp_path)
    assert_same(stored(tmp_path), to_checkpoint(same))
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight) == 520


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[0].self_attn.q_proj, "weight", 0.5)


def normed(model: Any) -> None:
    weight_norm(model.model.layers[0].self_attn.q_proj)


def shallower(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def deeper(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def headless(model: Any) -> None:
    model.lm_head = nn.Identity()


@pytest.mark.parametrize(
    ("edit", "named", "text"),
    [
        (pruned, "model.layers.0.self_attn.q_proj.weight", "prune.remove"),
        (normed, "model.layers.0.self_attn.q_proj.weight", "remove_parametrizations"),
        (shallower, "model.layers.1.mlp.up_proj.weight", "its configuration has it"),
        (deeper, "model.layers.2.mlp.up_proj.weight", "in a layer that the configuration does not have"),
        (headless, "lm_head.weight", "its configuration has it"),
    ],
)
def test_saving_names_that_contradict_config_raises(
    edit: Callable[[Any], None], named: str, text: str, llama_config: LlamaConfig, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(llama_config)
    edit(model)
    with pytest.raises(CheckpointError, match=text) as caught:
        model.save_pretrained(tmp_path / "saved")
    assert named in {problem.subject for problem in caught.value.problems}
    assert not (tmp_path / "saved").exists()


def test_additional_modules_are_saved(llama_config: LlamaConfig, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(llama_config)
    model.v_head = nn.Linear(llama_config.hidden_size, 1)
    model.save_pretrained(tmp_path)
    assert "v_head.weight" in stored(tmp_path)


def share_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def share_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


@pytest.mark.parametrize("share", [share_layer, share_weight])
def test_weights_that_are_shared_by_hand(
    share: Callable[[Any], None], model: PreTrainedModel, llama: PreTrainedModel, tmp_path: Path
) -> None:
    theirs = copy.deepcopy(llama)
    for each in (theirs, model):
        share(each)
    with pytest.raises(RuntimeError, match="shared tensors"):
        theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(StateDictError, match=r"same tensor as model\.layers\.0\.mlp\.up_proj\.weight") as caught:
        model.save_pretrained(tmp_path / "ours")
    expected = {f"model.layers.1.{name}" for name, _ in llama.model.layers[1].named_parameters()}
    found = problems(caught.value)
    assert found == {("tied", name) for name in expected if share is share_layer or name.endswith("up_proj.weight")}
    assert not (tmp_path / "ours").exists()
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "ours", state_dict=state_dict)
    assert_same(stored(tmp_path / "ours"), hf_tensors(model))
