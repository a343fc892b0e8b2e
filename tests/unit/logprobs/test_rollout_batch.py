"""`rollout_logprobs` equals one sequence per forward, for any number of microbatches: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import TokenLogprobs, rollout_logprobs, token_logprobs
from nrl_models.losses import Normalize, dpo_loss, policy_loss, sequence_logprobs, token_weights
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.tiny import tiny_config

LENGTHS = (7, 12, 1, 9, 3, 11, 5, 10)
PROMPT = 3
BUDGET = 24
"""Tokens per row. Packed, the sequences need three rows."""

WIDE = torch.float64

STRICT, TWO_PASS = 1e-11, 1e-6
"""Bounds in fp64. Norms compute in fp32, and a gradient computed in two parts is rounded twice."""


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(16, 480, (length,), generator=generator) for length in LENGTHS]


SCORE = [[place >= PROMPT for place in range(length)] for length in LENGTHS]
SAMPLED = pad_sequence([torch.tensor(row) for row in SCORE], batch_first=True)
OLD, REFERENCE = -8 * torch.rand(2, *SAMPLED.shape, generator=torch.Generator().manual_seed(1), dtype=WIDE)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0, 0.7, 1.5, -1.0, 0.3], dtype=WIDE)

Loss = Callable[[TokenLogprobs], torch.Tensor]


def tiny_llama(dtype: torch.dtype = WIDE, seed: int = 0, **values: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig, values), dtype=dtype).eval()
    randomize(model)
    return model


def policy(normalize: Normalize, longest: int | None = None, **options: Any) -> Loss:
    weights = token_weights(SAMPLED, normalize, longest)

    def loss(result: TokenLogprobs) -> torch.Tensor:
        return policy_loss(result.logprobs, OLD, ADVANTAGES, weights * result.mask, eps_high=0.28, **options)

    return loss


def with_entropy_and_divergence(result: TokenLogprobs) -> torch.Tensor:
    assert result.entropy is not None
    assert result.kl is not None
    kept = policy(Normalize.TOKEN, reference=REFERENCE, kl=0.1)(result)
    return kept - 0.01 * result.entropy.sum() / result.mask.sum() + (result.kl * ADVANTAGES[:, None]).mean()


def preference(result: TokenLogprobs) -> torch.Tensor:
    chosen, rejected = sequence_logprobs(result.logprobs, result.mask).chunk(2)
    return dpo_loss(chosen, rejected, torch.full_like(chosen, -9.0), torch.full_like(chosen, -10.0))


def coupled_loss(result: TokenLogprobs) -> torch.Tensor:
    """A loss whose derivatives depend on every log-probability."""
    return (result.logprobs.sum() / 40).exp() + result.logprobs.square().mean()


PAIRS = torch.arange(4).repeat(2)

LOSSES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "grpo": (policy(Normalize.SEQUENCE), {}),
    "dapo": (policy(Normalize.TOKEN), {}),
    "dr_grpo": (policy(Normalize.LONGEST, 16), {}),
    "entropy and divergence": (with_entropy_and_divergence, {"entropy": True}),
    "pairs": (preference, {"loss_terms": PAIRS}),
    "sequences": (lambda result: (result.logprobs.sum(1) / 9).exp().mean(), {"loss_terms": "sequence"}),
}


class Forwards:
    """Count a model's forward passes, and record the shapes of their inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.handle = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))

    def __enter__(self) -> Forwards:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def separate_forwards(model: nn.Module, sequences: Sequence[torch.Tensor], loss: Loss, **options: Any) -> TokenLogprobs:
    """A simple reference: one forward per sequence with the model's logits, and one loss over all of them."""
    options.pop("loss_terms", None)
    result = [
        token_logprobs(model, row[None], score=torch.tensor(mask)[None], chunk_size=None, **options)
        for row, mask in zip(sequences, SCORE, strict=True)
    ]

    def grid(name: str) -> torch.Tensor | None:
        rows = [getattr(each, name) for each in result]
        return None if rows[0] is None else pad_sequence([row[0] for row in rows], batch_first=True)

    whole: Any = {name: grid(name) for name in ("logprobs", "mask", "outside", "entropy", "kl")}
    return replace(TokenLogprobs(**whole), loss=loss(TokenLogprobs(**whole)))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_equal_runs(
    model: nn.Module, sequences: Sequence[torch.Tensor], loss: Loss, bound: float, **options: Any
) -> None:
    """Compare `rollout_logprobs` with one forward per sequence. Gradients agree to `bound` of their largest value."""
    expected = separate_forwards(model, sequences, loss, **options)
    assert expected.loss is not None
    expected.loss.backward()
    wanted = gradients_of(model)
    result = rollout_logprobs(model, sequences, score=SCORE, loss=loss, row_tokens=BUDGET, **options)
    actual = gradients_of(model)
    for name in ("logprobs", "entropy", "kl", "loss"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert not ours.requires_grad
            torch.testing.assert_close(ours, theirs.detach().to(ours), rtol=bound, atol=bound, msg=name)
    assert torch.equal(result.mask, expected.mask)
    assert torch.equal(result.outside, expected.outside)
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if name.endswith("k_proj.bias"):
            continue  # the softmax cancels it, so its gradient is only rounding
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=bound * gradient.abs().max().item(), msg=name)


