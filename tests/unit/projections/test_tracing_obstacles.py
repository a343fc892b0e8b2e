"""Linears with the same input that cannot be fused: mixed types, repeated or missing calls, calls by other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nrl_models.common.projections import CombinedProjections
from nrl_models.common.projections.tracing import Readers, Trace, trace_linears
from nrl_models.parity.components import Call
from nrl_models.testing.suite.asserts import count_matmuls

SIZE = 4


class Layer(nn.Module):
    """Linears `a` to `d`, called as the test requires."""

    def __init__(self, run: Callable[[Layer, torch.Tensor], Any], **bias: bool) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(SIZE, SIZE, bias=bias.get(name, True)))
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


class Special(nn.Linear):
    """A linear of another library."""


def traced(model: nn.Module) -> Trace:
    return trace_linears(model, lambda: model(torch.randn(2, SIZE)))


def test_mixed_biases_are_an_obstacle() -> None:
    layer = Layer(lambda m, x: (m.a(x), m.b(x), m.c(x)), b=False)
    assert traced(layer).readers == (Readers("", ("a", "b", "c"), "mixed bias: b without"),)
    assert trace_linears(layer, lambda: layer(torch.randn(2, SIZE))).groups == {}
    combined = type("Combined", (CombinedProjections, Layer), {"combined": {"abc": ("a", "b", "c")}})
    assert list(combined(layer.run, b=False).abc.linears) == ["a", "c"]  # the larger group


def test_linear_subclass_is_named_and_others_form_group() -> None:
    layer = Layer(lambda m, x: (m.a(x), m.b(x), m.c(x)))
    layer.b = Special(SIZE, SIZE)
    assert traced(layer).readers == (Readers("", ("a", "b", "c"), "b is a Special"), Readers("", ("a", "c")))


def test_mixed_dtypes_are_an_obstacle() -> None:
    layer = Layer(lambda m, x: (m.a(x), m.b(x)))
    layer.b.register_forward_pre_hook(lambda module, args: None)
    layer.b.weight.data = layer.b.weight.data.double()
    layer.b.forward = lambda x: x  # the test needs only the shapes
    assert [reader.obstacle for reader in traced(layer).readers] == ["mixed dtypes or devices"]


def test_linears_called_by_other_module_are_an_obstacle() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(lambda m, x: x)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner.a(x), self.inner.b(x), self.inner(x)

    (readers,) = traced(Outer()).readers
    assert readers == Readers("inner", ("a", "b"), "called while their module is not running")


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_linears_in_container_are_an_obstacle(container: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linears = [nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)]
            self.linears = container(linears) if container is nn.ModuleList else container(*linears)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linears[0](x), self.linears[1](x)

    (readers,) = traced(Outer()).readers
    assert (readers.owner, readers.names) == ("linears", ("0", "1"))
    assert readers.obstacle


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        # a layer that is shared, or a loop: the same inputs each time
        (lambda m, x: [(m.a(y), m.b(y)) for y in (x, x + 1)], [("a", "b")]),
        (lambda m, x: (m.a(x), m.b(x), m.a(x + 1)), []),  # `a` reads another input
        (lambda m, x: (m.a(x), m.b(x), m.c(x), *[(m.b(y), m.c(y)) for y in (x + 1,)]), [("b", "c")]),
        (lambda m, x: (m.a(x), m.b(x + 1), m.a(x + 1), m.b(x)), []),
    ],
)
def test_repeated_calls_must_share_input(run: Any, expected: list[tuple[str, ...]]) -> None:
    layer = Layer(run)
    groups = trace_linears(layer, lambda: layer(torch.randn(2, SIZE))).groups
    assert groups.get("", []) == expected


def test_view_of_input_is_another_input() -> None:
    # Only the identity of inputs counts: linears called with two views of one tensor run two matmuls.
    def run(m: Layer, x: torch.Tensor) -> Any:
        return m.a(x), m.b(x.view(2, SIZE))

    combined = type("Combined", (CombinedProjections, Layer), {"combined": {"ab": ("a", "b")}})
    same, views = combined(lambda m, x: (m.a(x), m.b(x))), combined(run)
    counts = [count_matmuls(model, Call((torch.randn(2, SIZE),), {})) for model in (same, views)]
    assert counts == [1, 2]
    assert trace_linears(layer := Layer(run), lambda: layer(torch.randn(2, SIZE))).groups == {}


def test_uncalled_linears_are_listed() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.some = Layer(lambda m, x: m.d(m.c(m.b(m.a(x))))), Layer(lambda m, x: m.b(x))

        def forward(self, x: torch.Tensor) -> Any:
            return self.all(x), self.some(x)

    assert traced(Outer()).uncalled == {"some": ("a", "c", "d")}


def test_hooks_are_removed_after_error() -> None:
    layer = Layer(lambda m, x: m.a(x) + m.b(x))
    traced(layer)

    def fails() -> None:
        layer(torch.randn(2, SIZE))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_linears(layer, fails)
    modules = list(layer.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
