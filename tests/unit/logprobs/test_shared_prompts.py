"""`rollout_logprobs` computes a shared prompt once, with the values and gradients of separate sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.common.documents import attention, masks
from nrl_models.common.documents.boundaries import Documents, sharing_prompts
from nrl_models.common.forward.routing import record_routing
from nrl_models.logprobs import TokenLogprobs, rollout_logprobs, token_logprobs, tokens
from nrl_models.logprobs.accumulation import MicrobatchInputs
from nrl_models.logprobs.microbatches import Microbatch
from nrl_models.logprobs.shared_prompts import can_share_prompts
from nrl_models.losses import dpo_loss, policy_loss, sequence_logprobs
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.features import suite
from nrl_models.testing.tiny import tiny_config

WIDE = torch.float64

LENGTHS = (24, 17, 20, 14, 22, 19, 12, 9)
PROMPTS = (13, 13, 13, 13, 9, 9, 9, 3)
"""Prompt lengths: four rollouts of one prompt, three of another, and one whose common prefix is too short."""

COMPUTED = [13 + 11 + 4 + 7 + 1, 9 + 13 + 10 + 3, 9]

Loss = Callable[[TokenLogprobs], torch.Tensor]


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(16, 480, (length,), generator=generator) for length in LENGTHS]
    for first, group in ((0, (1, 2, 3)), (4, (5, 6)), (4, (7,))):
        for number in group:
            rows[number][: PROMPTS[number]] = rows[first][: PROMPTS[number]]
    order = [4, 0, 7, 2, 5, 1, 3, 6]  # groups are found among others
    return [rows[number] for number in order]


SCORE = [torch.arange(LENGTHS[number]) >= PROMPTS[number] for number in (4, 0, 7, 2, 5, 1, 3, 6)]
SAMPLED = pad_sequence(SCORE, batch_first=True)
OLD, REFERENCE = -8 * torch.rand(2, *SAMPLED.shape, generator=torch.Generator().manual_seed(1), dtype=WIDE)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0, 0.7, 1.5, -1.0, 0.3], dtype=WIDE)


def tiny_model(
    config_class: Any = LlamaConfig, dtype: torch.dtype = WIDE, seed: int = 0, **values: Any
) -> PreTrainedModel:
    torch.manual_seed(seed)
    options = {name: values.pop(name) for name in ("attn_implementation",) if name in values}
    model = AutoModelForCausalLM.from_config(tiny_config(config_class, values), dtype=dtype, **options).eval()
    randomize(model)
    return model


def grpo(result: TokenLogprobs) -> torch.Tensor:
    return policy_loss(result.logprobs, OLD, ADVANTAGES, SAMPLED / SAMPLED.sum(), reference=REFERENCE, kl=0.1)


def sequence_loss(result: TokenLogprobs) -> torch.Tensor:
    return (result.logprobs.sum(1) / 9).exp().mean()


def coupled_loss(result: TokenLogprobs) -> torch.Tensor:
    return (result.logprobs.sum() / 40).exp() + result.logprobs.square().mean()


def with_entropy(result: TokenLogprobs) -> torch.Tensor:
    assert result.entropy is not None
    assert result.kl is not None
    return grpo(result) - 0.01 * (result.entropy * ADVANTAGES[:, None]).sum() + result.kl.mean()


def preference(result: TokenLogprobs) -> torch.Tensor:
    chosen, rejected = sequence_logprobs(result.logprobs, result.mask).chunk(2)
    return dpo_loss(chosen, rejected, torch.full_like(chosen, -9.0), torch.full_like(chosen, -10.0))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def differences(model: nn.Module, sequences: list[torch.Tensor], loss: Loss, **options: Any) -> tuple[float, float]:
    """Return the largest differences of statistics and of gradients from sequences without shared prompts."""
    expected = rollout_logprobs(model, sequences, loss=loss, share_prompts=False, **options)
    wanted = gradients_of(model)
    result = rollout_logprobs(model, sequences, loss=loss, **options)
    actual = gradients_of(model)
    assert torch.equal(result.mask, expected.mask)
    assert torch.equal(result.outside, expected.outside)
    assert actual.keys() == wanted.keys()
    values = []
    for name in ("logprobs", "entropy", "kl", "loss"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            values.append((ours - theirs).abs().max().item())
    scale = max(gradient.abs().max().item() for gradient in wanted.values())
    return max(values), max((actual[name] - wanted[name]).abs().max().item() for name in wanted) / scale


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the microbatches."""
    seen: list[int] = []
    make = MicrobatchInputs.of

    def watched(batch: Any, part: Microbatch, layout: Any) -> MicrobatchInputs:
        seen.append(part.tokens)
        return make(batch, part, layout)

    monkeypatch.setattr(MicrobatchInputs, "of", watched)
    return seen


