"""Forming groups, and computing the same as the separate linears."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from toy_attention import (
    HIDDEN,
    PARTS,
    Attention,
    CombinedAttention,
    assert_same,
    combined_from,
    inputs,
    matmuls,
    outcome,
)

from nrl_models import registry
from nrl_models.common.projections import (
    CombinedGateUp,
    CombinedProjections,
    CombinedQKV,
    LinearGroup,
    combine,
    combine_groups,
    combined_name,
    groups_of,
    report,
)
from nrl_models.testing.case import FamilyCase

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def pair(forward: Forward) -> tuple[Attention, Any]:
    """Create an attention with this `forward`, without and with a group."""
    torch.manual_seed(0)
    cls = type("Other", (Attention,), {"forward": forward})
    plain = cls()
    return plain, combined_from(plain, type("CombinedOther", (CombinedQKV, cls), {}))


# Basics


def test_grouped_module_looks_like_unfused_module(plain: Attention, combined: CombinedAttention) -> None:
    for look in (
        lambda module: [(name, type(child)) for name, child in module.named_modules() if name],
        lambda module: [
            (name, type(parameter), parameter.requires_grad) for name, parameter in module.named_parameters()
        ],
        lambda module: list(module.state_dict()),
        lambda module: [name for name, _ in module.named_children()],
        lambda module: [hasattr(getattr(module, name), "forward") for name in PARTS],
    ):
        assert look(combined) == look(plain)
    assert type(combined.q_proj) is nn.Linear
    torch.testing.assert_close(dict(combined.state_dict()), dict(plain.state_dict()))


def test_group_is_registered_by_name(combined: CombinedAttention) -> None:
    assert isinstance(combined.qkv_proj, LinearGroup)
    assert list(groups_of(combined)) == [("", "qkv_proj", combined.qkv_proj)]
    assert combined.qkv_proj.linears == {name: getattr(combined, name) for name in PARTS}
    assert repr(combined.qkv_proj) == "LinearGroup(q_proj=12, k_proj=4, v_proj=4)"
    assert not list(combined.qkv_proj.parameters())


# Forming groups


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.attention", ["qkv_proj"]),
        ("layers.0.crossattention", ["k_v_proj"]),  # its queries read another input
        ("layers.0.crossattention.self", ["k_v_proj"]),
        ("layers.0.other", []),
    ],
)
def test_group_pattern_limits_modules(plain: Attention, x: torch.Tensor, name: str, expected: list[str]) -> None:
    groups = combine_groups("q_proj k_proj v_proj @ 0.attention", "k_proj v_proj @ crossattention")
    module = copy.deepcopy(plain)
    module.__class__ = type("Both", (groups, Attention), {})
    module.combine_projections(name)
    assert [group for _, group, _ in groups_of(module)] == expected
    assert_same(plain, module, x, torch.randn_like(x))


class Grouped(CombinedProjections, Attention):
    combined = {"qkv_proj": ("q_proj", "k_proj", "v_proj", "extra_proj")}


@pytest.mark.parametrize("absent", [{"v_proj": None}, {}], ids=["none", "missing"])
def test_missing_linear_is_left_out_of_group(plain: Attention, absent: dict[str, None]) -> None:
    del plain.v_proj
    plain.__dict__.update(absent)
    plain.__class__ = Grouped
    plain.combine_projections()
    assert list(plain.qkv_proj.linears) == ["q_proj", "k_proj"]
    assert report(plain)[0].joined


def test_single_linear_forms_no_group(plain: Attention) -> None:
    plain.k_proj = plain.v_proj = None
    plain.__class__ = Grouped
    plain.combine_projections()
    assert not list(groups_of(plain))
    assert not hasattr(plain, "qkv_proj")


def test_combining_is_idempotent(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    group, address = combined.qkv_proj, combined.q_proj.weight.data_ptr()
    combined.combine_projections()
    assert combined.qkv_proj is group
    assert len(combined._groups) == 1
    assert combined.q_proj.weight.data_ptr() == address
    assert_same(plain, combined, x)


@pytest.mark.parametrize("unlike", ["q_proj", "v_proj"])
@pytest.mark.parametrize("bias", [True, False])
def test_mixed_bias_groups_matching_linears(x: torch.Tensor, unlike: str, bias: bool) -> None:
    torch.manual_seed(0)
    plain = Attention(bias)
    setattr(plain, unlike, nn.Linear(HIDDEN, getattr(plain, unlike).out_features, bias=not bias))
    combined = combined_from(plain)
    assert set(combined.qkv_proj.linears) == set(PARTS) - {unlike}
    assert matmuls(combined) == 3
    assert_same(plain, combined, x)


@pytest.mark.parametrize(
    ("sequences", "length", "gradients", "joined"),
    [(3, 1, False, 0), (3, 2, False, 1), (3, 1, True, 1), (64, 1, False, 1)],
    ids=["decode", "prefill", "train", "many"],
)
def test_decode_step_runs_linears_separately(
    plain: Attention,
    combined: CombinedAttention,
    sequences: int,
    length: int,
    gradients: bool,
    joined: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    outputs_with = LinearGroup.outputs_with
    monkeypatch.setattr(LinearGroup, "outputs_with", lambda *args: calls.append(args) or outputs_with(*args))
    x = torch.randn(sequences, length, HIDDEN)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(combined(x), plain(x))
    assert len(calls) == joined


def test_groups_with_alternating_calls(x: torch.Tensor) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(HIDDEN, n) for n in (4, 5, 6, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = x * 2
            return torch.cat([self.a(x), self.c(other), self.b(x), self.d(other)], dim=-1)

    torch.manual_seed(0)
    plain = Layer()
    combined = combined_from(plain, type("Combined", (combine(ab=("a", "b"), cd=("c", "d")), Layer), {}))
    assert_same(plain, combined, x)
    assert [group.joined for group in report(combined)] == [True, True]


def test_gated_mlp(x: torch.Tensor) -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(self.gate_proj(x)) * self.up_proj(x)

    torch.manual_seed(0)
    plain = MLP()
    combined = combined_from(plain, type("Combined", (CombinedGateUp, MLP), {}))
    assert list(combined.gate_up_proj.linears) == ["gate_proj", "up_proj"]
    assert_same(plain, combined, x)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (PARTS, "qkv_proj"),
        (("gate_proj", "up_proj"), "gate_up_proj"),
        (("q_a_proj", "kv_a_proj"), "q_a_kv_a_proj"),
        (("wi_0", "wi_1"), "wi_0_wi_1"),
    ],
)
def test_default_group_name(parts: tuple[str, ...], name: str) -> None:
    assert combined_name(parts) == name
    assert combine_groups(" ".join(parts)).combined == {name: parts}
    assert combine_groups(f"mine: {' '.join(parts)}").combined == {"mine": parts}


# Forward and backward


def test_group_runs_one_matmul(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    assert (matmuls(plain), matmuls(combined)) == (4, 2)
    assert_same(plain, combined, x)


def test_gradients_share_one_storage(combined: CombinedAttention, x: torch.Tensor) -> None:
    outcome(combined, x)
    for kind in ("weight", "bias"):
        gradients = [getattr(getattr(combined, name), kind).grad for name in PARTS]
        assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1


def test_linears_with_different_input(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    for memory in (torch.randn_like(x), x.clone()):  # equal values in another tensor are also another input
        assert_same(plain, combined, x, memory)


def test_linear_called_outside_parent_forward_runs_separately(combined: CombinedAttention, x: torch.Tensor) -> None:
    for name in PARTS:
        assert matmuls(getattr(combined, name)) == 1
        assert torch.equal(getattr(combined, name)(x), F.linear(x, *getattr(combined, name).parameters()))


def test_group_called_directly(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    expected = tuple(getattr(plain, name)(x) for name in PARTS)
    torch.testing.assert_close(combined.qkv_proj(x), expected)
    combined.k_proj.weight.data = combined.k_proj.weight.data.clone()
    torch.testing.assert_close(combined.qkv_proj(x), expected)


def _twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    first = self.q_proj(x)
    return torch.cat([first, self.q_proj(x), self.k_proj(x), self.v_proj(x), self.q_proj(x)], dim=-1)


def _one_alone(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.q_proj(x)


def _unused(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, _ = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    return torch.cat([q, k], dim=-1)


def _in_place(self: Any, x: torch.Tensor) -> torch.Tensor:  # as OLMo does
    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    return self.o_proj(torch.cat([q.clamp_(-0.2, 0.2), k, v.mul_(2)], dim=-1))


def _by_keyword(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([self.q_proj(input=x), self.k_proj(x), self.v_proj(input=x)], dim=-1)


def _loop(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer that runs twice, the second time on its own output."""
    for _ in range(2):
        x = self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1))
    return x