CASES = {
    "LlamaForCausalLM": "packed",
    "Qwen3MoeForCausalLM": "packed",  # a mixture of experts
    "Lfm2ForCausalLM": "packed",  # convolutions keep a state
    "NemotronHForCausalLM": "packed",  # so does Mamba-2
    "Llama4ForCausalLM": "packed",  # attention counts positions from a row's beginning
    "BartForCausalLM": "padded",  # each document would run separately through the decoder
    "GemmaForCausalLM": "alone",  # with a limit, see the test
}
"""Architectures, and how their sequences are arranged in a microbatch."""

ROUNDING = {"NemotronHForCausalLM": 1e-6, "Llama4ForCausalLM": 1e-6}
"""Bounds in fp64 of models that compute logits or rotary embeddings in fp32."""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, WIDE], ids=["fp32", "fp64"])
def test_packed_and_padded_models(
    name: str, dtype: torch.dtype, sequences: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FamilyCase(registry.model_class(name)).new_pair(dtype)[1]
    if CASES[name] == "alone":
        monkeypatch.setattr(type(model), "limits", {"right padding": "as declared by its family"})
    if dtype == WIDE and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch has no grouped matmul in fp64
    with Forwards(model) as forwards:
        assert_equal_runs(model, sequences, LOSSES["dapo"][0], ROUNDING.get(name, STRICT) if dtype == WIDE else 1e-5)
    shapes = [shape for shape in forwards.shapes if shape != (1, 4)][len(LENGTHS) :]
    assert all(rows * length <= BUDGET for rows, length in shapes)
    if CASES[name] == "packed":
        assert sorted(shapes) == [(1, 19), (1, 19), (1, 20)], "rows have similar lengths"
    elif CASES[name] == "padded":
        assert len(shapes) < len(LENGTHS)
        assert max(rows for rows, _ in shapes) > 1
    else:
        assert sorted(shapes) == sorted((1, length) for length in LENGTHS)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 300}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_batch_losses(name: str, sampling: dict[str, Any], sequences: list[torch.Tensor]) -> None:
    loss, options = LOSSES[name]
    model = tiny_llama()
    # The number of tokens allowed by top_k and top_p, by which entropy is divided, is known only at the end.
    twice = name == "entropy and divergence" and "top_k" in sampling
    if name == "entropy and divergence":
        options = options | {"reference": tiny_llama(seed=1).requires_grad_(False)}
    with Forwards(model) as forwards:
        assert_equal_runs(model, sequences, loss, TWO_PASS if twice else STRICT, **options, **sampling)
    packed = [shape for shape in forwards.shapes if shape[1] > max(LENGTHS)]
    assert len(packed) == (5 if twice else 3), "the last microbatch is not run twice"


