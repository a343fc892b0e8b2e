"""Compare a training step (forward, backward, optimizer) with transformers and, if installed, Liger and NeMo AutoModel.

The benchmark runs in one process, and with FSDP2 in two processes. All contenders hold the same weights, receive the
same tokens and take turns after every step, so that noise of the machine affects all of them. Times and memory are
medians, and ratios are medians of the ratios of each turn, so a ratio can differ from the quotient of two medians. MFU
is relative to the fastest matmul in the same process. Each shape has the widths of the named size, one layer and a
small vocabulary.

On a CPU a step is one sequence of 128 tokens in fp32 with SGD, to limit memory and time. Use the CPU figures only to
compare `combined` (fused projections) with `separate`: they do not show training speed. On a GPU a step is 4096 tokens
in bf16 with AdamW. Liger and NeMo AutoModel are measured on a GPU only.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.reporting import Row, arguments, child, publish

SHAPES: dict[str, dict[str, Any]] = {
    "1B, 1 layer": {
        "kind": "Llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4000,
    },
    "8B, 1 layer": {
        "kind": "Llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4000,
    },
    "MoE 30B-A3B, 1 layer, 16 experts": {
        "kind": "Qwen3Moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 4000,
    },
}  # fmt: skip

TOKENS = {"cpu": 128, "cuda": 4096}
"""Length of one sequence."""


def config_of(shape: str) -> Any:
    """Return the configuration of a shape."""
    import transformers

    values = dict(SHAPES[shape])
    kind = values.pop("kind")
    return getattr(transformers, f"{kind}Config")(**values, architectures=[f"{kind}ForCausalLM"])


def contenders(shape: str, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Return a function that builds each model, by name."""
    import torch
    import transformers

    from nrl_models import AutoModelForCausalLM

    config = config_of(shape)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32

    def by_layer(model: Any) -> Any:
        for layer in model.model.layers:
            layer.compile()
        return model

    found: dict[str, Callable[[], Any]] = {
        "combined": lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, combine=True),
        "separate": lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, combine=False),
        "transformers": lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=dtype),
    }
    if compiled:
        found["combined, layers compiled"] = lambda: by_layer(
            AutoModelForCausalLM.from_config(config, dtype=dtype, combine=True)
        )
        found["transformers, layers compiled"] = lambda: by_layer(
            transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        )
    if not absent("liger_kernel"):
        from liger_kernel.transformers import AutoLigerKernelForCausalLM

        found["transformers with Liger"] = lambda: AutoLigerKernelForCausalLM.from_config(config, dtype=dtype)
    if not absent("nemo_automodel"):
        from nemo_automodel import NeMoAutoModelForCausalLM

        found["NeMo AutoModel"] = lambda: NeMoAutoModelForCausalLM.from_config(config, torch_dtype=dtype)
    return found