CASES: Mapping[str, tuple[Loss, dict[str, Any]]] = {
    "grpo": (grpo, {"score": SCORE}),
    "scored prompts": (lambda result: (result.logprobs * OLD).sum(), {}),
    "sequences": (sequence_loss, {"score": SCORE, "loss_terms": "sequence"}),
    "sequences with scored prompts": (sequence_loss, {"loss_terms": "sequence"}),
    "all together": (coupled_loss, {}),
    "pairs": (preference, {"score": SCORE, "loss_terms": torch.arange(4).repeat(2)}),
    "entropy and divergence": (with_entropy, {"score": SCORE, "entropy": True}),
    "truncated": (grpo, {"score": SCORE, "top_k": 300, "top_p": 0.95, "temperature": 0.7}),
    "full logits": (grpo, {"score": SCORE, "chunk_size": None}),
    "short rows": (grpo, {"score": SCORE, "row_tokens": 32}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_shared_prompt_losses(name: str, sequences: list[torch.Tensor]) -> None:
    loss, options = CASES[name]
    if name == "entropy and divergence":
        options = options | {"reference": tiny_model(seed=1).requires_grad_(False)}
    values, gradients = differences(tiny_model(), sequences, loss, **options)
    assert values < 1e-6
    assert gradients < 1e-6


def test_values_match_separate_forwards(sequences: list[torch.Tensor]) -> None:
    model = tiny_model()
    result = rollout_logprobs(model, sequences)
    for row, sequence in enumerate(sequences):
        alone = token_logprobs(model, sequence[None]).logprobs[0]
        torch.testing.assert_close(result.logprobs[row, : len(sequence)], alone.detach(), rtol=0, atol=1e-6)


def test_identical_sequences() -> None:
    assert (
        max(differences(tiny_model(), [torch.arange(16, 36)] * 3, lambda result: result.logprobs.square().sum())) < 1e-6
    )


MODELS: Mapping[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 5},
    "Gemma2ForCausalLM": {"sliding_window": 5},  # soft caps, and masks for two kinds of layers
    "Gemma3ForCausalLM": {"sliding_window": 5},
    "GptOssForCausalLM": {"sliding_window": 5},  # sinks
    "DeepseekV3ForCausalLM": {},  # latent attention
    "Qwen3MoeForCausalLM": {},
    "Llama4ForCausalLM": {"attention_chunk_size": 6},
    "Qwen2VLForConditionalGeneration": {},  # positions in three dimensions
    "NemotronHForCausalLM": {},  # Mamba-2 layers run the prompt for each rollout
    "Qwen3NextForCausalLM": {},  # linear attention
    "Lfm2ForCausalLM": {},  # short convolutions
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (WIDE, 1e-6)], ids=["fp32", "fp64"])
def test_shared_prompts_by_architecture(
    name: str, dtype: torch.dtype, bound: float, sequences: list[torch.Tensor], computed: list[int]
) -> None:
    model = FamilyCase(registry.model_class(name), tiny=MODELS[name]).model(dtype)
    if dtype == WIDE and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch has no grouped matmul in fp64
    values, gradients = differences(model, sequences, grpo, score=SCORE, row_tokens=48)
    assert values < 2 * bound
    assert gradients < 2 * bound
    assert sum(computed) == sum(LENGTHS) + sum(COMPUTED)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention: str, sequences: list[torch.Tensor]) -> None:
    model = tiny_model(MistralConfig, sliding_window=5, attn_implementation=attention)
    assert can_share_prompts(model)
    assert max(differences(model, sequences, grpo, score=SCORE)) < 1e-6


def test_activation_checkpointing(sequences: list[torch.Tensor]) -> None:
    model = tiny_model(MistralConfig, sliding_window=5).train()
    model.gradient_checkpointing_enable()
    assert max(differences(model, sequences, grpo, score=SCORE)) < 1e-6


def test_compiled_layers(sequences: list[torch.Tensor]) -> None:
    model = tiny_model()
    expected = rollout_logprobs(model, sequences, share_prompts=False).logprobs
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(rollout_logprobs(model, sequences).logprobs, expected, rtol=0, atol=1e-6)


# Bugs that the comparison must detect


def let_completions_attend_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_continuing", lambda *_: lambda batch, head, query, key: key <= query)


def count_window_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    right = masks._continuing

    def wrong(documents: Documents, window: int | None, device: Any) -> Any:
        sees = right(documents, None, device)
        return lambda batch, head, query, key: sees(batch, head, query, key) & (key > query - (window or 10**6))

    monkeypatch.setattr(masks, "_continuing", wrong)


