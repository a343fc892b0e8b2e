"""Running one layer of a model separately, with the same inputs as in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from nrl_models.parity.components import Call, calls_of, run_layer
from nrl_models.parity.levels import compare_components


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, mask: torch.Tensor, x: torch.Tensor, *, shift: float = 0.0, **_: Any) -> torch.Tensor:
        return self.weight * x * mask + shift


class Special(Scale):
    """A subclass, which also is a scale."""


class Silent(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        self.seen = x


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second, self.special, self.silent = Scale(), Scale(), Special(), Silent()
        self.to(dtype)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        assert not use_cache
        for turn in range(2):
            x = self.first(ids, x, shift=turn)
        self.silent(x)
        return self.special(ids, x=self.second(ids, x))


INPUTS = {"x": torch.tensor([1.0, 2.0]), "ids": torch.tensor([1, 3])}


def test_calls_of_records_first_call_of_each_layer() -> None:
    calls = calls_of(Model(), {Scale}, INPUTS)
    assert calls.keys() == {"first", "second"}
    assert calls["first"].kwargs == {"shift": 0}
    assert torch.equal(calls["first"].args[0], INPUTS["ids"])
    assert torch.equal(calls["first"].args[1], INPUTS["x"])
    assert calls_of(Model(), {Special}, INPUTS).keys() == {"special"}


def test_inputs_are_cast_except_token_ids() -> None:
    call = calls_of(Model(torch.bfloat16), {Scale}, INPUTS)["first"]
    assert [value.dtype for value in call.args] == [torch.int64, torch.bfloat16]


def test_calls_of_leaves_no_gradients_or_hooks() -> None:
    model = Model()
    call = calls_of(model, {Scale}, INPUTS)["second"]
    assert not call.args[1].requires_grad
    assert not run_layer(model.second, call)[0].requires_grad
    with pytest.raises(TypeError, match="unknown"):
        calls_of(model, {Scale}, INPUTS | {"unknown": torch.ones(1)})
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_with_random_input_replaces_only_hidden_states() -> None:
    mask, hidden, bias = torch.ones(2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3)
    for call in (Call((mask, hidden, bias), {"scale": bias}), Call((mask,), {"hidden_states": hidden, "bias": bias})):
        new = call.with_random_input(seed=1)
        values, before = [*new.args, *new.kwargs.values()], [*call.args, *call.kwargs.values()]
        assert [value is old for value, old in zip(values, before, strict=True)].count(False) == 1
        changed = values[1]
        assert (changed.shape, changed.dtype) == (hidden.shape, hidden.dtype)
        assert changed.ne(0).all()
        assert hidden.eq(0).all()
        again, other = call.with_random_input(seed=1), call.with_random_input(seed=2)
        assert torch.equal(changed, [*again.args, *again.kwargs.values()][1])
        assert not torch.equal(changed, [*other.args, *other.kwargs.values()][1])


def test_with_random_input_without_hidden_states() -> None:
    call = Call((torch.tensor([1, 2]), None), {"flag": True})
    assert call.with_random_input(seed=0) is call


class Returns(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> Any:
        return self.output


A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [A]),
        ((A, None, B), [A, B]),
        ([A, (B, [C])], [A, B, C]),
        ({"hidden": A, "auxiliary": (B, None)}, [A, B]),
        (BaseModelOutput(last_hidden_state=A, hidden_states=(B, C)), [A, B, C]),
        (None, []),
    ],
)
def test_run_layer_returns_every_tensor(output: Any, expected: list[torch.Tensor]) -> None:
    # Components that are not tensors are not compared.
    tensors = run_layer(Returns(output), Call((), {}))
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in expected]


def test_layer_without_output_is_not_compared() -> None:
    checks = {row.check.removeprefix("level 2: ") for row in compare_components(Model(), Model(), INPUTS)}
    assert checks == {"Model", "Scale", "Special"}
