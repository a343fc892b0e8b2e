"""The fused matmul gives the outputs and gradients of separate matmuls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from nrl_models.common.projections import Buffer
from nrl_models.common.projections.matmul import joined_linear

LENGTHS, SIZE = (5, 2, 3), 4

Parameters = list[nn.Parameter]
Products = Callable[[torch.Tensor, Parameters, Parameters], tuple[torch.Tensor, ...]]


def fused_linears(x: torch.Tensor, weights: Parameters, biases: Parameters) -> tuple[torch.Tensor, ...]:
    """Compute all linears in one matmul."""
    rows, bias_rows = Buffer.of(weights), Buffer.of(biases) if biases else None
    assert rows is not None
    return joined_linear(x, weights, biases, rows.rows, None if bias_rows is None else bias_rows.rows, LENGTHS)


def unfused(x: torch.Tensor, weights: Parameters, biases: Parameters) -> tuple[torch.Tensor, ...]:
    """Compute each linear separately."""
    return tuple(F.linear(x, weight, biases[i] if biases else None) for i, weight in enumerate(weights))


def parameters(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Parameters, Parameters]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(LENGTHS), SIZE, generator=generator, dtype=torch.float64).to(dtype)
    bias_rows = torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64).to(dtype)
    weights = [nn.Parameter(weight) for weight in Buffer(rows, LENGTHS).neighbors()]
    return weights, [nn.Parameter(bias) for bias in Buffer(bias_rows, LENGTHS).neighbors()] if bias else []


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = shape or (2, 3, SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def results(
    products: Products,
    x: torch.Tensor,
    parameters_: tuple[Parameters, Parameters],
    used: tuple[int, ...] = (0, 1, 2),
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[torch.Tensor | None]:
    """Return outputs, and the gradients of input, weights and biases. Each output has another weight in the loss."""
    weights, biases = parameters_
    x = x.detach().requires_grad_(x.requires_grad)
    for tensor in (*weights, *biases):
        tensor.grad = None
    with around():
        outputs = products(x, weights, biases)
    sum((number + 1) * outputs[number].float().square().sum() for number in used).backward()
    return [*(output.detach() for output in outputs), x.grad, *(tensor.grad for tensor in (*weights, *biases))]


@pytest.mark.parametrize(
    ("trained", "bias"),
    [("all", True), ("all", False), ("input", True), ("input", False), ("weights", True), ("biases", True)],
)
@pytest.mark.parametrize("shape", [(2, 3, SIZE), (SIZE,), (0, SIZE)], ids=["batch", "vector", "empty"])
def test_fused_matmul_matches_separate_matmuls(trained: str, bias: bool, shape: tuple[int, ...]) -> None:
    tensors_ = weights, biases = parameters(bias)
    for name, tensors in {"weights": weights, "biases": biases}.items():
        for tensor in tensors:
            tensor.requires_grad_(trained in ("all", name))
    x = inputs(*shape).requires_grad_(trained in ("all", "input"))
    torch.testing.assert_close(results(fused_linears, x, tensors_), results(unfused, x, tensors_))


def test_non_contiguous_input() -> None:
    x = inputs(SIZE, 3, 2).transpose(0, 2).requires_grad_()
    torch.testing.assert_close(results(fused_linears, x, parameters()), results(unfused, x, parameters()))


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_unused_outputs_get_no_gradient(used: tuple[int, ...], dtype: torch.dtype | None) -> None:
    x, around = inputs().requires_grad_(), nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    fused = results(fused_linears, x, parameters(), used, around)
    assert [gradient is not None for gradient in fused[4:7]] == [number in used for number in range(3)]
    tolerances = {} if dtype is None else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(fused, results(unfused, x, parameters(), used, around), **tolerances)


def test_gradients_are_rows_of_one_tensor() -> None:
    weights, biases = parameters()
    results(fused_linears, inputs(), (weights, biases))
    for tensors in (weights, biases):
        assert len({tensor.grad.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.grad.is_contiguous() for tensor in tensors)


def test_first_and_second_derivatives() -> None:
    weights, biases = parameters(dtype=torch.float64)
    x = inputs(3, SIZE, dtype=torch.float64).requires_grad_()

    def run(x: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fused_linears(x, weights, biases)

    assert gradcheck(run, (x, *weights, *biases))
    assert gradgradcheck(run, (x, *weights, *biases))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype: torch.dtype) -> None:
    """Matmuls run in bf16, gradients are in the parameters' dtype, and fp64 is not converted, as in torch."""
    outcomes = []
    for products in (fused_linears, unfused):
        x = inputs(dtype=dtype).requires_grad_()
        outcomes.append(results(products, x, parameters(dtype=dtype), around=partial(torch.autocast, "cpu")))
    assert outcomes[0][0].dtype == (torch.bfloat16 if dtype is torch.float32 else torch.float64)
    assert {tensor.dtype for tensor in outcomes[0][3:]} == {dtype}
    torch.testing.assert_close(*outcomes, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("cast", [False, True])
def test_gradient_penalty(cast: bool) -> None:
    second_derivatives = []
    for products in (fused_linears, unfused):
        weights, biases = parameters()
        x = inputs().requires_grad_()
        with torch.autocast("cpu", enabled=cast):
            outputs = products(x, weights, biases)
        loss = sum(output.float().sin().sum() for output in outputs)
        first = torch.autograd.grad(loss, [x, *weights], create_graph=True)
        penalty = sum(gradient.float().square().sum() for gradient in first)
        second_derivatives.append(torch.autograd.grad(penalty, [x, *weights, *biases]))
    scale = max(float(gradient.abs().max()) for gradient in second_derivatives[1])
    tolerances = {"rtol": 0.05, "atol": 0.02 * scale} if cast else {"rtol": 3e-5, "atol": 3e-5 * scale}
    torch.testing.assert_close(*second_derivatives, **tolerances)


def test_outputs_edited_in_place() -> None:
    def clamped(products: Products, *args: object) -> tuple[torch.Tensor, ...]:
        first, second, third = products(*args)
        return first.clamp_(-0.2, 0.2), second, third.mul_(2)

    x, outcomes = inputs().requires_grad_(), []
    for products in (fused_linears, unfused):
        outcomes.append(results(partial(clamped, products), x, parameters()))
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_edit_before_backward_raises(changed: str) -> None:
    for products in (unfused, fused_linears):
        weights, biases = parameters()
        x = inputs().requires_grad_() * 1
        outputs = products(x, weights, biases)
        with torch.no_grad():
            (weights[1] if changed == "weight" else x).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(output.sum() for output in outputs).backward()


def test_weight_edited_before_double_backward_in_autocast_raises() -> None:
    weights, biases = parameters()
    x = inputs().requires_grad_()
    with torch.autocast("cpu"):
        outputs = fused_linears(x, weights, biases)
    with torch.no_grad():
        weights[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sum(output.float().sum() for output in outputs), x, create_graph=True)


@pytest.mark.parametrize("trained", ["all", "input", "weights"])
def test_saved_tensors_match_separate_matmuls_in_size(trained: str) -> None:
    """Saves the weights as one tensor, at any address: offloading moves saved tensors."""
    outcomes, seen = [], []
    for products in (fused_linears, unfused):
        given = parameters()
        for tensor in (*given[0], *given[1]):
            tensor.requires_grad_(trained != "input")
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor.numel()
            return tensor.clone()

        around = partial(saved_tensors_hooks, pack, lambda tensor: tensor.clone())
        x = inputs(6, SIZE).requires_grad_(trained != "weights")
        outcomes.append(results(products, x, given, around=around))
        seen.append(sum(saved.values()))
    torch.testing.assert_close(*outcomes)
    assert seen[0] == seen[1]


def test_no_grad_saves_no_tensors() -> None:
    weights, biases = parameters()
    with torch.no_grad():
        outputs = fused_linears(inputs().requires_grad_(), weights, biases)
    assert not any(output.requires_grad for output in outputs)
    torch.testing.assert_close(outputs, tuple(output.detach() for output in unfused(inputs(), weights, biases)))
