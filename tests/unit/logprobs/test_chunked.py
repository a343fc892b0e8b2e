"""Chunked statistics equal those of full logits: values and gradients, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nrl_models.logprobs import chunked, fused, logit_buffers
from nrl_models.logprobs.chunked import chunked_statistics, statistics_of
from nrl_models.logprobs.logit_buffers import OutputHead, Reference, TokenStatistics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.whole_rows import Derivatives, LossAhead

TOKENS, HIDDEN, VOCABULARY = 37, 16, 101

SAMPLINGS = [
    Sampling(),
    Sampling(0.7),
    Sampling(0.7, top_p=0.8),
    Sampling(1.3, top_k=7),
    Sampling(top_k=20, top_p=0.6),
    Sampling(0.0, top_k=3),
]
LOGIT_TRANSFORMS = {"plain": (1.0, None), "scaled": (0.3, None), "capped": (1.0, 5.0), "both": (0.7, 3.0)}


def linear(seed: int, *, bias: bool = False, frozen: bool = False, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(seed)
    result = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    nn.init.normal_(result.weight)
    return result.requires_grad_(not frozen)


def hidden_states(seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2))


def with_gradients(statistics: TokenStatistics, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the statistics, and the gradients of a random combination of all their finite values."""
    weights = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = sum(
        (torch.where(tensor.isfinite(), tensor, 0) * weight).sum()
        for tensor, weight in zip(statistics, weights, strict=True)
    )
    gradients = torch.autograd.grad(loss, inputs)
    return [*(tensor.detach() for tensor in statistics), *gradients]


