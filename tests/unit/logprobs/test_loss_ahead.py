"""A loss whose gradient is computed in the forward pass equals that from full logits, also if terms span chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.logprobs import LossTerms, TokenLogprobs, token_logprobs
from nrl_models.logprobs.chunked import chunked_statistics
from nrl_models.logprobs.logit_buffers import OutputHead, TokenStatistics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.whole_rows import LossAhead
from nrl_models.losses import Correction, dpo_loss, importance_weights, policy_loss, sequence_logprobs
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

ROWS, LENGTH, CHUNK = 4, 12, 16

Loss = Callable[[TokenLogprobs], torch.Tensor]


def tiny_llama(dtype: torch.dtype = torch.float64, **values: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig, {"vocab_size": 509} | values), dtype=dtype).eval()
    randomize(model)
    return model


def loss_constants(seed: int = 0) -> dict[str, torch.Tensor]:
    """Constants of a loss: `(sequences, length)` and advantages."""
    generator = torch.Generator().manual_seed(seed)
    old, reference, engine, weights = torch.rand(4, ROWS, LENGTH, generator=generator, dtype=torch.float64)
    return {
        "input_ids": torch.randint(16, 480, (ROWS, LENGTH), generator=generator),
        "old": -8 * old,
        "reference": -8 * reference,
        "engine": -8 * engine,
        "weights": weights,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64),
    }


CONSTANTS = loss_constants()


def cross_entropy(result: TokenLogprobs) -> torch.Tensor:
    return -(result.logprobs * CONSTANTS["weights"]).sum() / 100


def clipped(result: TokenLogprobs) -> torch.Tensor:
    weights = CONSTANTS["weights"] * result.mask
    return policy_loss(
        result.logprobs, CONSTANTS["old"], CONSTANTS["advantages"], weights, eps_high=0.28,
        reference=CONSTANTS["reference"], kl=0.1,
    )  # fmt: skip


def corrected(result: TokenLogprobs) -> torch.Tensor:
    """On-policy: the old log-probabilities come from this forward."""
    before = result.logprobs.detach()
    weights = CONSTANTS["weights"] * result.mask
    correction = importance_weights(before, CONSTANTS["engine"], weights > 0, Correction("mis", cap=3.0, floor=0.1))
    return policy_loss(result.logprobs, before, CONSTANTS["advantages"], weights, correction=correction)


def regularized(result: TokenLogprobs) -> torch.Tensor:
    assert result.entropy is not None
    assert result.kl is not None
    return clipped(result) - 0.01 * result.entropy.sum() + 0.02 * (result.kl * CONSTANTS["weights"]).sum()


def preference(result: TokenLogprobs) -> torch.Tensor:
    chosen, rejected = sequence_logprobs(result.logprobs, result.mask).chunk(2)
    before = -10 * torch.ones_like(chosen)
    return dpo_loss(chosen, rejected, before, 1.1 * before)


def sequence_ratio(result: TokenLogprobs) -> torch.Tensor:
    """Sequence-level ratios as in GSPO (https://arxiv.org/abs/2507.18071, equation 5)."""
    old = torch.where(result.mask, CONSTANTS["old"], 0.0)
    ratio = ((result.logprobs - old).sum(1) / result.mask.sum(1).clamp(min=1)).exp()
    gain = CONSTANTS["advantages"]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


PAIRS = torch.arange(ROWS // 2).repeat(2)

LOSSES: dict[str, tuple[Loss, LossTerms | str | torch.Tensor, dict[str, Any]]] = {
    "cross-entropy": (cross_entropy, "token", {}),
    "clipped": (clipped, "token", {}),
    "corrected": (corrected, LossTerms.TOKEN, {}),
    "regularized": (regularized, "token", {"entropy": True}),
    "pairs": (preference, PAIRS, {"chunk_size": 24}),
    "sequences": (sequence_ratio, "sequence", {}),
}


class Products(TorchDispatchMode):
    """Count matmuls with the output embedding, which write into preallocated memory."""

    WRITING = (torch.ops.aten.mm.out, torch.ops.aten.addmm.out, torch.ops.aten.addmm_.default)

    multiplied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WRITING:
            first, second = args[-2:]
            self.multiplied += first.shape[0] * first.shape[1] * second.shape[1]
        return func(*args, **(kwargs or {}))


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def measured(
    model: PreTrainedModel, loss: Loss, terms: Any, scale: float = 1.0, **options: Any
) -> tuple[TokenLogprobs, dict[str, torch.Tensor], float]:
    """Return the result, the gradients, and the number of matmuls with the output embedding per token."""
    weight = model.get_output_embeddings().weight
    with torch.no_grad():  # the first call compares the head with the model's own logits
        token_logprobs(model, CONSTANTS["input_ids"])
    with Products() as products:
        result = token_logprobs(model, CONSTANTS["input_ids"], loss=loss, loss_terms=terms, **options)
        gradient = gradients(model, result.loss * scale)
    return result, gradient, products.multiplied / (weight.numel() * int((result.mask | result.outside).sum()))


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert wanted.any(), name
        torch.testing.assert_close(actual[name], wanted, rtol=0, atol=bound * wanted.abs().max().item(), msg=name)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 300}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_full_logits_with_three_matmuls(name: str, sampling: dict[str, Any]) -> None:
    loss, terms, options = LOSSES[name]
    model, reference = tiny_llama(), tiny_llama().requires_grad_(False)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.7)
    options = sampling | options | ({"reference": reference} if name == "regularized" else {})
    full = token_logprobs(model, CONSTANTS["input_ids"], loss=loss, **options | {"chunk_size": None})
    expected = gradients(model, full.loss)
    result, actual, products = measured(model, loss, terms, **{"chunk_size": CHUNK} | options)
    torch.testing.assert_close(result.loss, full.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.logprobs, full.logprobs, rtol=0, atol=1e-10)
    assert_same(actual, expected)
    assert products == pytest.approx(4 if name == "regularized" else 3), (
        "three matmuls, and one for the reference's logits"
    )