def shift_window_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._causal

    def wrong(query: Any, key: Any, value: Any, *, window: int | None, **options: Any) -> Any:
        continues = key.shape[2] > query.shape[2]
        return right(query, key, value, window=window + 1 if window and continues else window, **options)

    monkeypatch.setattr(attention, "_causal", wrong)


def score_first_tokens_from_previous_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "columns_before", lambda positions: torch.arange(positions.shape[1])[None] - 1)


def shift_positions_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = MicrobatchInputs.of

    def wrong(batch: Any, part: Microbatch, layout: Any) -> MicrobatchInputs:
        result = right(batch, part, layout)
        positions = result.inputs.get("position_ids")
        if positions is not None:
            documents = (positions[0].diff(prepend=torch.tensor([-1])) != 1).cumsum(0)
            for document in documents.unique():
                own = documents == document
                positions[0, own] += int(positions[0, own][0] > 0)
        return result

    monkeypatch.setattr(MicrobatchInputs, "of", wrong)


@pytest.mark.parametrize(
    ("plant", "attention"),
    [
        (let_completions_attend_to_each_other, "eager"),
        (count_window_in_columns, "eager"),
        (shift_window_by_one, "sdpa"),
        (score_first_tokens_from_previous_column, "sdpa"),
        (shift_positions_by_one, "sdpa"),
    ],
)
def test_comparison_detects_injected_bugs(
    plant: Callable[[pytest.MonkeyPatch], None],
    attention: str,
    sequences: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(MistralConfig, sliding_window=5, attn_implementation=attention)
    assert max(differences(model, sequences, grpo, score=SCORE)) < 1e-6
    plant(monkeypatch)
    assert min(differences(model, sequences, grpo, score=SCORE)) > 1e-4


# Cases without shared prompts


def test_dropout_disables_sharing() -> None:
    model = tiny_model(attention_dropout=0.3)
    assert can_share_prompts(model)
    assert not can_share_prompts(model.train())
    assert can_share_prompts(tiny_model().train())
    model = tiny_model()
    model.model.embed_tokens.dropout = nn.Dropout(0.1).eval()
    assert can_share_prompts(model)
    assert not can_share_prompts(model.train())


def test_recorded_routing_disables_sharing(sequences: list[torch.Tensor], computed: list[int]) -> None:
    model = FamilyCase(registry.model_class("Qwen3MoeForCausalLM")).model()
    with record_routing(model):
        rollout_logprobs(model, sequences)
    assert sum(computed) == sum(LENGTHS)
    rollout_logprobs(model, sequences)
    assert sum(computed) == sum(LENGTHS) + sum(COMPUTED)


def test_unsupported_models_do_not_share() -> None:
    assert not can_share_prompts(LlamaForCausalLM(tiny_config(LlamaConfig)))
    for name in (
        "BloomForCausalLM",
        "BartForCausalLM",
        "DeepseekV32ForCausalLM",
        "GitForCausalLM",
        "GPTNeoForCausalLM",
    ):
        assert not can_share_prompts(FamilyCase(registry.model_class(name)).model())
    assert not can_share_prompts(FamilyCase(registry.model_class("FalconForCausalLM"), tiny={"alibi": True}).model())
    assert not can_share_prompts(tiny_model(), LlamaForCausalLM(tiny_config(LlamaConfig)))
    model = tiny_model()
    for name in ("one of another library", "flex_attention"):
        model.config._attn_implementation = name
        assert not can_share_prompts(model)


@pytest.mark.parametrize(
    ("name", "tiny"),
    [
        ("BloomForCausalLM", {}),
        ("DeepseekV32ForCausalLM", {}),
        ("FalconForCausalLM", {"alibi": True}),  # not a limit of the class, but of this configuration
        ("GitForCausalLM", {}),
        ("GPTNeoForCausalLM", {"window_size": 5}),
        ("InklingForCausalLM", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declared_limits_are_required(name: str, tiny: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ValueError), match=r"not close|cannot share a prompt"):
        suite()["test_shared_prompts"](FamilyCase(registry.model_class(name), tiny=tiny))


def test_unsupported_mask_raises() -> None:
    model = FamilyCase(registry.model_class("GitForCausalLM")).model()
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]])
    with sharing_prompts(), pytest.raises(ValueError, match="cannot share a prompt"):
        model(input_ids=positions + 16, position_ids=positions)


def test_share_prompts_false(sequences: list[torch.Tensor], computed: list[int]) -> None:
    rollout_logprobs(tiny_model(), sequences, share_prompts=False)
    assert sum(computed) == sum(LENGTHS)