def test_loss_with_undeclared_coupling_runs_twice(sequences: list[torch.Tensor]) -> None:
    model = tiny_llama()
    with Forwards(model) as forwards:
        assert_equal_runs(model, sequences, coupled_loss, TWO_PASS)
    assert len([shape for shape in forwards.shapes if shape[1] > max(LENGTHS)]) == 5
    assert_equal_runs(model, sequences, preference, TWO_PASS)  # pairs in different rows
    assert_equal_runs(model, sequences, preference, TWO_PASS, loss_terms=torch.zeros(8))  # a unit that fits no row


def test_second_pass_uses_same_dropout(sequences: list[torch.Tensor]) -> None:
    """The gradient belongs to the returned log-probabilities. Finite differences use the same dropout."""
    model = tiny_llama(attention_dropout=0.3).train()
    weight = model.model.norm.weight

    def value() -> float:
        torch.manual_seed(3)
        result = rollout_logprobs(model, sequences, loss=coupled_loss, row_tokens=BUDGET)
        assert result.loss is not None
        return result.loss.item()

    value()
    slope = gradients_of(model)["model.norm.weight"][0].item()
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight[0] += step
        values.append(value())
        with torch.no_grad():
            weight[0] -= step
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_additional_loss_terms_count_once(sequences: list[torch.Tensor]) -> None:
    model = tiny_llama()

    def loss(result: TokenLogprobs) -> torch.Tensor:
        return LOSSES["grpo"][0](result) + model.model.norm.weight.square().sum()

    assert_equal_runs(model, sequences, loss, STRICT)


def test_gradients_accumulate(sequences: list[torch.Tensor]) -> None:
    model, loss = tiny_llama(), LOSSES["grpo"][0]
    rollout_logprobs(model, sequences, score=SCORE, loss=loss, row_tokens=BUDGET)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    rollout_logprobs(model, sequences, score=SCORE, loss=loss, row_tokens=BUDGET)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, 2 * once[name])


def test_no_loss_computes_no_gradient(sequences: list[torch.Tensor]) -> None:
    model = tiny_llama()
    result = rollout_logprobs(model, [row.tolist() for row in sequences], row_tokens=BUDGET)
    assert (result.loss, result.entropy, result.kl) == (None, None, None)
    assert result.logprobs.shape == result.mask.shape == (len(LENGTHS), max(LENGTHS))
    assert result.mask.sum(1).tolist() == [length - 1 for length in LENGTHS]
    for row, sequence in enumerate(sequences):
        alone = token_logprobs(model, sequence[None]).logprobs[0]
        torch.testing.assert_close(result.logprobs[row, : len(sequence)], alone.detach(), rtol=0, atol=1e-12)
        assert not result.logprobs[row, len(sequence) :].any()
    assert not any(p.grad is not None for p in model.parameters())


def test_zero_loss_skips_backward(sequences: list[torch.Tensor]) -> None:
    model = tiny_llama()
    result = rollout_logprobs(model, sequences, loss=lambda result: 0.0 * result.logprobs.sum(), row_tokens=BUDGET)
    assert result.loss == 0.0
    assert gradients_of(model) == {}