@pytest.fixture
def gpu_functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use the functions that are compiled on a GPU. Returns the names of those that ran."""
    names: list[str] = []

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        names.append(function.__name__)
        return torch.compile(function, dynamic=True, backend="aot_eager")

    monkeypatch.setattr(fused, "_compiled", traced)
    monkeypatch.setattr(fused, "_warn_once", pytest.fail)
    for module in (logit_buffers, chunked):
        monkeypatch.setattr(module, "fuses", lambda device: True)
    return names


@pytest.mark.long
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("transform", LOGIT_TRANSFORMS)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "loss"])
def test_fused_statistics_match_full_logits(
    ahead: bool, transform: str, bias: bool, frozen: bool, gpu_functions: list[str]
) -> None:
    head, sampling = OutputHead(linear(0, bias=bias, frozen=frozen), *LOGIT_TRANSFORMS[transform]), Sampling(0.7)
    hidden = hidden_states().requires_grad_()
    inputs = [hidden, *(parameter for parameter in head.module.parameters() if not frozen)]
    weights = torch.randn(TOKENS, dtype=torch.float64)

    def derivatives(statistics: TokenStatistics) -> Derivatives:
        return weights, None, None

    def gradients(statistics: TokenStatistics) -> list[torch.Tensor]:
        return [statistics.logprobs.detach(), *torch.autograd.grad((statistics.logprobs * weights).sum(), inputs)]

    expected = gradients(statistics_of(head(hidden), tokens(), sampling))
    loss = LossAhead(derivatives) if ahead else None
    # Tiles narrower than the vocabulary, the last one narrower than the others.
    actual = gradients(chunked_statistics(hidden, head, tokens(), sampling, chunk_size=13, ahead=loss))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert set(gpu_functions) == {"log_sum_exp", "logprob_gradient_"}


def test_fused_excluded_tokens_have_no_gradient(gpu_functions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "gradients_by_tiles", lambda *_, **__: pytest.fail("the logits are computed twice"))
    module = linear(0, bias=True)
    with torch.no_grad():
        assert module.bias is not None
        module.bias[tokens()[3]] = float("-inf")
    hidden = hidden_states().requires_grad_()

    def derivatives(statistics: TokenStatistics) -> Derivatives:
        return torch.ones_like(statistics.logprobs), None, None

    statistics = chunked_statistics(hidden, OutputHead(module), tokens(), Sampling(), ahead=LossAhead(derivatives))
    is_possible = statistics.logprobs.isfinite()
    assert not is_possible[3]
    (gradient,) = torch.autograd.grad(statistics.logprobs, hidden, torch.ones_like(statistics.logprobs))
    assert gpu_functions
    assert not gradient[~is_possible].any()
    assert gradient[is_possible].any(-1).all()


def test_fallback_without_compiler(
    gpu_functions: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        raise RuntimeError("no C compiler")

    expected = chunked_statistics(hidden_states(), OutputHead(linear(0)), tokens(), Sampling())
    monkeypatch.setattr(fused, "_compiled", broken)
    warnings: list[str] = []
    monkeypatch.setattr(fused, "_warn_once", warnings.append)
    actual = chunked_statistics(hidden_states(), OutputHead(linear(0)), tokens(), Sampling())
    torch.testing.assert_close(actual.logprobs, expected.logprobs)
    assert warnings == ["RuntimeError: no C compiler"]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("transform", LOGIT_TRANSFORMS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_chunked_statistics_match_full_logits(sampling: Sampling, transform: str, bias: bool, frozen: bool) -> None:
    head = OutputHead(linear(0, bias=bias, frozen=frozen), *LOGIT_TRANSFORMS[transform])
    reference = Reference(hidden_states(4), OutputHead(linear(5, frozen=True), 1.0, 7.0))
    hidden = hidden_states().requires_grad_()
    inputs = [hidden, *([] if frozen else head.module.parameters())]
    chunked = chunked_statistics(hidden, head, tokens(), sampling, entropy=True, reference=reference, chunk_size=8)
    with torch.no_grad():
        theirs = reference.head(reference.hidden)
    full = statistics_of(head(hidden), tokens(), sampling, theirs)
    for actual, expected in zip(with_gradients(chunked, inputs), with_gradients(full, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("transform", LOGIT_TRANSFORMS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_frozen_head_computes_logits_once(sampling: Sampling, transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "gradients_by_tiles", lambda *_, **__: pytest.fail("the logits are computed twice"))
    head, weights = (
        OutputHead(linear(0, frozen=True), *LOGIT_TRANSFORMS[transform]),
        torch.randn(TOKENS, dtype=torch.float64),
    )
    hidden = hidden_states().requires_grad_()
    statistics = chunked_statistics(hidden, head, tokens(), sampling, chunk_size=8)
    full = statistics_of(head(hidden), tokens(), sampling)
    is_possible = full.logprobs.isfinite()
    assert torch.equal(statistics.logprobs.isfinite(), is_possible)
    (expected,) = torch.autograd.grad((full.logprobs * weights)[is_possible].sum(), hidden)
    for _ in range(2):
        (actual,) = torch.autograd.grad((statistics.logprobs * weights)[is_possible].sum(), hidden, retain_graph=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_entropy_is_computed_only_on_request(frozen: bool) -> None:
    head, hidden = OutputHead(linear(0, frozen=frozen)), hidden_states().requires_grad_()
    alone = chunked_statistics(hidden, head, tokens(), Sampling(0.7))
    both = chunked_statistics(hidden, head, tokens(), Sampling(0.7), entropy=True)
    assert torch.equal(alone.logprobs, both.logprobs)
    assert not alone.entropy.any()
    assert both.entropy.all()
    gradient = torch.autograd.grad(alone.logprobs.sum(), hidden)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(both.logprobs.sum(), hidden)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 5, 36, 37, 1000])
def test_chunk_sizes(chunk_size: int) -> None:
    head, hidden = OutputHead(linear(0)), hidden_states().requires_grad_()
    inputs = [hidden, head.module.weight]
    chunked = chunked_statistics(hidden, head, tokens(), Sampling(), chunk_size=chunk_size)
    full = statistics_of(head(hidden), tokens(), Sampling())
    for actual, expected in zip(
        with_gradients(chunked, inputs), with_gradients(full._replace(entropy=0 * full.entropy), inputs), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_entropy_and_kl_match_closed_forms() -> None:
    # A uniform distribution has entropy log V. A reference that prefers one token by log(3) gives known sums.
    head, hidden = OutputHead(linear(0)), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        theirs = OutputHead(linear(1, frozen=True))
        theirs.module.weight.zero_()
        theirs.module.weight[7, 0] = torch.tensor(3.0).log()
    ones = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    ones[:, 0] = 1.0
    statistics = chunked_statistics(
        hidden, head, tokens(), Sampling(), entropy=True, reference=Reference(ones, theirs), chunk_size=9
    )
    size = torch.tensor(float(VOCABULARY), dtype=torch.float64)
    torch.testing.assert_close(statistics.entropy, size.log().expand(TOKENS))
    divergence = ((size + 2) / size).log() - torch.tensor(3.0, dtype=torch.float64).log() / size
    torch.testing.assert_close(statistics.kl, divergence.expand(TOKENS), rtol=0, atol=1e-7)


def test_excluded_tokens_have_minus_infinity_and_no_gradient() -> None:
    head, hidden = OutputHead(linear(0)), hidden_states().requires_grad_()
    sampling = Sampling(top_k=3)
    statistics = chunked_statistics(hidden, head, tokens(), sampling, chunk_size=8)
    top = head(hidden).topk(3).indices
    expected = (top == tokens()[:, None]).any(-1)
    assert 0 < expected.sum() < TOKENS
    assert torch.equal(statistics.logprobs.isfinite(), expected)
    statistics.logprobs[~expected].sum().backward()
    assert not hidden.grad.any()
    assert not head.module.weight.grad.any()


def test_minus_infinity_logits() -> None:
    # Some models exclude tokens permanently, for example with a bias of -inf.
    head = OutputHead(linear(0, bias=True))
    with torch.no_grad():
        head.module.bias[50:] = float("-inf")
    hidden = hidden_states().requires_grad_()
    statistics = chunked_statistics(hidden, head, tokens() % 50, Sampling(), entropy=True, chunk_size=8)
    full = statistics_of(head(hidden), tokens() % 50, Sampling())
    inputs = [hidden, head.module.weight]
    expected = with_gradients(full._replace(kl=0 * full.kl), inputs)
    for actual, wanted in zip(with_gradients(statistics, inputs), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-10)


def test_nan_affects_only_its_token() -> None:
    hidden = hidden_states()
    hidden[3, 0] = float("nan")
    statistics = chunked_statistics(hidden, OutputHead(linear(0)), tokens(), Sampling(), chunk_size=8)
    assert statistics.logprobs.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_bf16_error_is_close_to_autograd(frozen: bool) -> None:
    """The softmax is in fp32. The errors are those of the bf16 matmul, as in autograd."""
    exact = with_gradients(
        statistics_of(
            (wide := hidden_states(dtype=torch.bfloat16).double().requires_grad_())
            @ (weight := linear(0, dtype=torch.bfloat16).weight.detach().double().requires_grad_()).t(),
            tokens(),
            Sampling(),
        ),
        [wide, weight],
    )
    head = OutputHead(linear(0, frozen=frozen, dtype=torch.bfloat16))
    hidden = hidden_states(dtype=torch.bfloat16).requires_grad_()
    inputs = [hidden, *([] if frozen else [head.module.weight])]
    chunked = with_gradients(chunked_statistics(hidden, head, tokens(), Sampling(), entropy=True, chunk_size=8), inputs)
    full = statistics_of(head(hidden), tokens(), Sampling())
    autograd = with_gradients(full, inputs)
    assert chunked[0].dtype == torch.float32
    for ours, theirs, wanted in zip(chunked[3:], autograd[3:], exact[3:], strict=False):
        assert ours.dtype == torch.bfloat16
        assert (ours - wanted).norm() <= 1.1 * (theirs - wanted).norm()
    torch.testing.assert_close(chunked[0], autograd[0], rtol=0, atol=1e-5)


def test_output_embedding_with_custom_forward() -> None:
    """For example LoRA on the output embedding: its own forward runs chunk by chunk."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.extra = linear(0, frozen=True), linear(8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.base(hidden) + 0.1 * self.extra(hidden)

    head, hidden = OutputHead(Wrapped(), 1.0, 5.0), hidden_states().requires_grad_()
    reference = Reference(hidden_states(4), OutputHead(linear(5, frozen=True)))
    inputs = [hidden, head.module.extra.weight]
    chunked = chunked_statistics(
        hidden, head, tokens(), Sampling(0.7, top_p=0.9), reference=reference, entropy=True, chunk_size=8
    )
    with torch.no_grad():
        theirs = reference.head(reference.hidden)
    full = statistics_of(head(hidden), tokens(), Sampling(0.7, top_p=0.9), theirs)
    for actual, expected in zip(with_gradients(chunked, inputs), with_gradients(full, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_autocast_matches_full_logits() -> None:
    head = OutputHead(linear(0, dtype=torch.float32), autocast=torch.bfloat16)
    hidden = hidden_states(dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        statistics = chunked_statistics(hidden, head, tokens(), Sampling(), chunk_size=8)
        full = statistics_of(head(hidden), tokens(), Sampling())
    torch.testing.assert_close(statistics.logprobs, full.logprobs, rtol=0, atol=1e-5)
    statistics.logprobs.sum().backward()
    assert hidden.grad.dtype == head.module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.8)], ids=str)