def test_gradient_matches_finite_differences() -> None:
    """Finite differences through the complete function, in fp64."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 11, dtype=torch.float64)
    hidden = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    tokens, weights = torch.randint(11, (7,)), torch.randn(3, 7, dtype=torch.float64)

    def loss(result: TokenStatistics) -> torch.Tensor:
        return (result.logprobs.exp() * weights[0] + result.entropy * weights[1]).sum()

    def derivatives(result: TokenStatistics) -> Any:
        with torch.enable_grad():
            leaves = TokenStatistics(*(values.detach().clone().requires_grad_() for values in result))
            return torch.autograd.grad(loss(leaves), leaves, allow_unused=True)

    head = OutputHead(linear, 0.8, 3.0)
    inputs = [hidden, linear.weight.detach().requires_grad_(), linear.bias.detach().requires_grad_()]
    del linear.weight, linear.bias

    def value(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        linear.weight, linear.bias = weight, bias
        ahead = LossAhead(derivatives)
        return loss(chunked_statistics(hidden, head, tokens, Sampling(0.7), entropy=True, chunk_size=3, ahead=ahead))

    # A second backward recomputes the logits, so results agree up to rounding.
    assert torch.autograd.gradcheck(value, inputs, nondet_tol=1e-12)


@pytest.mark.parametrize("name", ["pairs", "sequences"])
@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "undeclared"])
def test_terms_larger_than_a_chunk_are_computed_twice(name: str, is_declared: bool) -> None:
    """The gradients are correct even if the call does not declare such terms."""
    loss, terms, _ = LOSSES[name]
    model = tiny_llama()
    expected = gradients(model, token_logprobs(model, CONSTANTS["input_ids"], loss=loss, chunk_size=None).loss)
    _, actual, products = measured(model, loss, terms if is_declared else "token", chunk_size=LENGTH // 2)
    assert_same(actual, expected)
    assert products == pytest.approx(4 if is_declared else 3 + 3)


@pytest.mark.parametrize("scale", [3.0, -0.1, 65536.0, 0.0])
def test_scaled_loss(scale: float) -> None:
    model = tiny_llama()
    expected = gradients(
        model, scale * token_logprobs(model, CONSTANTS["input_ids"], loss=clipped, chunk_size=None).loss
    )
    _, actual, products = measured(model, clipped, "token", scale, chunk_size=CHUNK)
    assert products == pytest.approx(3)
    assert actual.keys() == expected.keys()
    for gradient, wanted in zip(actual.values(), expected.values(), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9 * abs(scale))


def test_additional_loss_terms_contribute_gradients() -> None:
    """Another term with the same log-probabilities outside the loss, and a term with other inputs inside it."""
    model = tiny_llama()

    def with_norm(result: TokenLogprobs) -> torch.Tensor:
        return clipped(result) + model.model.norm.weight.square().sum()

    results = []
    for chunk_size in (CHUNK, None):
        result = token_logprobs(model, CONSTANTS["input_ids"], loss=with_norm, chunk_size=chunk_size)
        results.append(gradients(model, result.loss + 0.3 * result.logprobs.square().sum()))
    assert_same(results[0], results[1])


def test_second_backward_gives_same_gradients() -> None:
    model = tiny_llama()
    result = token_logprobs(model, CONSTANTS["input_ids"], loss=clipped, chunk_size=CHUNK)
    result.loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    result.loss.backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, first)


def test_packed_documents_are_separate_sequences() -> None:
    model = tiny_llama()
    row = {"input_ids": CONSTANTS["input_ids"][:2].reshape(1, -1), "position_ids": torch.arange(LENGTH).repeat(2)[None]}

    def loss(result: TokenLogprobs) -> torch.Tensor:
        return result.logprobs.view(2, LENGTH).mean(1).exp().sum()

    weight = model.lm_head.weight
    with Products() as products:
        result = token_logprobs(model, **row, loss=loss, loss_terms="sequence", chunk_size=LENGTH)
        actual = gradients(model, result.loss)
    assert products.multiplied == 3 * weight.numel() * int(result.mask.sum())
    full = token_logprobs(model, **row, loss=loss, chunk_size=None)
    assert_same(actual, gradients(model, full.loss))


@pytest.mark.parametrize("case", ["tied", "frozen head", "head alone", "lora", "lora on the head"])
def test_trainable_parameter_subsets(case: str) -> None:
    model: Any = tiny_llama(tie_word_embeddings=case == "tied")
    if case == "frozen head":
        model.lm_head.requires_grad_(False)
    if case == "head alone":
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
    if case.startswith("lora"):
        targets = ["q_proj", "lm_head"] if case == "lora on the head" else ["q_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
    results = [
        gradients(model, token_logprobs(model, CONSTANTS["input_ids"], loss=clipped, chunk_size=size).loss)
        for size in (CHUNK, None)
    ]
    assert_same(*results, bound=1e-6)  # PEFT's weights are fp32


def test_autocast_and_bf16_weight_gradients() -> None:
    """Weight gradients are accumulated in fp32, so their error is close to that of autograd."""
    for kind in ("autocast", "bf16"):
        model = tiny_llama(torch.float32 if kind == "autocast" else torch.bfloat16)
        wide = tiny_llama()
        wide.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
        wanted = gradients(wide, token_logprobs(wide, CONSTANTS["input_ids"], loss=cross_entropy, chunk_size=None).loss)
        errors = []
        for size in (CHUNK, None):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                result = token_logprobs(model, CONSTANTS["input_ids"], loss=cross_entropy, chunk_size=size)
            gradient = gradients(model, result.loss)["lm_head.weight"]
            errors.append((gradient.double() - wanted["lm_head.weight"]).norm().item())
        assert errors[0] < 1.25 * errors[1], kind


def test_no_grad_computes_only_loss() -> None:
    model = tiny_llama()
    weight = model.lm_head.weight
    with torch.no_grad(), Products() as products:
        result = token_logprobs(model, CONSTANTS["input_ids"], loss=clipped, chunk_size=CHUNK)
    assert products.multiplied == weight.numel() * int(result.mask.sum())
    assert result.loss.item() == pytest.approx(clipped(result).item())
    assert token_logprobs(model, CONSTANTS["input_ids"]).loss is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": lambda result: result.logprobs.sum(1)},
            r"the loss returned \(4,\): expected a tensor without dimens",
        ),
        ({"loss": lambda result: 0.0}, "the loss returned 0.0: expected a tensor without dimensions"),
        ({"loss": lambda result: result.logprobs.detach().sum()}, "does not depend on the log-probabilities"),
        ({"loss": lambda result: torch.tensor(2.0)}, "the loss 2 does not depend on the log-probabilities"),
        (
            {"loss": clipped, "loss_terms": "document"},
            "loss_terms='document': expected token, sequence, or term",
        ),
        ({"loss": clipped, "loss_terms": torch.zeros(3)}, r"expected loss_terms of \(4, 12\) or \(4,\), got \(3,\)"),
    ],
)
def test_invalid_loss_raises(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(tiny_llama(), CONSTANTS["input_ids"], **options)