def test_model_inputs_may_be_an_iterator() -> None:
    case = FamilyCase(registry.model_class("Qwen2_5_VLForConditionalGeneration"))
    inputs = case.inputs(batch=1, images=True)
    ids = inputs.pop("input_ids")[0]
    inputs.pop("attention_mask", None)
    given = [{}, inputs]
    sequences = [[20, 21, 22], ids]
    expected = rollout_logprobs(case.model(), sequences, model_inputs=given).logprobs
    actual = rollout_logprobs(case.model(), sequences, model_inputs=iter(given)).logprobs
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_loss_without_gradient_raises(sequences: list[torch.Tensor]) -> None:
    """A constant 0 has none either, but is right for a batch without tokens."""
    model = tiny_llama()
    for loss in (lambda result: result.logprobs.detach().sum(), lambda result: torch.ones(())):
        with pytest.raises(ValueError, match="does not depend on the log-probabilities"):
            rollout_logprobs(model, sequences, loss=loss)
    rollout_logprobs(model, sequences, loss=lambda result: torch.zeros(()))
    assert not gradients_of(model)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        rollout_logprobs(model.requires_grad_(False), sequences, loss=lambda result: result.logprobs.sum())


def test_transformers_models_are_padded(sequences: list[torch.Tensor]) -> None:
    """In transformers' classes, documents may attend to each other or pass on a state."""
    model = LlamaForCausalLM(tiny_config(LlamaConfig)).to(WIDE).eval()
    with Forwards(model) as forwards:
        assert_equal_runs(model, sequences, LOSSES["dapo"][0], STRICT)
    assert all(rows == 1 or length <= max(LENGTHS) for rows, length in forwards.shapes)
    with Forwards(ours := tiny_llama()) as forwards:
        rollout_logprobs(ours, sequences, reference=model, row_tokens=BUDGET)
    assert max(rows for rows, _ in forwards.shapes) > 1, "sequences are padded if the reference requires it"


