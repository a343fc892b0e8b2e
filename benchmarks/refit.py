"""Compare exporting all weights of a 1.4 GB model with one copy of the same size.

The consumer copies each tensor into separate memory, as an engine does. `one copy` copies a single tensor of the same
total size into allocated memory. `256 MB at a time` first fills a bucket, which is a second copy; the column `tensors
copied to export` does not count it. We expect at most 1.2 times the time of one copy for `iter_export`, which yields
views, and 2.2 times with buckets. Noise can add some percent.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import LlamaConfig

from benchmarks.reporting import Row, arguments, median_ratio, publish
from nrl_models import AutoModelForCausalLM
from nrl_models.family import FamilyModel

CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=13,
    num_attention_heads=32,
    num_key_value_heads=4,
    vocab_size=32_000,
    architectures=["LlamaForCausalLM"],
)
"""697 million parameters: 1.4 GB in bfloat16."""


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=7)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16, device="cpu")
    adapter = model.state_dict_adapter
    plan = adapter.export_plan()
    received = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in plan}
    size = sum(tensor.nbytes for tensor in received.values())
    source, target = (torch.ones(size // 2, dtype=torch.bfloat16) for _ in range(2))
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copied = sum(tensor.untyped_storage().data_ptr() not in storages for _, tensor in adapter.iter_export(model))
    ways = {
        "one copy": lambda: target.copy_(source),
        "iter_export": lambda: stream(model, received, None),
        "iter_export, 256 MB at a time": lambda: stream(model, received, 2**28),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.runs + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    rows: list[Row] = []
    for name, found in seconds.items():
        rows.append(
            {
                "way": name,
                "GB": size / 1e9,
                "tensors": 1 if name == "one copy" else len(plan),
                "tensors copied to export": "" if name == "one copy" else copied,
                "seconds": median(found[1:]),
                "ratio": median_ratio(found[1:], seconds["one copy"][1:]),
            }
        )
    publish("refit", "Streaming weights to a consumer", rows, options.out)


@torch.no_grad()
def stream(model: FamilyModel, received: dict[str, torch.Tensor], max_bytes: int | None) -> None:
    """Stream all weights once."""
    for name, tensor in model.state_dict_adapter.iter_export(model, max_bytes=max_bytes):
        received[name].copy_(tensor)


if __name__ == "__main__":
    main()