def test_autocast_computes_entropy_and_kl_in_fp32(dtype: torch.dtype, sampling: Sampling) -> None:
    hidden = hidden_states(dtype=torch.float32).requires_grad_()
    head = OutputHead(linear(0, dtype=torch.float32), autocast=dtype)
    theirs = OutputHead(linear(0, frozen=True, dtype=torch.float32), autocast=dtype)
    reference = Reference(hidden.detach(), theirs)
    with torch.autocast("cpu", dtype):
        statistics = chunked_statistics(
            hidden, head, tokens(), sampling, entropy=True, reference=reference, chunk_size=8
        )
        full = statistics_of(head(hidden), tokens(), sampling, theirs(hidden).detach())
    torch.testing.assert_close(statistics.entropy, full.entropy, rtol=0, atol=2e-5)
    torch.testing.assert_close(statistics.kl, full.kl, rtol=0, atol=2e-5)
    if not sampling.truncates:  # the divergence of a model from itself has no gradient
        (gradient,) = torch.autograd.grad(statistics.kl.sum(), hidden)
        assert gradient.abs().max() < 1e-4


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("dtype", "reference_dtype", "reference_head_dtype"),
    [
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_reference_in_another_dtype(
    dtype: torch.dtype, reference_dtype: torch.dtype, reference_head_dtype: torch.dtype, ahead: bool
) -> None:
    hidden, head = hidden_states(dtype=dtype).requires_grad_(), OutputHead(linear(0, dtype=dtype))
    theirs = linear(5, bias=True, frozen=True, dtype=reference_head_dtype)
    reference = Reference(hidden_states(4, dtype=reference_dtype), OutputHead(theirs))
    loss = (
        LossAhead(lambda statistics: (torch.zeros_like(statistics.kl), None, torch.ones_like(statistics.kl)))
        if ahead
        else None
    )
    statistics = chunked_statistics(
        hidden, head, tokens(), Sampling(), reference=reference, entropy=True, chunk_size=8, ahead=loss
    )
    logits = theirs.to(reference_dtype)(reference.hidden)
    full = statistics_of(head(hidden), tokens(), Sampling(), logits)
    torch.testing.assert_close(
        statistics.kl, full.kl, rtol=1e-2 if reference_dtype == torch.bfloat16 else 1e-4, atol=1e-4
    )
    (actual,), (expected,) = (torch.autograd.grad(each.kl.sum(), hidden) for each in (statistics, full))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_zero_tokens() -> None:
    head, hidden = OutputHead(linear(0)), torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    statistics = chunked_statistics(hidden, head, torch.zeros(0, dtype=torch.long), Sampling())
    assert statistics.logprobs.shape == (0,)
    statistics.logprobs.sum().backward()
    assert not head.module.weight.grad.any()


def test_peak_memory_is_bounded_by_chunk() -> None:
    """Neither forward nor backward allocates a tensor as large as the logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for output in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(output, torch.Tensor):
                    self.elements = max(self.elements, output.untyped_storage().nbytes() // output.element_size())
            return result

    count, chunk = 4096, 64
    torch.manual_seed(0)
    head = OutputHead(linear(0, dtype=torch.float32))
    hidden = torch.randn(count, HIDDEN, requires_grad=True)
    ids = torch.randint(VOCABULARY, (count,))
    reference = Reference(torch.randn(count, HIDDEN), OutputHead(linear(5, frozen=True, dtype=torch.float32)))
    for sampling in (Sampling(), Sampling(0.7, top_p=0.9)):
        with Largest() as largest:
            statistics = chunked_statistics(
                hidden, head, ids, sampling, entropy=True, reference=reference, chunk_size=chunk
            )
            sum(output.sum() for output in statistics).backward()
        assert largest.elements <= max(chunk * VOCABULARY, count * HIDDEN)
        assert largest.elements < count * VOCABULARY / 4


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_token_outside_vocabulary_raises(token: int) -> None:
    token_ids = tokens()
    token_ids[3] = token
    with pytest.raises(ValueError, match=f"token ids {token} are outside .* vocabulary of {VOCABULARY}"):
        chunked_statistics(hidden_states(), OutputHead(linear(0)), token_ids, Sampling())