def _recursive(self: Any, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    """A forward that calls itself between the calls of its linears."""
    q = self.q_proj(x)
    x = x if depth == 0 else x + self(x, depth - 1)
    return self.o_proj(torch.cat([q, self.k_proj(x), self.v_proj(x)], dim=-1))


def _input_edited(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    q, k = self.q_proj(x).detach(), self.k_proj(x).detach()
    with torch.no_grad():
        x.mul_(0.5)
    return torch.cat([q, k, self.v_proj(x)], dim=-1)


def _input_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    with torch.no_grad():
        q = self.q_proj(x)
        x.data = x.data * 0.5
        k, v = self.k_proj(x), self.v_proj(x)
    return self.o_proj(torch.cat([q, k, v], dim=-1))


def _frozen_between(kind: str) -> Forward:
    """The weight or bias of one linear is frozen during its call."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x)
        parameter = getattr(self.k_proj, kind).requires_grad_(False)
        k = self.k_proj(x)
        parameter.requires_grad_(True)
        return self.o_proj(torch.cat([q, k, self.v_proj(x)], dim=-1))

    return forward


def _edited_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A weight that changes before its linear is called. The fused output must not use the old weight."""
    q = self.q_proj(x)
    with torch.no_grad():
        self.k_proj.weight.mul_(1.5)
    return self.o_proj(torch.cat([q, self.k_proj(x), self.v_proj(x)], dim=-1))


def _parametrized_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    """PEFT's `target_parameters` does this while the adapter's linear is called."""
    q = self.q_proj(x)
    parametrize.register_parametrization(self.k_proj, "weight", nn.Tanh())
    k = self.k_proj(x)
    parametrize.remove_parametrizations(self.k_proj, "weight", leave_parametrized=False)
    return self.o_proj(torch.cat([q, k, self.v_proj(x)], dim=-1))


class Tagged(torch.Tensor):
    """A tensor subclass."""


def _subclassed(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.as_subclass(Tagged)
    return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1).as_subclass(torch.Tensor)


def _around(context: Callable[[], AbstractContextManager[Any]], number: int = 1) -> Forward:
    """Run one linear's call within a context."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for i, name in enumerate(PARTS):
            if i == number:
                with context():
                    outputs.append(getattr(self, name)(x).float())
            else:
                outputs.append(getattr(self, name)(x))
        return torch.cat(outputs, dim=-1)

    return forward


def _checkpointed(number: int, reentrant: bool) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        outputs = [
            checkpoint(getattr(self, name), x, use_reentrant=reentrant) if i == number else getattr(self, name)(x)
            for i, name in enumerate(PARTS)
        ]
        return self.o_proj(torch.cat(outputs, dim=-1))

    return forward


def _halving() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor / 2, lambda tensor: tensor)


FORWARDS: dict[str, Forward] = {
    "called twice": _twice,
    "one linear": _one_alone,
    "unused output": _unused,
    "outputs edited in place": _in_place,
    "input by keyword": _by_keyword,
    "in a loop": _loop,
    "recursive": _recursive,
    "input edited between calls": _input_edited,
    "input data replaced between calls": _input_replaced,
    "tensor subclass as input": _subclassed,
    "weight frozen between calls": _frozen_between("weight"),
    "bias frozen between calls": _frozen_between("bias"),
    "weight edited between calls": _edited_between,
    "weight parametrized between calls": _parametrized_between,
    "second linear without gradients": _around(torch.no_grad),
    "first linear without gradients": _around(torch.no_grad, 0),
    "second linear under autocast": _around(partial(torch.autocast, "cpu")),
    "first linear under autocast": _around(partial(torch.autocast, "cpu"), 0),
    "saved tensors of second linear offloaded": _around(save_on_cpu),
    "saved tensors of second linear halved": _around(_halving),
    "saved tensors of first linear halved": _around(_halving, 0),
    "second linear checkpointed": _checkpointed(1, False),
    "first linear checkpointed": _checkpointed(0, False),
    "second linear checkpointed, reentrant": _checkpointed(1, True),
    "first linear checkpointed, reentrant": _checkpointed(0, True),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_forward_variants_match_separate_linears(x: torch.Tensor, forward: str) -> None:
    plain, combined = pair(FORWARDS[forward])
    for _ in range(2):  # nothing is cached from the first run
        assert_same(plain, combined, x)
        with torch.no_grad():
            for parameter in (*plain.parameters(), *combined.parameters()):
                parameter.mul_(1.5)
        assert combined.qkv_proj._run is None
        assert not any("forward" in getattr(combined, name).__dict__ for name in PARTS)


def test_forward_decorated_with_no_grad(x: torch.Tensor) -> None:
    """Indexers of sparse attention do this. They use one fused matmul, also in training."""

    @torch.no_grad()
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)

    plain, combined = pair(forward)
    torch.testing.assert_close(combined(x), plain(x))
    assert not combined(x).requires_grad
    assert (matmuls(combined), matmuls(plain)) == (1, 3)


def test_first_call_in_inference_mode(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    with torch.inference_mode():
        output = combined(x)
        torch.testing.assert_close(output, plain(x))
    assert output.is_inference()
    assert_same(plain, combined, x)
    assert matmuls(combined) == 2


def test_input_edited_in_inference_mode() -> None:
    """torch does not count changes of inference tensors."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x)
        x.mul_(0.5)
        return self.o_proj(torch.cat([q, self.k_proj(x), self.v_proj(x)], dim=-1))

    plain, combined = pair(forward)
    with torch.inference_mode():
        torch.testing.assert_close(combined(inputs()), plain(inputs()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(plain: Attention, combined: CombinedAttention, x: torch.Tensor, dtype: torch.dtype) -> None:
    outcomes = []
    for module in (combined, plain):
        with torch.autocast("cpu", dtype):
            outcomes.append(outcome(module, x))
    assert combined.q_proj.weight.grad.dtype == torch.float32
    torch.testing.assert_close(*outcomes, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_parent_module(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    outputs_with = LinearGroup.outputs_with
    monkeypatch.setattr(LinearGroup, "outputs_with", lambda *args: calls.append(args) or outputs_with(*args))

    class Inside(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def twice(x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.inner, x, use_reentrant=reentrant)

            return checkpoint(twice, x, use_reentrant=reentrant)

    assert_same(plain, Inside(combined).inner, x)
    outcomes = [outcome(Inside(module), x) for module in (combined, plain)]
    torch.testing.assert_close(*outcomes)
    assert len(calls) >= 3  # also fused during recomputation
    assert report(combined)[0].joined


def test_gradient_checkpointing_with_separate_linear(x: torch.Tensor) -> None:
    """Afterwards the group is no longer used, except in the recomputation of a checkpoint."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x)
        with torch.no_grad():
            k = self.k_proj(x)
        return self.o_proj(torch.cat([q, k, self.v_proj(x)], dim=-1))

    plain, combined = pair(forward)
    for _ in range(2):
        gradients = []
        for module in (combined, plain):
            module.zero_grad()
            checkpoint(module, x, use_reentrant=False).square().sum().backward()
            gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
        torch.testing.assert_close(*gradients)
        combined(x)  # between the passes, without a checkpoint


def test_gradient_checkpointing_with_weights_fused_later(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor
) -> None:
    held = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    combined.load_state_dict(held, assign=True)
    output = checkpoint(combined, x, use_reentrant=False)
    del held
    output.square().sum().backward()
    assert matmuls(combined) == 2
    assert_same(plain, combined, x)


def test_weight_edited_before_backward_raises(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    for module in (plain, combined):
        output = module(x.clone().requires_grad_())
        with torch.no_grad():
            module.k_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


# Hooks and wrappers


def test_global_hooks_run_for_every_linear(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    for register, edit in (
        (register_module_forward_pre_hook, lambda module, args: (args[0] * 2,)),
        (register_module_forward_hook, lambda module, args, output: output * 2),
    ):
        seen: list[str] = []

        def hook(module: nn.Module, *args: Any, edit: Any = edit, seen: list[str] = seen) -> Any:
            if type(module) is not nn.Linear:
                return None
            seen.append(str(module))
            return edit(module, *args)

        handle = register(hook)
        try:
            assert_same(plain, combined, x)
        finally:
            handle.remove()
        assert seen[:4] == seen[4:]
        assert len(seen) == 8


def _grow(weight: nn.Parameter, *_: Any) -> None:
    weight.data.mul_(1.1)


@pytest.mark.parametrize("edited", ["k_proj", "v_proj"])
@pytest.mark.parametrize("pre", [False, True], ids=["hook", "pre-hook"])
def test_hook_between_linears_that_edits_data(edited: str, pre: bool) -> None:
    """Qwen3 normalizes queries before it calls the next linear. Edits of `data` have no version counter."""
    case = FamilyCase(registry.model_class("Qwen3ForCausalLM"))
    results = []
    for original in (case.model(), case.reference()):
        model = copy.deepcopy(original)
        attention = model.model.layers[0].self_attn
        weight = getattr(attention, edited).weight
        edit = partial(_grow, weight)
        (attention.q_norm.register_forward_pre_hook if pre else attention.q_norm.register_forward_hook)(edit)
        for _ in range(2):
            logits = model(**case.inputs(length=8), use_cache=False).logits
        logits.square().mean().backward()
        results.append((logits.detach(), {name: part.grad for name, part in model.named_parameters()}))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_forward_hook_on_group(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    seen = []
    combined.qkv_proj.register_forward_hook(lambda group, args, outputs: seen.append((args[0], len(outputs))))
    combined(x)
    assert len(seen) == 1
    assert seen[0][0] is x
    assert seen[0][1] == 3


def test_error_in_hook_resets_group_state(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    for module in (combined.qkv_proj, combined.o_proj, combined.v_proj):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            combined(x)
        handle.remove()
        assert combined.qkv_proj._run is None
        assert not any("forward" in getattr(combined, name).__dict__ for name in PARTS)
        assert matmuls(combined) == 2
        assert_same(plain, combined, x)


def test_outputs_are_released_after_last_linear(combined: CombinedAttention, x: torch.Tensor) -> None:
    held, last = [], combined.o_proj.forward
    combined.o_proj.forward = lambda states: held.extend(combined.qkv_proj._run.outputs) or last(states)
    combined(x)
    assert held == [None] * 3


# Transformations


def test_compile_without_graph_break(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    compiled = torch.compile(combined, fullgraph=True, backend="eager")
    x = x.clone().requires_grad_()
    output = compiled(x)
    torch.testing.assert_close(output, plain(x))
    assert_same(plain, combined, x)  # without compilation, the module works as before
    assert matmuls(combined) == 2


def test_torch_export(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    exported = torch.export.export(combined, (x,), strict=False)
    assert set(exported.state_dict) == set(plain.state_dict())
    torch.testing.assert_close(exported.module()(x), plain(x))


def test_functional_call_with_other_weights(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    for changed in (set(PARTS), {"k_proj"}):
        weights = {name: parameter.detach() * 2 for name, parameter in plain.named_parameters() if name[:6] in changed}
        results = [functional_call(module, weights, (x,)) for module in (combined, plain)]
        torch.testing.assert_close(*results)
    assert_same(plain, combined, x)
    on_meta = {name: parameter.detach().to("meta") for name, parameter in plain.named_parameters()}
    assert functional_call(combined, on_meta, (x.to("meta"),)).shape == x.shape


def _loss(module: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(module, weights, (x,)).square().sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda module, x: vmap(module)(x),
        lambda module, x: jvp(module, (x,), (torch.ones_like(x),)),
        lambda module, x: grad(lambda x: module(x).sum())(x),
        lambda module, x: vmap(grad(partial(_loss, module)), (None, 0))(dict(module.named_parameters()), x),
        lambda module, x: torch.autograd.functional.hessian(lambda x: module(x).square().sum(), x[0, :1]),
        lambda module, x: _forward_mode(module, x),
    ],
    ids=["vmap", "jvp", "grad", "gradients of each sample", "hessian", "forward mode"],
)
def test_functional_transforms(
    plain: Attention, combined: CombinedAttention, x: torch.Tensor, transform: Callable[[nn.Module, torch.Tensor], Any]
) -> None:
    torch.testing.assert_close(transform(combined, x), transform(plain, x))


def _forward_mode(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return tuple(torch.autograd.forward_ad.unpack_dual(module(dual)))


def test_jit_trace(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(combined, x, check_trace=False)
        torch.testing.assert_close(traced(x * 2), plain(x * 2))


# Threads


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Switch threads after almost every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("shared_input", [False, True])
def test_concurrent_forward_in_threads(plain: Attention, combined: CombinedAttention, shared_input: bool) -> None:
    """Run with and without gradients concurrently, on one input or several."""
    rows = [inputs(4) * (1 if shared_input else number) for number in range(1, 9)]
    batches = [rows[0]] * 8 if shared_input else rows
    expected = [torch.autograd.grad(plain(x).sum(), list(plain.parameters())) for x in batches]
    outputs = [plain(x).detach() for x in batches]
    start, errors = threading.Barrier(len(batches)), []

    def run(index: int) -> None:
        try:
            start.wait()
            for _ in range(40):
                with torch.set_grad_enabled(index % 2 == 0):
                    output = combined(batches[index])
                torch.testing.assert_close(output.detach(), outputs[index])
                if index % 2 == 0:
                    gradients = torch.autograd.grad(output.sum(), list(combined.parameters()))
                    torch.testing.assert_close(gradients, expected[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert combined.qkv_proj._run is None
    assert not any("forward" in getattr(combined, name).__dict__ for name in PARTS)
    assert matmuls(combined) == 2


def test_nested_forward_of_another_thread(plain: Attention, combined: CombinedAttention, x: torch.Tensor) -> None:
    other, got = torch.randn_like(x), []

    def run_the_other(module: nn.Module, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and type(module) is nn.Linear:
            thread = threading.Thread(target=lambda: got.append(combined(other)))
            thread.start()
            thread.join()

    for register in (register_module_forward_pre_hook, register_module_forward_hook):
        handle = register(run_the_other)
        try:
            output = combined(x)
        finally:
            handle.remove()
        torch.testing.assert_close(output, plain(x))
    assert len(got) == 8
    for output in got:
        torch.testing.assert_close(output, plain(other))
    assert_same(plain, combined, x)