def test_autocast(sequences: list[torch.Tensor]) -> None:
    """The forward runs in bf16. The backward runs outside of autocast, as torch recommends."""
    model = tiny_llama(torch.float32)
    loss = LOSSES["dapo"][0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = separate_forwards(model, sequences, loss)
    assert expected.loss is not None
    expected.loss.backward()
    wanted, seen = gradients_of(model), []
    model.model.norm.register_full_backward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        result = rollout_logprobs(model, sequences, score=SCORE, loss=loss, row_tokens=BUDGET)
    assert seen == [False] * 3
    assert (result.logprobs - rollout_logprobs(model, sequences, score=SCORE).logprobs).abs().max() > 1e-3, (
        "the forward ran in bf16"
    )
    for name, gradient in gradients_of(model).items():
        assert (gradient - wanted[name]).norm() < 0.02 * wanted[name].norm(), name


@pytest.mark.parametrize(("row_tokens", "lengths"), [(None, [58]), (12, [12, 12, 12, 11, 11]), (57, [29, 29])])
def test_row_tokens(row_tokens: int | None, lengths: list[int], sequences: list[torch.Tensor]) -> None:
    model = tiny_llama()
    with Forwards(model) as forwards:
        rollout_logprobs(model, sequences[:1])  # the first call with these hooks also compares the head
        forwards.shapes.clear()
        rollout_logprobs(model, sequences, row_tokens=row_tokens)
    assert forwards.shapes == [(1, length) for length in lengths]


@pytest.mark.parametrize("share_prompts", [True, False])
def test_longrope_factors_of_short_and_long_sequences(share_prompts: bool) -> None:
    """The longest sequence of a forward decides the factors of all, so both kinds run apart."""
    config = tiny_config(LlamaConfig)
    size = config.head_dim // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    model = tiny_llama(rope_parameters=rope | {"short_factor": [1.0] * size, "long_factor": [4.0] * size})
    prompt = torch.arange(20, 30)
    sequences = [torch.cat([prompt, torch.arange(40, 40 + more)]) for more in (3, 12, 6, 7, 2)]
    weights = torch.randn(5, 22, generator=torch.Generator().manual_seed(0), dtype=WIDE)
    alone = [token_logprobs(model, row[None]).logprobs[0] for row in sequences]
    sum((row * weights[number, : len(row)]).sum() for number, row in enumerate(alone)).backward()
    wanted = gradients_of(model)
    options: dict[str, Any] = {"share_prompts": share_prompts, "loss_terms": torch.tensor([0, 0, 1, 1, 2])}
    result = rollout_logprobs(model, sequences, loss=lambda result: (result.logprobs * weights).sum(), **options)
    for row, expected in zip(result.logprobs, alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected.detach(), rtol=0, atol=STRICT * 1e4)
    scale = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in gradients_of(model).items():
        assert (gradient - wanted[name]).abs().max() < 1e-6 * scale, name


def test_sequences_from_generator() -> None:
    model = tiny_llama()
    rows = [[20, 21, 22], [23, 24]]
    assert torch.equal(rollout_logprobs(model, iter(rows)).logprobs, rollout_logprobs(model, rows).logprobs)


@pytest.mark.parametrize("arguments", [{"share_prompts": "never"}, {"share_prompts": 1}, {"loss": "grpo"}])
def test_invalid_option_types_raise(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(UnknownArgumentError, match=f"{name}=.*: expected"):
        rollout_logprobs(tiny_llama(), **call_arguments(**arguments))


def call_arguments(**arguments: Any) -> dict[str, Any]:
    return {"sequences": [[1, 2, 3], [4, 5]]} | arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            call_arguments(sequences=[[1], [], [2] * 257, [0.5], [[1, 2]], ["a"], [3, -100]], row_tokens=200),
            r"sequence 1 is empty; sequence 2 has 257 tokens, and the model takes 256; sequence 2 has 257 tokens, and "
            r"row_tokens allows 200; sequence 3 is \(1,\) of torch.float32: expected token ids, \(length,\); "
            r"sequence 4 is \(1, 2\) of torch.int64: .*; sequence 5 is not a list of token ids: .*; sequence 6 has "
            r"the token ID -100, and LlamaForCausalLM has embeddings for 0 to 511: pass sequences without padding$",
        ),
        (call_arguments(sequences=[[]] * 30), r"sequence 19 is empty; and 10 more$"),
        (call_arguments(sequences=[]), "^there are no sequences$"),
        (
            call_arguments(sequences=torch.zeros(2, 3, dtype=torch.long)),
            "a tensor is not a list of sequences: use `token_logprobs`",
        ),
        (call_arguments(row_tokens=0), "row_tokens=0: expected a whole number of at least 1"),
        (
            call_arguments(sequences=[[3, 600]]),
            "sequence 0 has the token ID 600, and LlamaForCausalLM has embeddings for 0 to 511",
        ),
        (call_arguments(sequences=None), "None is not a list of sequences"),
        (call_arguments(row_tokens="auto"), "row_tokens='auto': expected a whole number"),
        (call_arguments(row_tokens=16.5), r"row_tokens=16\.5: expected a whole number"),
        (
            call_arguments(score=[[0.0, 1.0, math.nan], [0, 1]]),
            "score of sequence 0 is not a list of bools: score has the value nan",
        ),
        (call_arguments(score=True), "score=True: expected a list of masks"),
        (call_arguments(model_inputs=[1, 2]), "model_inputs of sequence 0 is a int: expected a dict"),
        (call_arguments(score=[[True] * 3]), "score has 1 masks for 2 sequences"),
        (
            call_arguments(score=[[True] * 2, [True]]),
            r"score of sequence 0 is \(2,\): expected \(3,\), as its .*; score of sequ",
        ),
        (call_arguments(score=[[True] * 3, ["a"] * 2]), "score of sequence 1 is not a list of bools: "),
        (
            call_arguments(loss_terms="pair"),
            "loss_terms='pair': expected token, sequence, or a number of each sequence",
        ),
        (call_arguments(loss_terms=torch.zeros(3)), r"loss_terms is \(3,\): expected \(2,\)"),
        (
            call_arguments(loss=lambda result: result.logprobs.sum(1)),
            r"the loss returned \(2,\): expected a tensor without dimens",
        ),
    ],
)
def test_invalid_input_raises(arguments: dict[str, Any], message: str) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=message):
        rollout_logprobs(model, **arguments)
    assert gradients_of(model) == {}