def absent(package: str) -> str:
    """Return the reason to skip a peer that requires a GPU, or an empty string."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    return "not installed" if find_spec(package) is None else ""


class Peak:
    """Record the largest increase in memory within a `with` block, in bytes."""

    def __enter__(self) -> Peak:
        import torch

        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
            return self
        self.base = self.peak = _anonymous()
        self.done = False
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done:
            self.peak = max(self.peak, _anonymous())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        import torch

        if self.cuda:
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.done = True
            self.thread.join()
            self.peak = max(self.peak, _anonymous())  # on a busy machine, the thread may have slept until now

    @property
    def rise(self) -> int:
        """Return the increase in bytes."""
        return self.peak - self.base


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def fastest_matmul(device: Any, dtype: Any) -> float:
    """Return the floating-point operations per second of the largest of a few matmuls."""
    import torch

    best = 0.0
    size = 8192 if device.type == "cuda" else 1536
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(6):
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def measure(models: dict[str, Any], runs: int, tokens: Any, base: str) -> dict[str, Row]:
    """Time alternating steps of all models. Return tokens per second, MFU, peak memory and time relative to `base`."""
    import torch

    make = torch.optim.AdamW if tokens.is_cuda else torch.optim.SGD
    optimizers = {name: make(model.parameters(), lr=1e-4) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    memory: dict[str, int] = dict.fromkeys(models, 0)
    losses: dict[str, float] = {}
    for run in range(runs + 2):  # the first two warm up, and compile
        # Every model goes first equally often: a model that runs after another one finds different caches.
        order = list(models.items())[:: 1 if run % 2 else -1]
        for name, model in order:
            gc.collect()
            with Peak() as memory_peak:
                started = time.perf_counter()
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
                if tokens.is_cuda:
                    torch.cuda.synchronize()
                took = time.perf_counter() - started
            losses.setdefault(name, loss.item())
            if run >= 2:
                times[name].append(took)
                memory[name] = max(memory[name], memory_peak.rise)
    spread = max(losses.values()) - min(losses.values())
    assert spread < 1e-2, f"the contenders differ: {losses}"
    first = next(iter(models.values()))
    operations = 6 * active_parameters(first) * tokens.numel()
    peak = fastest_matmul(tokens.device, next(first.parameters()).dtype)
    return {
        name: {
            "tokens": tokens.numel() / statistics.median(took),
            "mfu": operations / statistics.median(took) / peak,
            "matmul": peak,
            "memory": memory[name],
            "ratio": statistics.median(seconds / other for seconds, other in zip(took, times[base], strict=True)),
        }
        for name, took in times.items()
    }


def build(makers: dict[str, Callable[[], Any]], device: Any) -> dict[str, Any]:
    """Build every model with the weights of the first."""
    models: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for name, make in makers.items():
        import torch

        torch.manual_seed(0)
        model = make().to(device).train()
        if not weights:
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(weights)
        models[name] = model
    return models


def single(shape: str, runs: int) -> None:
    """Measure in one process. Print a row for each contender."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = build(contenders(shape, compiled=True), device)
    tokens = torch.randint(0, 4000, (1, TOKENS[device.type]), generator=torch.Generator().manual_seed(0)).to(device)
    print(json.dumps(measure(models, runs, tokens, "transformers")))


def active_parameters(model: Any) -> int:
    """Return the number of matmul parameters per token: active experts, and the output embedding only."""
    config, head = model.config, model.get_output_embeddings().weight
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            if (chosen := getattr(config, "num_experts_per_tok", None)) is not None:  # None for a convolution
                total += parameter.numel() * chosen // parameter.shape[0]
        elif parameter.ndim == 2 and ("embed_tokens" not in name or parameter is head):
            total += parameter.numel()
    return total


def sharded(shape: str, runs: int) -> None:
    """Measure FSDP2 over two processes, combined and separate. Print a row for each, from the slower rank."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sharded_rank, (shape, runs, folder), nprocs=2)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    slower = {name: min((rank[name] for rank in ranks), key=lambda row: row["tokens"]) for name in ranks[0]}
    print(json.dumps(slower))


def _sharded_rank(rank: int, shape: str, runs: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from nrl_models.distributed import parallelize

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    kind = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    makers = {
        name: make for name, make in contenders(shape, compiled=False).items() if name in ("combined", "separate")
    }
    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("fsdp",))
    models = {name: parallelize(model, mesh) for name, model in build(makers, device).items()}
    tokens = torch.randint(0, 4000, (1, TOKENS[kind]), generator=torch.Generator().manual_seed(rank)).to(device)
    found = measure(models, runs, tokens, "separate")
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def _row(shape: str, model: str, ranks: str, measured: Row, tokens: float | str) -> Row:
    return {
        "shape": shape,
        "model": model,
        "ranks": ranks,
        "tokens/s": tokens,
        "MFU": measured.get("mfu", ""),
        "step memory, GB": measured["memory"] / 1e9 if measured else "",
        "time, ratio": measured.get("ratio", ""),
    }


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=4)
    rows: list[Row] = []
    for shape in SHAPES:
        found = child(f"from benchmarks.train_step import single; single({shape!r}, {options.runs})")
        over = child(f"from benchmarks.train_step import sharded; sharded({shape!r}, {2 * options.runs})")
        rows += [_row(shape, name, "1", row, row["tokens"]) for name, row in found.items()]
        rows += [_row(shape, name, "2, FSDP2", row, 2 * row["tokens"]) for name, row in over.items()]
    peers = {"transformers with Liger": "liger_kernel", "NeMo AutoModel": "nemo_automodel"}
    rows += [_row("any", name, "1", {}, why) for name, package in peers.items() if (why := absent(package))]
    notes = [
        "The last column is the time against that of transformers; under FSDP2 against that of separate projections.",
    ]
    publish("train_step", "Training step", rows, options.out, notes)


if __name__ == "__main__":
    main()
