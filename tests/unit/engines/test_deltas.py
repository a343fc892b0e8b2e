"""The delta codec is bit-exact for every dtype, small, and raises an error for invalid input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nrl_models.common.upstream_torch import TorchDispatchMode
from nrl_models.engines.transfer.deltas import DeltaWriter, patched
from nrl_models.errors import EngineError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def moved(old: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Return a copy with changed bits in some elements."""
    new = old.clone().contiguous()
    if old.dtype is torch.bool:
        return new ^ (torch.rand(old.shape, generator=generator) < share)
    flat = new.reshape(-1).view(torch.uint8).reshape(-1, old.element_size())
    changed = torch.rand(len(flat), generator=generator) < share
    flat[changed] ^= torch.randint(1, 256, (int(changed.sum()), flat.shape[1]), generator=generator).to(torch.uint8)
    return new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 1.0])
def test_patched_tensors_are_bit_exact(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (300, 1000), "b": (), "c": (7,), "d": (0, 3), "e": (70_000, 2)}
    old = {name: (torch.randn(shape, generator=generator) * 3).to(dtype) for name, shape in shapes.items()}
    old["a"] = old["a"].T  # not contiguous
    new = {name: moved(tensor, share, generator) for name, tensor in old.items()}
    copies = {name: tensor.clone() for name, tensor in old.items()}
    writer = DeltaWriter()
    differ = {name for name in old if writer.add(name, old[name], new[name])}
    assert differ == {name for name in old if not torch.equal(bits(old[name]), bits(new[name]))}
    patched_tensors = dict(patched(old, *writer.message()))
    assert patched_tensors.keys() == differ
    for name, tensor in patched_tensors.items():
        assert (tensor.dtype, tensor.shape) == (new[name].dtype, new[name].shape)
        assert torch.equal(bits(tensor), bits(new[name]))
    for name, tensor in old.items():
        assert torch.equal(bits(tensor), bits(copies[name]))


class CountedElements(TorchDispatchMode):
    """Count the elements that operations compute. Views compute none."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.elements += result.numel()
        return result


def test_negative_zero_and_nan_are_sent() -> None:
    old = torch.zeros(100_000)
    new = old.clone()
    new[70_000], new[99_999] = -0.0, float("nan")
    writer = DeltaWriter()
    assert writer.add("x", old, new)
    ((_, patched_tensor),) = patched({"x": old}, *writer.message())
    assert torch.equal(bits(patched_tensor), bits(new))
    assert not DeltaWriter().add("x", new, new.clone())  # NaN equals itself


@pytest.mark.parametrize(("dtype", "max_ratio"), [(torch.bfloat16, 0.021), (torch.float32, 0.016)])
def test_delta_size_of_one_percent_changes(dtype: torch.dtype, max_ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1000, 2000, generator=generator).to(dtype)
    new = moved(old, 0.01, generator)
    writer = DeltaWriter()
    writer.add("x", old, new)
    tensors, _ = writer.message()
    assert writer.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert writer.nbytes <= max_ratio * old.nbytes


def test_mostly_changed_tensor_is_sent_without_comparing_or_copying_it() -> None:
    old = torch.randn(300_000)
    new = old + 1
    writer = DeltaWriter()
    with CountedElements() as counted:
        assert writer.add("x", old, new)
    assert counted.elements < 10_000
    ((_, sent),) = writer.message()[0].items()
    assert sent.data_ptr() == new.data_ptr()


def test_invalid_message_raises() -> None:
    old = {"x": torch.zeros(1000), "y": torch.zeros(4)}
    writer = DeltaWriter()
    changed = old["x"].clone()
    changed[[3, 900]] = 1.0
    writer.add("x", old["x"], changed)
    writer.add("y", old["y"], torch.ones(4))
    tensors, text = writer.message()
    assert {name for name, _ in patched(old, tensors, text)} == {"x", "y"}
    far = tensors["steps"].to(torch.int64) * 60
    for damaged, message in (
        ((old | {"y": torch.zeros(5)}, tensors, text), "complete 'y' that"),
        (({"y": old["y"]}, tensors, text), "'x', which the last"),
        (({**old, "x": torch.zeros(800)}, tensors, text), "past its end"),
        ((old, tensors | {"steps": far.to(torch.uint16)}, text), "past its end"),
        ((old, tensors | {"steps": tensors["steps"][:1]}, text), "too few changes"),
        ((old, tensors | {"steps": tensors["steps"] * 0}, text), "past its end"),
        ((old, tensors | {"values.4": tensors["values.4"].float()}, text), "too few changes"),
        ((old, tensors, {}), "has no list of"),
        ((old, tensors, {"sparse": "[[1, 2]]"}), "has no list of"),
        ((old, tensors, {"sparse": '[["x", -2]]'}), "has no list of"),
        ((old, tensors, {"sparse": "[" * 100_000}), "has no list of"),
    ):
        with pytest.raises(EngineError, match=message):
            list(patched(*damaged))
