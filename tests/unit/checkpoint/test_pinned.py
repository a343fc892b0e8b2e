"""Copies through pinned memory: values, casts, several threads. On a CPU, the memory is ordinary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.common.checkpoint import pinned
from nrl_models.common.checkpoint.pinned import PinnedCopies
from nrl_models.loading import weights
from nrl_models.testing.suite.asserts import assert_same_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 8).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_larger_and_smaller_than_buffer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "BUFFER_BYTES", 256)
    copies = PinnedCopies(DEVICE)
    sources = [values(dtype, *shape) for shape in [(3,), (7, 5), (40, 11), (0, 4), (1,), (64, 4)] * 5]
    targets = [torch.zeros_like(source, device=DEVICE) for source in sources]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(copies.copy, targets, sources))
    copies.finish()
    assert all(torch.equal(target.cpu(), source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float16], ids=str)
def test_copies_cast_to_target_dtype(target_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "BUFFER_BYTES", 256)
    source, target = values(torch.bfloat16, 37, 5), torch.zeros(37, 5, dtype=target_dtype, device=DEVICE)
    copies = PinnedCopies(DEVICE)
    copies.copy(target, source)
    copies.finish()
    assert torch.equal(target.cpu(), source.to(target_dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("combine", [False, True])
def test_pinned_loading_matches_direct_loading(
    combine: bool, dtype: torch.dtype, mixtral_config: MixtralConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_config(mixtral_config).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    shapes: list[torch.Size] = []

    class RecordingCopies(PinnedCopies):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            shapes.append(source.shape)
            super().copy(target, source)

    monkeypatch.setattr(pinned, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(weights, "pinned_copies", RecordingCopies)
    monkeypatch.setattr(weights, "map_consecutive", lambda *_: None)
    actual = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, combine=combine)
    assert_same_tensors(actual.state_dict(), expected.state_dict())
    assert len(shapes) >= 30  # includes each expert, copied into its slice of the stack
