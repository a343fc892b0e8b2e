"""One matmul, many parts."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nrl_models.common import (
    CombinedGateUp,
    CombinedLinear,
    CombinedProjections,
    CombinedQKV,
    ProjectionPart,
    combine_groups,
)

HIDDEN, Q, KV = 16, 12, 4


class Attention(nn.Module):
    """Reads one input three times and mixes what it gets, so that a wrong part shows."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, Q, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.o_proj = nn.Linear(Q + 2 * KV, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        parts = self.q_proj(x), self.k_proj(memory).cos(), self.v_proj(memory).sin()
        return self.o_proj(torch.cat(parts, dim=-1))


class CombinedAttention(CombinedQKV, Attention):
    pass


@pytest.fixture
def plain() -> Attention:
    torch.manual_seed(0)
    return Attention()


@pytest.fixture
def combined(plain: Attention) -> CombinedAttention:
    return combine(plain)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def combine(module: Attention) -> CombinedAttention:
    module = copy.deepcopy(module)
    module.__class__ = CombinedAttention
    module.combine_projections()
    return module


class Matmuls(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("addmm", "mm", "bmm", "linear")
        return func(*args, **(kwargs or {}))


# What it is


def test_rows_are_the_plain_concatenation(plain: Attention, combined: CombinedAttention) -> None:
    for name in ("weight", "bias"):
        parts = [getattr(linear, name) for linear in (plain.q_proj, plain.k_proj, plain.v_proj)]
        assert torch.equal(getattr(combined.qkv_proj, name), torch.cat(parts))
    assert combined.qkv_proj.rows == {"q_proj": (0, Q), "k_proj": (Q, KV), "v_proj": (Q + KV, KV)}


def test_only_combined_tensors_are_parameters(combined: CombinedAttention) -> None:
    assert list(combined.state_dict()) == ["o_proj.weight", "qkv_proj.weight", "qkv_proj.bias"]
    assert [name for name, _ in combined.named_parameters()] == list(combined.state_dict())


def test_linears_are_found_under_their_hugging_face_names_only(combined: CombinedAttention) -> None:
    linears = [name for name, module in combined.named_modules() if isinstance(module, nn.Linear)]
    assert linears == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert [(part.out_features, part.in_features) for part in (combined.q_proj, combined.k_proj)] == [
        (Q, HIDDEN),
        (KV, HIDDEN),
    ]


def test_parts_are_live_views_of_the_combined_parameters(plain: Attention, combined: CombinedAttention) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        part, original = getattr(combined, name), getattr(plain, name)
        assert torch.equal(part.weight, original.weight)
        assert torch.equal(part.bias, original.bias)
        assert part.weight.untyped_storage().data_ptr() == combined.qkv_proj.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        combined.k_proj.weight.zero_()
        combined.v_proj.bias.fill_(7)
    assert not combined.qkv_proj.weight[Q : Q + KV].any()
    assert combined.qkv_proj.weight[:Q].all()
    assert combined.qkv_proj.bias[Q + KV :].eq(7).all()


def test_parts_follow_a_change_of_dtype(combined: CombinedAttention) -> None:
    combined.to(torch.bfloat16)
    assert combined.q_proj.weight.dtype == combined.v_proj.bias.dtype == torch.bfloat16


def test_without_biases(x: torch.Tensor) -> None:
    plain = Attention(bias=False)
    combined = combine(plain)
    assert combined.qkv_proj.bias is None
    assert combined.q_proj.bias is None
    torch.testing.assert_close(combined(x), plain(x))


def test_shows_its_parts(combined: CombinedAttention) -> None:
    assert "q_proj=12, k_proj=4, v_proj=4, bias=True" in repr(combined.qkv_proj)


def test_on_meta() -> None:
    with torch.device("meta"):
        combined = CombinedAttention()
    assert combined.qkv_proj.weight.device.type == combined.k_proj.weight.device.type == "meta"
    assert combined.qkv_proj.weight.shape == (Q + 2 * KV, HIDDEN)
    assert combined.k_proj.weight.shape == (KV, HIDDEN)


# Which groups form


class Grouped(CombinedProjections, Attention):
    combined = {"qkv_proj": ("q_proj", "k_proj", "v_proj", "extra_proj")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.attention", {"qkv_proj"}),
        ("layers.0.crossattention", {"k_v_proj"}),  # whose queries read something else
        ("layers.0.crossattention.self", {"k_v_proj"}),
        ("layers.0.other", set()),
    ],
)
def test_a_group_with_a_place_is_formed_there_only(name: str, expected: set[str], x: torch.Tensor) -> None:
    groups = combine_groups("q_proj k_proj v_proj @ 0.attention", "k_proj v_proj @ crossattention")
    module = type("Both", (groups, Attention), {}).__new__(type("Both", (groups, Attention), {}))
    Attention.__init__(module)
    alone = copy.deepcopy(module)
    module.combine_projections(name)
    assert {one for one, child in module.named_children() if isinstance(child, CombinedLinear)} == expected
    memory = torch.randn_like(x)
    assert torch.allclose(module(x, memory), alone(x, memory), atol=1e-6)


