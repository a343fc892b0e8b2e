"""Section `refit`: streaming every weight, whole and in buckets, against one copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import SEPARATE, alternate, config_of, contender, labeled, ratio
from benchmarks.gpu.outcomes import CheckError
from benchmarks.reporting import Row
from nrl_models.common.state_dict.buckets import grouped_tensors, on_host

COPY, COPY_AGAIN = "one copy", "one copy, again"
BY_TENSOR = "copies of each tensor"


def cases(context: Context) -> dict[str, Case]:
    """Return a case per shape and target."""
    return {
        f"{shape}, to the {target}": partial(_compare, shape, target, context)
        for shape in ("Llama 1B", "Qwen3-MoE 30B-A3B")
        for target in ("device", "host")
    }


def _compare(shape: str, target: str, context: Context) -> list[Row]:
    config = config_of(shape, context, bytes_per_parameter=2 * 4)
    model = contender(SEPARATE, config, context).to(torch.bfloat16)
    pinned = target == "host" and context.device.type == "cuda"
    place: dict[str, Any] = {"pin_memory": True} if pinned else {}
    place["device"] = context.device if target == "device" else torch.device("cpu")
    plan = list(model.state_dict_adapter.export_plan())
    received = {name: torch.empty(shape, dtype=dtype, **place) for name, shape, dtype in plan}
    others = {name: torch.empty_like(tensor, **place) for name, tensor in received.items()}
    size = sum(tensor.nbytes for tensor in received.values())
    source = torch.ones(size, dtype=torch.uint8, device=context.device)
    copied = torch.empty(size, dtype=torch.uint8, **place)
    sources = {name: torch.ones_like(tensor, device=context.device) for name, tensor in received.items()}
    bucket = 2**16 if context.tiny else 2**28
    ways: dict[str, Callable[[], object]] = {
        COPY: lambda: copied.copy_(source, non_blocking=True),
        COPY_AGAIN: lambda: copied.copy_(source, non_blocking=True),
        BY_TENSOR: lambda: _copy_each(sources, others),
        "iter_export": lambda: _stream(model, received, None),
        "iter_export in buckets": lambda: _stream(model, received, bucket),
    }
    if target == "host":
        ways["iter_export, through pinned buckets"] = lambda: _through_host(model, received, bucket)
    seconds = alternate(ways, context.device, 3 if context.tiny else 9)
    rows: list[Row] = [
        {
            "model": labeled(shape, config),
            "target": "pinned host memory" if pinned else target,
            "way": name,
            "GB": size / 1e9,
            "tensors": 1 if name in (COPY, COPY_AGAIN) else len(received),
            "ms": 1e3 * median(took),
            "time / one copy": ratio(seconds, name, COPY),
            "time / copies of each tensor": ratio(seconds, name, BY_TENSOR),
        }
        for name, took in seconds.items()
    ]
    expected = model.state_dict_adapter.to_hf(model.state_dict())
    wrong = [name for name, tensor in received.items() if not torch.equal(tensor, expected[name].to(tensor.device))]
    if wrong:
        raise CheckError(f"{len(wrong)} of {len(received)} received tensors differ, first {wrong[0]}", rows)
    return rows


def _copy_each(sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    for name, tensor in sources.items():
        targets[name].copy_(tensor, non_blocking=True)


@torch.no_grad()
def _stream(model: Any, received: dict[str, torch.Tensor], max_bytes: int | None) -> None:
    for name, tensor in model.state_dict_adapter.iter_export(model, max_bytes=max_bytes):
        received[name].copy_(tensor, non_blocking=True)


@torch.no_grad()
def _through_host(model: Any, received: dict[str, torch.Tensor], max_bytes: int) -> None:
    """Stream all weights as the transfer to vLLM reads them."""
    for bucket in grouped_tensors(model.state_dict_adapter.iter_export(model), max_bytes):
        for name, tensor in on_host(bucket):
            received[name].copy_(tensor)
