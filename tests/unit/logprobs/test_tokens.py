"""`token_logprobs` assigns each value to the right token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import prune
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.errors import UnknownArgumentError, UnknownOptionError
from nrl_models.logprobs import rollout_logprobs, token_logprobs
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.tiny import tiny_config

DOCUMENTS = (7, 12, 1, 9)
"""Lengths of the sequences, which are padded and packed."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig), dtype=torch.float32).eval()
    randomize(model)
    return model


@pytest.fixture(scope="module")
def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(16, 480, (size,), generator=generator) for size in DOCUMENTS]


def reference_logprobs(model: PreTrainedModel, document: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Compute log-probabilities of all tokens but the first from the model's logits, one document at a time."""
    with torch.no_grad():
        logs = (model(input_ids=document[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    return torch.stack([logs[place - 1, document[place]] for place in range(1, len(document))] or [logs.new_zeros(())])[
        : len(document) - 1
    ]


def test_logprobs_match_reference(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    for document in documents:
        result = token_logprobs(model, document[None])
        assert result.mask.tolist() == [[False] + [True] * (len(document) - 1)]
        assert result.logprobs[0, 0] == 0.0
        torch.testing.assert_close(result.logprobs[0, 1:], reference_logprobs(model, document), rtol=0, atol=1e-5)
        assert not result.outside.any()
        assert result.entropy is None
        assert result.kl is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model: PreTrainedModel, documents: list[torch.Tensor], side: str) -> None:
    size = max(DOCUMENTS)
    rows, mask = torch.zeros(len(documents), size, dtype=torch.long), torch.zeros(len(documents), size)
    places = [
        slice(size - len(document), size) if side == "left" else slice(0, len(document)) for document in documents
    ]
    for row, (place, document) in enumerate(zip(places, documents, strict=True)):
        rows[row, place], mask[row, place] = document, 1
    result = token_logprobs(model, rows, attention_mask=mask, temperature=0.7)
    for row, (place, document) in enumerate(zip(places, documents, strict=True)):
        assert result.mask[row].sum() == len(document) - 1
        scored = result.logprobs[row, place][1:]
        torch.testing.assert_close(scored, reference_logprobs(model, document, 0.7), rtol=0, atol=1e-5)
    assert not result.logprobs[~result.mask].any()


def test_packing(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    position_ids = torch.cat([torch.arange(len(document)) for document in documents])[None]
    result = token_logprobs(model, torch.cat(documents)[None], position_ids=position_ids)
    assert torch.equal(result.mask, position_ids > 0)
    expected = torch.cat([reference_logprobs(model, document) for document in documents])
    torch.testing.assert_close(result.logprobs[result.mask], expected, rtol=0, atol=1e-5)


def test_score_mask_selects_tokens(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    document = documents[1][None]
    score = torch.zeros_like(document, dtype=torch.bool)
    score[0, [0, 3, 4, 11]] = True
    result = token_logprobs(model, document, score=score, entropy=True)
    everything = token_logprobs(model, document, entropy=True)
    assert result.mask.nonzero()[:, 1].tolist() == [3, 4, 11]
    for ours, all_values in ((result.logprobs, everything.logprobs), (result.entropy, everything.entropy)):
        torch.testing.assert_close(ours[result.mask], all_values[result.mask], rtol=0, atol=1e-5)
        assert not ours[~result.mask].any()


def test_excluded_tokens_are_not_in_mask(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    document = documents[1][None]
    with torch.no_grad():
        top = model(input_ids=document).logits[0, :-1].topk(50).indices
    inside = (top == document[0, 1:, None]).any(-1)
    assert 0 < inside.sum() < len(inside)
    result = token_logprobs(model, document, top_k=50)
    assert torch.equal(result.mask[0, 1:], inside)
    assert torch.equal(result.outside[0, 1:], ~inside)
    assert result.logprobs.isfinite().all()
    assert (result.logprobs[0, 1:][inside] > reference_logprobs(model, document[0])[inside]).all()


def test_gradients_match_full_logits(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    document = documents[1][None]
    gradients = []
    for chunk_size in (5, None):
        model.zero_grad()
        result = token_logprobs(model, document, chunk_size=chunk_size, temperature=0.9, top_p=0.95, entropy=True)
        (result.logprobs.sum() + result.entropy.sum()).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    model.zero_grad()
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_kl_from_reference(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    document = documents[1][None]
    result = token_logprobs(model, document, reference=reference, temperature=0.8)
    with torch.no_grad():
        ours, theirs = ((computed(input_ids=document).logits / 0.8).log_softmax(-1) for computed in (model, reference))
    expected = (ours.exp() * (ours - theirs)).sum(-1)[0, :-1]
    torch.testing.assert_close(result.kl[0, 1:], expected, rtol=1e-4, atol=1e-5)
    same = token_logprobs(model, document, reference=model)
    assert same.kl.abs().max() < 1e-5
    result.kl.sum().backward()
    assert model.lm_head.weight.grad.any()
    assert reference.lm_head.weight.grad is None
    model.zero_grad()


@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 40}, {"top_p": 0.8, "top_k": 60}], ids=str)
@pytest.mark.parametrize("chunk_size", [5, None])
def test_kl_of_truncated_policy_from_complete_reference(
    model: PreTrainedModel, documents: list[torch.Tensor], truncation: dict[str, Any], chunk_size: int | None
) -> None:
    """The sum is over the tokens that the policy can sample. The reference is not renormalized to them."""
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    document = documents[1][None]
    result = token_logprobs(model, document, reference=reference, temperature=0.8, chunk_size=chunk_size, **truncation)
    with torch.no_grad():
        logits, theirs = (computed(input_ids=document).logits[0, :-1] / 0.8 for computed in (model, reference))
    ordered = logits.sort(descending=True)
    cut = torch.zeros_like(logits, dtype=torch.bool)
    cut[:, truncation.get("top_k", logits.shape[-1]) :] = True
    probabilities = ordered.values.masked_fill(cut, -torch.inf).softmax(-1)
    cut |= probabilities.cumsum(-1) - probabilities >= truncation.get("top_p", 1.0)
    kept = torch.ones_like(cut).scatter(1, ordered.indices, ~cut)
    assert 1 < kept.sum(-1).min() < logits.shape[-1]
    ours = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    expected = (ours.exp() * (ours - theirs.log_softmax(-1))).masked_fill(~kept, 0.0).sum(-1)
    torch.testing.assert_close(result.kl[0, 1:], expected, rtol=1e-4, atol=1e-5)


def test_reference_with_other_vocabulary_size_raises(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    other = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig, {"vocab_size": 500}))
    with pytest.raises(ValueError, match="vocabulary of 512 and the reference one of 500"):
        token_logprobs(model, documents[0][None], reference=other)


HEADS = {
    "plain": None,
    "lora": LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False),
    "modules_to_save": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
}


@pytest.mark.parametrize("ours", HEADS)
@pytest.mark.parametrize("theirs", HEADS)
def test_kl_with_peft_on_output_embedding(
    model: PreTrainedModel, documents: list[torch.Tensor], ours: str, theirs: str
) -> None:
    pair = []
    for seed, kind in enumerate((ours, theirs)):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
        pair.append(base if HEADS[kind] is None else get_peft_model(base, copy.deepcopy(HEADS[kind])).eval())
    policy, reference = pair
    document = documents[1][None]
    with torch.no_grad():
        logs, others = (computed(input_ids=document).logits.log_softmax(-1) for computed in pair)
    expected = (logs.exp() * (logs - others)).sum(-1)[0, :-1]
    result = token_logprobs(policy, document, reference=reference, loss=lambda result: result.kl.sum(), chunk_size=5)
    torch.testing.assert_close(result.kl[0, 1:], expected, rtol=1e-4, atol=1e-5)
    result.loss.backward()
    assert any(parameter.grad is not None for name, parameter in policy.named_parameters() if "lm_head" in name)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_no_scored_tokens_with_lora_on_output_embedding(model: PreTrainedModel) -> None:
    base = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    adapted = get_peft_model(base, HEADS["lora"])
    result = token_logprobs(adapted, torch.tensor([[16]]))
    assert result.logprobs.tolist() == [[0.0]]
    assert not result.mask.any()


def test_mask_with_holes_matches_transformers(
    llama: PreTrainedModel, model: PreTrainedModel, documents: list[torch.Tensor]
) -> None:
    """Positions count tokens, as in `generate` and OpenRLHF. The text before a hole is part of the sequence."""
    ids = documents[1][None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, 1] = mask[1, 3:5] = 0
    positions = (mask.cumsum(-1) - 1) * mask
    ours = AutoModelForCausalLM.from_config(llama.config, dtype=torch.float32).eval()
    ours.load_state_dict(llama.state_dict())
    with torch.no_grad():
        logits = llama(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        scored = mask.bool() & torch.nn.functional.pad(mask[:, :-1].bool(), (1, 0))
        torch.testing.assert_close(
            ours(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()], logits[mask.bool()]
        )
    expected = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][scored[:, 1:]]
    for keywords in ({}, {"position_ids": positions}):
        for terms in ("token", "sequence"):
            result = token_logprobs(
                ours, ids, attention_mask=mask, loss=lambda result: result.logprobs.sum(), loss_terms=terms, **keywords
            )
            assert torch.equal(result.mask, scored)
            torch.testing.assert_close(result.logprobs[result.mask], expected, rtol=0, atol=1e-5)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "use_cache": False}
    assert torch.equal(ours.generate(ids, **options), llama.generate(ids, **options))


@pytest.mark.parametrize(
    "architecture", ["Qwen2_5_VLForConditionalGeneration", "RecurrentGemmaForCausalLM", "GPT2LMHeadModel"]
)
def test_mask_with_holes_uses_positions_of_generate(architecture: str) -> None:
    case = FamilyCase(registry.model_class(architecture))
    ids = case.inputs(length=12, images=False)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 1] = mask[1, 3] = mask[1, 5:7] = 0
    positions = (mask.cumsum(-1) - 1) * mask
    with torch.no_grad():
        logits = case.reference()(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        result = token_logprobs(case.model(), ids, attention_mask=mask)
    expected = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    scored = result.mask[:, 1:]
    torch.testing.assert_close(result.logprobs[:, 1:][scored], expected[scored], rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["RobertaForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_model_computed_positions(architecture: str, side: str) -> None:
    case = FamilyCase(registry.model_class(architecture))
    inputs = case.inputs(length=16)
    pad = case.config.get_text_config().pad_token_id or 0

    def padded(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (3, 0) if side == "left" else (0, 3), value=value)

    ids = inputs.pop("input_ids")
    more = {name: padded(value) if value.shape == ids.shape else value for name, value in inputs.items()}
    with torch.no_grad():
        alone = token_logprobs(case.model(), ids, **inputs).logprobs[:, 1:]
        result = token_logprobs(case.model(), padded(ids, pad), attention_mask=padded(torch.ones_like(ids)), **more)
    torch.testing.assert_close(result.logprobs[result.mask], alone.flatten(), rtol=0, atol=1e-4)


def test_lora(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    """Trained LoRA weights apply, also on the output embedding. Only they receive gradients."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).eval()
    document = documents[1][None]
    result = token_logprobs(adapted, document)
    torch.testing.assert_close(result.logprobs[0, 1:], reference_logprobs(adapted, document[0]), rtol=0, atol=1e-5)
    result.logprobs.sum().backward()
    assert {"lora_" in name for name, parameter in adapted.named_parameters() if parameter.grad is not None} == {True}


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "score"])
def test_mismatched_shapes_raise(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        token_logprobs(model, torch.zeros(2, 8, dtype=torch.long), **{name: torch.ones(2, 9, dtype=torch.long)})


@pytest.mark.parametrize("options", [{"chunk_size": "large"}, {"chunk_size": 0}, {"loss_terms": "row"}], ids=str)
def test_unknown_options_raise(model: PreTrainedModel, options: dict[str, object]) -> None:
    ((name, value),) = options.items()
    for call, ids in ((token_logprobs, torch.tensor([[16, 17]])), (rollout_logprobs, [[16, 17]])):
        with pytest.raises(UnknownOptionError, match=f"{name}={value!r}: expected"):
            call(model, ids, **options)


@pytest.mark.parametrize("chunk_size", ["auto", None])
@pytest.mark.parametrize(
    "keywords",
    [{"use_cache": False}, {"use_cache": None}, {"logits_to_keep": 0}, {"min_p": 0.0, "repetition_penalty": 1.0}],
    ids=str,
)
def test_keywords_without_effect_are_accepted(
    model: PreTrainedModel, documents: list[torch.Tensor], keywords: dict[str, object], chunk_size: str | None
) -> None:
    expected = token_logprobs(model, documents[0][None], chunk_size=chunk_size)
    result = token_logprobs(model, documents[0][None], chunk_size=chunk_size, reference=model, **keywords)
    assert torch.equal(result.logprobs, expected.logprobs)


@pytest.mark.parametrize("chunk_size", ["auto", None])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"use_cache": True}, "use_cache=True.*no cache"),
        ({"past_key_values": DynamicCache()}, "past_key_values.*complete sequences"),
        ({"labels": torch.zeros(1, 7, dtype=torch.long)}, "labels.*no loss"),
        ({"logits_to_keep": 3}, "logits_to_keep=3.*score"),
        ({"min_p": 0.1}, "min_p.*after temperature, top_k and top_p only"),
        ({"repetition_penalty": 1.3}, "repetition_penalty.*after temperature, top_k and top_p only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_keywords_raise(
    model: PreTrainedModel,
    documents: list[torch.Tensor],
    keywords: dict[str, object],
    message: str,
    chunk_size: str | None,
) -> None:
    with pytest.raises(UnknownArgumentError, match=message):
        token_logprobs(model, documents[0][None], chunk_size=chunk_size, **keywords)


def test_single_token_sequences(model: PreTrainedModel) -> None:
    result = token_logprobs(model, torch.full((3, 1), 17))
    assert not result.mask.any()
    assert result.logprobs.tolist() == [[0.0]] * 3


@pytest.mark.parametrize(
    "hook",
    [lambda head: prune.l1_unstructured(head, "weight", 0.2), nn.utils.weight_norm],
    ids=["prune", "weight_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_hook_computed_weight_gets_gradients(
    model: PreTrainedModel, documents: list[torch.Tensor], hook: Callable[[nn.Module], object]
) -> None:
    model = copy.deepcopy(model)
    hook(model.lm_head)
    ids = documents[1][None]
    model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)[range(11), ids[0, 1:]].sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _ in range(2):  # the first call compares the head with the model's logits
        model.zero_grad()
        token_logprobs(model, ids).logprobs.sum().backward()
        result = {name: parameter.grad for name, parameter in model.named_parameters()}
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_hooks_run_for_probe_and_batch(model: PreTrainedModel, documents: list[torch.Tensor]) -> None:
    model, shapes = copy.deepcopy(model), []
    model.model.layers[0].mlp.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape[:2])))
    token_logprobs(model, documents[1][None])
    assert shapes == [(1, 4), (1, 12)]
