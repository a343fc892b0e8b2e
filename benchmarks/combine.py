"""Compare fused (combined) projections with separate ones: a forward, or a forward and backward, on one input.

A ratio below one means that combining is faster. In each round, both run once; the figures are medians of the rounds'
ratios. `combine="auto"` does not fuse, because fusing is not faster on the whole.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import LlamaConfig

from benchmarks.reporting import Row, arguments, publish
from nrl_models import AutoModelForCausalLM

SIZES = {"256": (256, 704, 8), "1024": (1024, 2816, 4), "2048": (2048, 8192, 2)}
"""Hidden size, intermediate size, number of layers."""

WORKLOADS = {"decode 1 token": (1, 1, False), "prefill 512": (1, 512, False), "train 4 x 128": (4, 128, True)}
"""Batch size, sequence length, and whether to run a backward."""


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=9)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for size, (hidden, intermediate, layers) in SIZES.items():
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            vocab_size=1024,
            architectures=["LlamaForCausalLM"],
        )
        for dtype in (torch.float32, torch.bfloat16):
            models = [
                AutoModelForCausalLM.from_config(config, dtype=dtype, device=device, combine=combine)
                for combine in (True, False)
            ]
            row: Row = {"hidden size": size, "dtype": str(dtype).removeprefix("torch.")}
            for workload, (batch, length, train) in WORKLOADS.items():
                inputs = torch.randint(1024, (batch, length), device=device)
                pairs = [[step(model, inputs, train) for model in models] for _ in range(options.runs + 2)][2:]
                row[workload] = median(combined / separate for combined, separate in pairs)
            rows.append(row)
    title = f"Fused and separate projections, Llama layers on a {device.type.upper()}"
    publish("combine", title, rows, options.out)


def step(model: torch.nn.Module, input_ids: torch.Tensor, train: bool) -> float:
    """Return the seconds of one step."""
    if input_ids.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    if train:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        model.zero_grad()
    else:
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False)
    if input_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
