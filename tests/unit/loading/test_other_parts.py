"""Checkpoints with other heads or towers than the loaded model, new heads, and state dicts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import WEIGHTS, assert_same, edit_config, edit_weights, hf_tensors, new_model, stored
from transformers import BertConfig, BitsAndBytesConfig, LlamaConfig, PreTrainedModel, T5Config
from transformers.models.auto import modeling_auto

from nrl_models import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CheckpointError,
    UnknownArgumentError,
    registry,
)
from nrl_models.errors import ConfigurationError, ProblemKind, StateDictError
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config

HIDDEN = 256


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """bert-base-uncased as published: two heads, of which `architectures` names one."""
    model = new_model(tiny_config(BertConfig), "ForPreTraining")
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForMaskedLM"])
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    new_model(tiny_config(LlamaConfig)).save_pretrained(tmp_path)
    return tmp_path


def base_model_state(folder: Path) -> dict[str, torch.Tensor]:
    """Load transformers' base model of a checkpoint."""
    return dict(transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).state_dict())


@pytest.mark.parametrize("architectures", [["BertForMaskedLM"], ["BertForPreTraining"], None])
def test_base_model_from_checkpoint_with_other_heads(bert: Path, architectures: list[str] | None) -> None:
    edit_config(bert, architectures=architectures)
    model, info = AutoModel.from_pretrained(bert, dtype=torch.float32, output_loading_info=True)
    assert_same(hf_tensors(model), base_model_state(bert))
    assert info["unexpected_keys"] == {name for name in stored(bert) if name.startswith("cls.")} != set()


@pytest.mark.parametrize("architectures", [["T5ForConditionalGeneration"], None])
def test_t5_base_model_and_classifier_from_untied_head(architectures: list[str] | None, tmp_path: Path) -> None:
    new_model(tiny_config(T5Config), "ForConditionalGeneration").save_pretrained(tmp_path)
    edit_weights(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones_like(tensors["shared.weight"])})
    )
    edit_config(tmp_path, architectures=architectures)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(hf_tensors(model), base_model_state(tmp_path))
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, new_head=True, output_loading_info=True
    )
    assert torch.equal(classifier.transformer.shared.weight, model.shared.weight)
    assert info["unexpected_keys"] == {"lm_head.weight"}


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ["LlamaForSequenceClassification"], None])
@pytest.mark.parametrize("heads", [["v_head.summary.weight", "v_head.summary.bias"], ["score.weight"]])
def test_base_model_from_value_or_reward_model(llama: Path, heads: list[str], architectures: Any) -> None:
    added = {name: torch.randn((1, HIDDEN) if name.endswith("weight") else (1,)) for name in heads}
    edit_weights(llama, lambda tensors: tensors.update(added))
    edit_config(llama, architectures=architectures)
    model = AutoModel.from_pretrained(llama, dtype=torch.float32)
    assert_same(hf_tensors(model), base_model_state(llama))


@pytest.mark.parametrize(
    "name", ["model.layers.9.mlp.up_proj.weight", "model.extra.weight", "encoder.layers.0.mlp.w.weight"]
)
def test_unused_base_model_weight_raises(llama: Path, name: str) -> None:
    edit_weights(llama, lambda tensors: tensors.update({name: torch.zeros(2, 2), "v_head.weight": torch.zeros(1, 2)}))
    with pytest.raises(CheckpointError, match=rf"unexpected: {name}") as raised:
        AutoModel.from_pretrained(llama)
    assert "v_head" not in str(raised.value)


# New heads


