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


def jointly(x: torch.Tensor, weights: Parameters, biases: Parameters) -> tuple[torch.Tensor, ...]:
    """Compute all linears in one matmul."""
    rows, bias_rows = Buffer.of(weights), Buffer.of(biases) if biases else None
    assert rows is not None
    return joined_linear(x, weights, biases, rows.rows, None if bias_rows is None else bias_rows.rows, LENGTHS)


def separately(x: torch.Tensor, weights: Parameters, biases: Parameters) -> tuple[torch.Tensor, ...]:
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
    given: tuple[Parameters, Parameters],
    used: tuple[int, ...] = (0, 1, 2),
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[torch.Tensor | None]:
    """Return outputs, and the gradients of input, weights and biases. Each output has another weight in the loss."""
    weights, biases = given
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
@pytest.mark.parametrize("shape", [(2, 3, SIZE), (SIZE,), (0, SIZE)], ids=["rows", "one", "none"])
def test_equals_separate_products(trained: str, bias: bool, shape: tuple[int, ...]) -> None:
    given = weights, biases = parameters(bias)
    for name, tensors in {"weights": weights, "biases": biases}.items():
        for tensor in tensors:
            tensor.requires_grad_(trained in ("all", name))
    x = inputs(*shape).requires_grad_(trained in ("all", "input"))
    torch.testing.assert_close(results(jointly, x, given), results(separately, x, given))


def test_of_input_that_is_not_contiguous() -> None:
    x = inputs(SIZE, 3, 2).transpose(0, 2).requires_grad_()
    torch.testing.assert_close(results(jointly, x, parameters()), results(separately, x, parameters()))


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_parts_nobody_used_get_no_gradient(used: tuple[int, ...], dtype: torch.dtype | None) -> None:
    x, around = inputs().requires_grad_(), nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype)
    found = results(jointly, x, parameters(), used, around)
    assert [gradient is not None for gradient in found[4:7]] == [number in used for number in range(3)]
    tolerances = {} if dtype is None else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, results(separately, x, parameters(), used, around), **tolerances)


def test_gradients_are_rows_of_one_tensor() -> None:
    weights, biases = parameters()
    results(jointly, inputs(), (weights, biases))
    for tensors in (weights, biases):
        assert len({tensor.grad.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.grad.is_contiguous() for tensor in tensors)


def test_first_and_second_derivatives() -> None:
    weights, biases = parameters(dtype=torch.float64)
    x = inputs(3, SIZE, dtype=torch.float64).requires_grad_()

    def run(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return jointly(x, weights, biases)

    assert gradcheck(run, (x, *weights, *biases))
    assert gradgradcheck(run, (x, *weights, *biases))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype: torch.dtype) -> None:
    """Matmuls run in bf16, gradients are in the parameters' dtype, and fp64 is not converted, as in torch."""
    found = []
    for products in (jointly, separately):
        x = inputs(dtype=dtype).requires_grad_()
        found.append(results(products, x, parameters(dtype=dtype), around=partial(torch.autocast, "cpu")))
    assert found[0][0].dtype == (torch.bfloat16 if dtype is torch.float32 else torch.float64)
    assert {tensor.dtype for tensor in found[0][3:]} == {dtype}
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("cast", [False, True])
def test_gradients_of_gradients_that_are_penalised(cast: bool) -> None:
    found = []
    for products in (jointly, separately):
        weights, biases = parameters()
        x = inputs().requires_grad_()
        with torch.autocast("cpu", enabled=cast):
            outputs = products(x, weights, biases)
        loss = sum(output.float().sin().sum() for output in outputs)
        first = torch.autograd.grad(loss, [x, *weights], create_graph=True)
        penalty = sum(gradient.float().square().sum() for gradient in first)
        found.append(torch.autograd.grad(penalty, [x, *weights, *biases]))
    scale = max(float(gradient.abs().max()) for gradient in found[1])
    tolerances = {"rtol": 0.05, "atol": 0.02 * scale} if cast else {"rtol": 3e-5, "atol": 3e-5 * scale}
    torch.testing.assert_close(*found, **tolerances)


def test_slices_may_be_changed_in_place() -> None:
    def clamped(products: Products, *given: object) -> tuple[torch.Tensor, ...]:
        first, second, third = products(*given)
        return first.clamp_(-0.2, 0.2), second, third.mul_(2)

    x, found = inputs().requires_grad_(), []
    for products in (jointly, separately):
        found.append(results(partial(clamped, products), x, parameters()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_what_is_changed_before_the_backward_pass_is_noticed(changed: str) -> None:
    for products in (separately, jointly):
        weights, biases = parameters()
        x = inputs().requires_grad_() * 1
        outputs = products(x, weights, biases)
        with torch.no_grad():
            (weights[1] if changed == "weight" else x).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(output.sum() for output in outputs).backward()


def test_a_weight_changed_before_a_second_derivative_under_autocast_is_noticed() -> None:
    weights, biases = parameters()
    x = inputs().requires_grad_()
    with torch.autocast("cpu"):
        outputs = jointly(x, weights, biases)
    with torch.no_grad():
        weights[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sum(output.float().sum() for output in outputs), x, create_graph=True)


@pytest.mark.parametrize("trained", ["all", "input", "weights"])
def test_saves_as_much_for_the_backward_pass_as_separate_products(trained: str) -> None:
    """Saves the weights as one tensor, at any address: offloading moves saved tensors."""
    found, seen = [], []
    for products in (jointly, separately):
        given = parameters()
        for tensor in (*given[0], *given[1]):
            tensor.requires_grad_(trained != "input")
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor.numel()
            return tensor.clone()

        around = partial(saved_tensors_hooks, pack, lambda tensor: tensor.clone())
        x = inputs(6, SIZE).requires_grad_(trained != "weights")
        found.append(results(products, x, given, around=around))
        seen.append(sum(saved.values()))
    torch.testing.assert_close(*found)
    assert seen[0] == seen[1]


def test_without_gradients_nothing_is_kept() -> None:
    weights, biases = parameters()
    with torch.no_grad():
        outputs = jointly(inputs().requires_grad_(), weights, biases)
    assert not any(output.requires_grad for output in outputs)
    torch.testing.assert_close(outputs, tuple(output.detach() for output in separately(inputs(), weights, biases)))