@pytest.mark.parametrize("absent", [None, "missing"])
def test_a_linear_that_a_layer_lacks_is_left_out(plain: Attention, x: torch.Tensor, absent: str | None) -> None:
    plain.v_proj = None if absent is None else plain.v_proj
    if absent is not None:
        del plain.v_proj
    plain.__class__ = Grouped
    plain.combine_projections()
    assert list(plain.qkv_proj.rows) == ["q_proj", "k_proj"]
    assert torch.equal(plain.qkv_proj(x)[..., :Q], plain.q_proj(x))


def test_one_linear_alone_is_left_as_it_was(plain: Attention) -> None:
    plain.k_proj = plain.v_proj = None
    plain.__class__ = Grouped
    plain.combine_projections()
    assert type(plain.q_proj) is nn.Linear
    assert "qkv_proj" not in plain._modules


def test_combining_twice_changes_nothing(combined: CombinedAttention, x: torch.Tensor) -> None:
    expected, module = combined(x), combined.qkv_proj
    combined.combine_projections()
    assert combined.qkv_proj is module
    assert torch.equal(combined(x), expected)


def test_a_module_may_have_several_groups(x: torch.Tensor) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(HIDDEN, n) for n in (4, 5, 6, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The calls of the two groups alternate.
            return torch.cat([self.a(x), self.c(x * 2), self.b(x), self.d(x * 3)], dim=-1)

    class CombinedLayer(CombinedProjections, Layer):
        combined = {"ab": ("a", "b"), "cd": ("c", "d")}

    layer = Layer()
    expected = layer(x)
    layer.__class__ = CombinedLayer
    layer.combine_projections()
    torch.testing.assert_close(layer(x), expected)


class Refused(nn.Linear):
    """A linear that is not plain."""


@pytest.mark.parametrize("unlike", ["q_proj", "v_proj"])
@pytest.mark.parametrize("bias", [True, False])
def test_those_that_are_alike_in_having_a_bias_combine(unlike: str, bias: bool) -> None:
    torch.manual_seed(0)
    plain, x = Attention(bias), torch.randn(2, 3, HIDDEN)
    setattr(plain, unlike, nn.Linear(HIDDEN, getattr(plain, unlike).out_features, bias=not bias))
    expected, combined = plain(x), combine(plain)
    parts = {name for name, module in combined.named_modules() if isinstance(module, ProjectionPart)}
    assert parts == {"q_proj", "k_proj", "v_proj"} - {unlike}
    assert type(combined.get_submodule(unlike)) is nn.Linear
    torch.testing.assert_close(combined(x), expected)


def test_linears_given_to_one_matmul_all_have_a_bias_or_none() -> None:
    linears = {"a": nn.Linear(HIDDEN, KV), "b": nn.Linear(HIDDEN, KV, bias=False)}
    with pytest.raises(ValueError, match="agree on bias, but they have a: True, b: False"):
        CombinedLinear(linears)


@pytest.mark.parametrize(
    ("linear", "error", "says"),
    [
        (lambda: nn.Linear(HIDDEN, KV, dtype=torch.bfloat16), ValueError, "v_proj: torch.bfloat16"),
        (lambda: nn.Linear(HIDDEN + 1, KV), ValueError, "v_proj: 17"),
        (lambda: nn.Linear(HIDDEN, KV, device="meta"), ValueError, "agree on device.*v_proj: meta"),
        (lambda: Refused(HIDDEN, KV), TypeError, "v_proj is a Refused.*combine=False"),
    ],
    ids=["dtype", "in_features", "device", "not plain"],
)
def test_linears_that_disagree_do_not_combine(plain: Attention, linear: Any, error: type, says: str) -> None:
    plain.v_proj = linear()
    before = dict(plain.named_parameters())
    plain.__class__ = CombinedAttention
    with pytest.raises(error, match=says):
        plain.combine_projections()
    assert dict(plain.named_parameters()).keys() == before.keys()
    assert type(plain.q_proj) is nn.Linear


# What it computes


def test_one_matmul_for_a_group(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    with Matmuls() as apart:
        plain(x)
    with Matmuls() as together:
        combined(x)
    assert (apart.count, together.count) == (4, 2)


def test_output_and_gradients_equal_the_linears(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = [module(one) for module, one in zip((plain, combined), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for name in ("weight", "bias"):
        gradients = [getattr(linear, name).grad for linear in (plain.q_proj, plain.k_proj, plain.v_proj)]
        torch.testing.assert_close(getattr(combined.qkv_proj, name).grad, torch.cat(gradients))


def test_parts_with_another_input_compute_on_it(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    memory = torch.randn_like(x)
    torch.testing.assert_close(combined(x, memory), plain(x, memory))
    # Equal values in another tensor are another input, too.
    torch.testing.assert_close(combined(x, x.clone()), plain(x))


def test_a_part_may_be_called_twice(plain: Attention, x: torch.Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = plain.q_proj, plain.k_proj, plain.v_proj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.q_proj(x)
            return torch.cat([first, self.q_proj(x), self.k_proj(x), self.v_proj(x), self.q_proj(x)], dim=-1)

    class CombinedTwice(CombinedQKV, Twice):
        pass

    module = Twice()
    expected = module(x)
    module.__class__ = CombinedTwice
    module.combine_projections()
    torch.testing.assert_close(module(x), expected)
    assert module._outputs is None


def test_a_part_called_outside_its_owners_forward_computes_its_rows(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor
) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(getattr(combined, name)(x), getattr(plain, name)(x))
    with Matmuls() as matmuls:
        combined.k_proj(x)
    assert matmuls.count == 1


def test_a_parts_output_may_be_changed_in_place(plain: Attention, x: torch.Tensor) -> None:
    class Clamped(Attention):  # as OLMo does
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            q.clamp_(-0.2, 0.2)
            v.mul_(2)
            return self.o_proj(torch.cat([q, k, v], dim=-1))

    class CombinedClamped(CombinedQKV, Clamped):
        pass

    plain.__class__ = Clamped
    module = combine(plain)
    module.__class__ = CombinedClamped
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = plain(inputs[0]), module(inputs[1])
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    gradients = [linear.weight.grad for linear in (plain.q_proj, plain.k_proj, plain.v_proj)]
    torch.testing.assert_close(module.qkv_proj.weight.grad, torch.cat(gradients))


def test_gated_mlp(x: torch.Tensor) -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(self.gate_proj(x)) * self.up_proj(x)

    class CombinedMLP(CombinedGateUp, MLP):
        pass

    mlp = MLP()
    expected = mlp(x)
    mlp.__class__ = CombinedMLP
    mlp.combine_projections()
    torch.testing.assert_close(mlp(x), expected)
    assert list(mlp.gate_up_proj.rows) == ["gate_proj", "up_proj"]


# What others may do to it


def test_hooks_on_the_combined_module_fire(combined: CombinedAttention, x: torch.Tensor) -> None:
    seen = []
    combined.qkv_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    combined.qkv_proj.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    output = combined(x)
    zeros = torch.zeros(*x.shape[:-1], Q + 2 * KV)
    zeros[..., Q : Q + KV] = 1  # cos(0)
    torch.testing.assert_close(output, combined.o_proj(zeros))
    assert len(seen) == 1
    assert seen[0] is x


def test_hooks_on_parts_fire(combined: CombinedAttention, x: torch.Tensor) -> None:
    called = []
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(combined, name).register_forward_hook(
            lambda module, args, output, name=name: called.append((name, tuple(output.shape)))
        )
    combined(x)
    assert called == [("q_proj", (2, 3, Q)), ("k_proj", (2, 3, KV)), ("v_proj", (2, 3, KV))]


def test_a_wrapper_in_the_place_of_the_combined_module_is_called(combined: CombinedAttention, x: torch.Tensor) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: CombinedLinear) -> None:
            super().__init__()
            self.inner, self.calls = inner, 0

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._modules["inner"], name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x)

    expected = combined(x)
    combined.qkv_proj = Wrapper(combined.qkv_proj)
    assert torch.equal(combined(x), expected)
    assert combined.qkv_proj.calls == 1


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_data_is_written_through(combined: CombinedAttention, name: str) -> None:
    part = getattr(combined.k_proj, name)
    new = torch.randn_like(part)
    before = getattr(combined.qkv_proj, name).detach().clone()
    getattr(combined.k_proj, name).data = new
    after = getattr(combined.qkv_proj, name)
    assert torch.equal(after[Q : Q + KV], new)
    assert torch.equal(after[:Q], before[:Q])
    assert torch.equal(after[Q + KV :], before[Q + KV :])
    getattr(combined.k_proj, name).data += 1  # `data` is read, changed in place and assigned
    assert torch.equal(getattr(combined.qkv_proj, name)[Q : Q + KV], new + 1)
    getattr(combined.k_proj, name).data.copy_(new)
    assert torch.equal(getattr(combined.qkv_proj, name)[Q : Q + KV], new)


def test_data_of_another_shape_is_refused(combined: CombinedAttention) -> None:
    before = combined.qkv_proj.weight.detach().clone()
    with pytest.raises(ValueError, match=r"shape \(4, 16\) to shape \(4, 17\).*combine=False"):
        combined.k_proj.weight.data = torch.zeros(KV, HIDDEN + 1)
    with pytest.raises(ValueError, match=r"to shape \(16,\)"):  # would broadcast
        combined.k_proj.weight.data = torch.zeros(HIDDEN)
    assert torch.equal(combined.qkv_proj.weight, before)


def test_operations_on_a_part_return_plain_tensors(combined: CombinedAttention) -> None:
    weight = combined.q_proj.weight
    for result in (weight + 1, weight.detach(), weight.T, weight.clone(), weight.double(), weight[0]):
        assert type(result) is torch.Tensor


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_a_parts_own_is_refused(combined: CombinedAttention, name: str, x: torch.Tensor) -> None:
    expected = combined(x)
    with pytest.raises(TypeError, match=f"cannot set '{name}' of q_proj: it is a part of qkv_proj.*combine=False"):
        setattr(combined.q_proj, name, nn.Parameter(torch.zeros(1)))
    assert torch.equal(combined(x), expected)
    assert list(combined.q_proj.parameters()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda part, value: part.requires_grad_(value),
        lambda part, value: part.weight.requires_grad_(value),
        lambda part, value: setattr(part.weight, "requires_grad", value),
        lambda part, value: setattr(part.bias, "requires_grad", value),
    ],
    ids=["part", "weight, method", "weight, attribute", "bias"],
)
def test_a_part_is_not_trained_or_frozen_alone(combined: CombinedAttention, change: Any) -> None:
    change(combined.q_proj, True)  # as it is already
    with pytest.raises(TypeError, match=r"cannot freeze a part alone.*combine=False"):
        change(combined.q_proj, False)
    combined.requires_grad_(False)
    change(combined.q_proj, False)
    with torch.no_grad(), pytest.raises(TypeError, match=r"cannot train a part alone.*combine=False"):
        change(combined.q_proj, True)
    assert not combined.q_proj.weight.requires_grad
    combined.qkv_proj.requires_grad_(True)
    assert combined.q_proj.weight.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_a_part_copied_alone_is_a_linear_of_its_own(bias: bool, x: torch.Tensor) -> None:
    part = combine(Attention(bias)).k_proj
    part.eval()
    part.register_forward_hook(lambda module, args, output: output + 1)
    alone = copy.deepcopy(part)
    assert type(alone) is nn.Linear
    assert not alone.training
    assert [(name, one.requires_grad) for name, one in alone.named_parameters()] == (
        [("weight", True), ("bias", True)] if bias else [("weight", True)]
    )
    torch.testing.assert_close(alone(x), part(x))
    before = part(x)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.zero_()
    assert torch.equal(part(x), before)
    assert alone(x).eq(1).all()


def test_a_part_copied_with_its_owner_is_a_part_of_the_copy(combined: CombinedAttention, x: torch.Tensor) -> None:
    whole = copy.deepcopy(nn.ModuleDict({"attention": combined}))["attention"]
    assert whole.q_proj.combined is whole.qkv_proj
    assert whole.qkv_proj is not combined.qkv_proj
    assert list(whole.state_dict()) == list(combined.state_dict())
    assert torch.equal(whole(x), combined(x))


# What it remembers


def test_nothing_is_remembered_after_a_forward(combined: CombinedAttention, x: torch.Tensor) -> None:
    combined(x)
    assert combined._outputs is None
    with torch.no_grad():
        combined.q_proj.weight.zero_()
        combined.q_proj.bias.fill_(1)
    assert combined.q_proj(x).eq(1).all()


def test_nothing_is_remembered_of_parts_that_were_not_called(plain: Attention, x: torch.Tensor) -> None:
    class OnlyQuery(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x)

    class CombinedOnlyQuery(CombinedQKV, OnlyQuery):
        pass

    module = combine(plain)
    module.__class__ = CombinedOnlyQuery
    module(x)
    assert module._outputs is None
    assert torch.equal(module(x), module(x.clone()))


def test_nothing_is_remembered_after_an_exception(combined: CombinedAttention, x: torch.Tensor) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    expected = combined(x)
    handle = combined.v_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        combined(x)
    assert combined._outputs is None
    handle.remove()
    assert torch.equal(combined(x), expected)


def test_outputs_are_let_go_with_the_last_part(combined: CombinedAttention, x: torch.Tensor) -> None:
    held = []
    combined.o_proj.register_forward_pre_hook(lambda module, args: held.append(dict(combined._outputs)))
    combined(x)
    assert held == [{}]


# Threads


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns after next to every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("shared_input", [False, True])
def test_threads_may_run_one_module(combined: CombinedAttention, shared_input: bool) -> None:
    rows = torch.randn(8, 4, HIDDEN)
    inputs = [rows[0]] * 8 if shared_input else list(rows)
    expected = [combined(one).detach() for one in inputs]
    start = threading.Barrier(len(inputs))
    errors: list[BaseException] = []

    def run(index: int) -> None:
        start.wait()
        try:
            for _ in range(60):
                with torch.no_grad():
                    # Close, not equal: a part that runs alone may add up in another order than in the combined matmul.
                    if not torch.allclose(combined(inputs[index]), expected[index], atol=1e-5):
                        errors.append("another thread's output")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert combined._outputs is None


def test_another_threads_forward_may_begin_and_end_within_one(combined: CombinedAttention, x: torch.Tensor) -> None:
    expected, other = combined(x), torch.randn_like(x)
    expected_other, got = combined(other), []

    def run_the_other(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: got.append(combined(other)))
            thread.start()
            thread.join()

    for module in (combined.qkv_proj, combined.q_proj, combined.k_proj):
        handles = [module.register_forward_pre_hook(run_the_other), module.register_forward_hook(run_the_other)]
        torch.testing.assert_close(combined(x), expected)
        for handle in handles:
            handle.remove()
    assert len(got) >= 6
    for output in got:
        torch.testing.assert_close(output, expected_other)


def test_parts_are_made_by_combining_only(combined: CombinedAttention) -> None:
    assert isinstance(combined.q_proj, ProjectionPart)
    assert combined.q_proj.combined is combined.qkv_proj


@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_weight_is_the_same_weight(x: torch.Tensor, bias: bool) -> None:
    torch.manual_seed(0)
    expected = combine(Attention(bias))
    actual = copy.deepcopy(expected)
    actual.qkv_proj.transpose()
    assert actual.qkv_proj.weight.shape == (HIDDEN, Q + 2 * KV)
    assert actual.qkv_proj.weight.is_contiguous()
    for one in (expected, actual):
        one(x).square().sum().backward()
    assert torch.allclose(actual(x), expected(x), atol=1e-6)
    gradient = actual.qkv_proj.weight.grad
    assert gradient.is_contiguous()  # or FSDP would copy it
    assert torch.allclose(gradient.t(), expected.qkv_proj.weight.grad, atol=1e-6)
    for name in ("q_proj", "k_proj", "v_proj"):
        part = getattr(actual, name)
        assert torch.equal(part.weight, getattr(expected, name).weight)
        assert part.weight.untyped_storage().data_ptr() == actual.qkv_proj.weight.untyped_storage().data_ptr()
    actual.separate_projections("qkv_proj")
    assert torch.equal(actual.k_proj.weight, expected.k_proj.weight)
    assert torch.allclose(actual(x), expected(x), atol=1e-6)