def test_reward_model_from_language_model(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The head is initialized as in transformers. All other weights come from the checkpoint."""
    with pytest.raises(CheckpointError, match=r"missing: score\.weight[\s\S]*new_head=True.*score\.weight"):
        AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1)
    with caplog.at_level(logging.WARNING):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            llama, num_labels=1, new_head=True, dtype=torch.float32, output_loading_info=True
        )
    assert info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == {"lm_head.weight"}
    assert "initialized score.weight" in caplog.text
    assert "lm_head" in caplog.text
    state = hf_tensors(model)
    head = state.pop("score.weight")
    assert head.std().item() == pytest.approx(model.config.initializer_range, rel=0.3)
    expected = stored(llama)
    del expected["lm_head.weight"]
    assert_same(state, expected)


def test_matching_head_is_loaded(llama: Path, tmp_path: Path) -> None:
    rewards = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=3, new_head=True)
    rewards.save_pretrained(tmp_path / "rewards")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rewards", num_labels=3, new_head=True)
    assert torch.equal(again.score.weight, rewards.score.weight)
    with pytest.raises(CheckpointError, match=r"score\.weight.*has shape \(3, 256\)[\s\S]*new_head=True"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "rewards", num_labels=2)
    other, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rewards", num_labels=2, new_head=True, output_loading_info=True
    )
    assert other.score.weight.shape == (2, HIDDEN)
    assert info["mismatched_keys"] == {("score.weight", torch.Size((3, HIDDEN)), torch.Size((2, HIDDEN)))}


@pytest.mark.parametrize("part", ["bert.pooler.dense", "bert.pooler.other", "bert.poolers.dense"])
def test_new_head_skips_pooler(bert: Path, part: str) -> None:
    """BERT's token classifiers have no pooler, which the published files have under the base model's prefix."""
    tensors = stored(bert)
    edit_weights(bert, lambda tensors: tensors.update({f"{part}.weight": torch.ones(HIDDEN, HIDDEN)}))

    def load() -> tuple[PreTrainedModel, dict[str, Any]]:
        return AutoModelForTokenClassification.from_pretrained(
            bert, num_labels=1, new_head=True, dtype=torch.float32, output_loading_info=True
        )

    if part != "bert.pooler.dense":
        with pytest.raises(CheckpointError, match=rf"unexpected: {part}\.weight") as raised:
            load()
        assert len(raised.value.problems) == 1
        assert "pass new_head" not in str(raised.value)
        return
    model, info = load()
    skipped = {name for name in tensors if name.startswith(("cls.", "bert.pooler."))}
    assert info["unexpected_keys"] == skipped
    state = {name: tensor for name, tensor in hf_tensors(model).items() if not name.startswith("classifier.")}
    assert_same(state, {name: tensor for name, tensor in tensors.items() if name not in skipped})


def test_new_head_still_requires_other_weights(llama: Path) -> None:
    edit_weights(llama, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"\(1 problem\)\n  - missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1, new_head=True)
    with pytest.raises(UnknownArgumentError, match="LlamaModel has no head"):
        AutoModel.from_pretrained(llama, new_head=True)


def test_mismatched_sizes(llama: Path) -> None:
    """As in transformers, the loading information lists the initialized tensors."""
    with pytest.raises(StateDictError, match=r"embed_tokens"):
        AutoModelForCausalLM.from_pretrained(llama, vocab_size=600)
    keywords: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True, "dtype": torch.float32}
    config = LlamaConfig.from_pretrained(llama, vocab_size=600)
    ours, info = AutoModelForCausalLM.from_pretrained(llama, vocab_size=600, **keywords)
    theirs, expected = transformers.AutoModelForCausalLM.from_pretrained(llama, config=config, **keywords)
    assert info["mismatched_keys"] == {tuple(mismatch) for mismatch in expected["mismatched_keys"]} != set()
    new = {name for name, *_ in info["mismatched_keys"]}
    state, other = hf_tensors(ours), theirs.state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {name: t.shape for name, t in other.items()}
    assert_same(
        {name: tensor for name, tensor in state.items() if name not in new},
        {name: tensor for name, tensor in other.items() if name not in new},
    )
    edit_weights(llama, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        AutoModelForCausalLM.from_pretrained(llama, vocab_size=600, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Gemma3ForCausalLM", "BertLMHeadModel"])
def test_mismatched_sizes_of_tied_embeddings(architecture: str, tmp_path: Path) -> None:
    model = FamilyCase(registry.model_class(architecture)).model()
    model.save_pretrained(tmp_path)
    size = model.config.vocab_size + 8
    with pytest.raises(CheckpointError) as raised:
        type(model).from_pretrained(tmp_path, vocab_size=size)
    assert {problem.kind for problem in raised.value.problems} == {ProblemKind.SHAPE}
    resized, info = type(model).from_pretrained(
        tmp_path, vocab_size=size, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert info["missing_keys"] == set()
    assert resized.get_output_embeddings().weight is resized.get_input_embeddings().weight
    assert len(resized.get_input_embeddings().weight) == size


@pytest.mark.parametrize(("count", "kind"), [(2, ProblemKind.UNEXPECTED), (8, ProblemKind.PARTIAL)])
def test_another_number_of_separate_experts_raises(count: int, kind: ProblemKind, mixtral_checkpoint: Path) -> None:
    """transformers stacks the experts first, and initializes the stacks."""
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1|experts\.2\.w1") as raised:
        AutoModelForCausalLM.from_pretrained(mixtral_checkpoint, num_local_experts=count, ignore_mismatched_sizes=True)
    assert {problem.kind for problem in raised.value.problems} == {kind}


# State dicts


def test_state_dict_argument(llama: Path) -> None:
    config, tensors = LlamaConfig.from_pretrained(llama), stored(llama)
    for path in (None, llama):
        model = AutoModelForCausalLM.from_pretrained(path, config=config, state_dict=tensors, dtype=torch.float32)
        assert_same(hf_tensors(model), tensors)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert tensors["model.norm.weight"].abs().sum() > 0  # the model holds copies


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), CheckpointError, r"missing: model\.norm\.weight"),
        (lambda tensors: tensors.update(x=torch.ones(2)), CheckpointError, r"unexpected: x"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), CheckpointError, r"has shape \(3,\)"),
        (lambda tensors: tensors.update(x=3), UnknownArgumentError, r"state_dict: x: expected complete, dense"),
        (lambda tensors: tensors.update(x=torch.ones(2, device="meta")), UnknownArgumentError, "state_dict: x"),
    ],
)
def test_mismatched_state_dict_raises(llama: Path, change: Any, error: type[Exception], message: str) -> None:
    tensors = stored(llama)
    change(tensors)
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(None, config=LlamaConfig.from_pretrained(llama), state_dict=tensors)


def test_path_none_requires_config_and_state_dict(llama: Path) -> None:
    for keywords in ({"config": LlamaConfig.from_pretrained(llama)}, {"state_dict": {}}, {}):
        with pytest.raises(UnknownArgumentError, match="pass both config= and state_dict="):
            AutoModelForCausalLM.from_pretrained(None, **keywords)


# Files and configurations


def test_stale_file_next_to_index(llama: Path) -> None:
    """Equal duplicate weights load. Different ones raise an error that names the file."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    transformers.AutoModelForCausalLM.from_pretrained(llama).save_pretrained(llama / "shards", max_shard_size="500KB")
    for file in (llama / "shards").glob("model*"):
        file.rename(llama / file.name)
    assert_same(hf_tensors(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)), hf_tensors(model))
    edit_weights(llama, lambda tensors: tensors["model.norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight.*{WEIGHTS}[\s\S]*remove {WEIGHTS}"):
        AutoModelForCausalLM.from_pretrained(llama)


def test_sliding_attention_requires_window_size(tmp_path: Path) -> None:
    config = tiny_config(transformers.Qwen2Config, {"layer_types": ["sliding_attention", "full_attention"]})
    new_model(config).save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=["sliding_attention", "full_attention"], sliding_window=None)
    with pytest.raises(ConfigurationError, match=r"sliding_window: is null[\s\S]*set sliding_window"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Text models of composite checkpoints


def composites() -> list[str]:
    """Architectures with towers whose configuration transformers maps to a causal LM of its text part."""
    architectures = []
    for name in registry.architectures(aliases=False):
        if registry.unmet_requirement(name):
            continue
        model_class: Any = registry.model_class(name)
        config_class = model_class.config_class
        text_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
        if text_class is None or text_class.__name__ == name or text_class.config_class is config_class:
            continue
        architectures.append(name)
    return architectures


@pytest.mark.long
@pytest.mark.parametrize("architecture", composites())
def test_text_model_from_composite_checkpoint(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = FamilyCase(registry.model_class(architecture), torch.device("cpu"))
    reference: PreTrainedModel = case.reference()
    reference.save_pretrained(tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"]:  # transformers initializes these
        with pytest.raises(CheckpointError, match="missing: "):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        return
    with caplog.at_level(logging.WARNING):
        ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert "does not have the checkpoint's other parts" in caplog.text
    assert_same(hf_tensors(ours), theirs.state_dict())
    ids = torch.arange(20, 36)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits, rtol=0, atol=1e-4)
    ours.save_pretrained(tmp_path / "text")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    assert_same(hf_tensors(saved), theirs.state_dict())


def test_composite_architectures_are_found() -> None:
    expected = {"Llama4ForConditionalGeneration", "MllamaForConditionalGeneration", "Qwen3_5ForConditionalGeneration"}
    assert {name for name in expected if not registry.unmet_requirement(name)} <= set(composites())


@pytest.mark.integrations
def test_quantized_reward_model_and_base_model(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("bitsandbytes")
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "output_loading_info": True}
    with pytest.raises(CheckpointError, match=r"(?s)missing: score\.weight.*new_head=True: it initializes score"):
        AutoModelForSequenceClassification.from_pretrained(llama, **options)
    model, info = AutoModelForSequenceClassification.from_pretrained(llama, new_head=True, num_labels=1, **options)
    assert model.score.weight.shape == (1, 256)
    assert info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == {"lm_head.weight"}
    assert "initialized score.weight" in caplog.text
    assert "heads lm_head" in caplog.text
    _, info = AutoModel.from_pretrained(llama, **options)
    assert info["unexpected_keys"] == {"lm_head.weight"}
    with pytest.raises(UnknownArgumentError, match="LlamaModel has no head"):
        AutoModel.from_pretrained(llama, new_head=True, **options)


CLASSIFIERS = {
    classifier: language_model
    for model_type, classifier in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.items()
    if (language_model := modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)) in registry.architectures()
    and classifier in registry.architectures()
}
"""For each registered classifier, a language model with the same configuration class."""


def test_classifiers_are_found() -> None:
    assert len(CLASSIFIERS) >= 20


@pytest.mark.long
@pytest.mark.parametrize("classifier", sorted(CLASSIFIERS))
def test_classifier_from_language_model(classifier: str, tmp_path: Path) -> None:
    case = FamilyCase(registry.model_class(CLASSIFIERS[classifier]))
    case.reference().save_pretrained(tmp_path)
    options = {"num_labels": 1, "output_loading_info": True}
    expected, expected_info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, **options)
    base_prefix = getattr(transformers, classifier).base_model_prefix
    if body := [name for name in expected_info["missing_keys"] if name.startswith(f"{base_prefix}.")]:  # a pooler
        with pytest.raises(CheckpointError, match=f"missing: .*{body[0].rpartition('.')[2]}"):
            AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, new_head=True)
        return
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, new_head=True, **options)
    assert type(model).__name__ == type(expected).__name__
    assert info["missing_keys"] == expected_info["missing_keys"] != set()
    assert info["unexpected_keys"] == expected_info["unexpected_keys"]
    state, theirs = hf_tensors(model), expected.state_dict()
    for name in expected_info["missing_keys"]:  # other random values of the same distribution
        deviations = [tensors.pop(name).std(correction=0).item() for tensors in (state, theirs)]
        assert deviations[0] == pytest.approx(deviations[1], rel=0.3)
    assert_same(state, theirs)


def test_advice_for_language_model_from_reward_model_works(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(llama, new_head=True, num_labels=1)
    assert "initialized score.weight." in caplog.text  # the next message lists what was skipped
    model.save_pretrained(tmp_path / "rewards")
    model.base_model.save_pretrained(tmp_path / "base")
    for name in ("rewards", "base"):
        with pytest.raises(CheckpointError, match=r"pass new_head=True: it initializes lm_head\.weight"):
            AutoModelForCausalLM.from_pretrained(tmp_path / name, tie_word_embeddings=False)
        AutoModelForCausalLM.from_pretrained(tmp_path / name, tie_word_embeddings=False, new_head=True)
    with pytest.raises(CheckpointError, match="leave out num_labels, which was passed") as caught:
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "rewards", num_labels=3)
    assert "different models" not in str(caught.value)
