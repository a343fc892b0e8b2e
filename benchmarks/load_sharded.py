"""Compare loading a checkpoint over two ranks with transformers' sharded loading (`DistributedConfig`).

Each measurement starts two new processes with warm file caches and one thread each. Imports do not count. Of the two
ranks, the longer time and the larger memory are reported. `anonymous memory` is the peak of memory without a file
behind it, minus its value before the load. `read / model` is the size of the slices that a rank holds, relative to the
checkpoint.

nrl_models and transformers leave dense parameters in memory-mapped pages, which the first forward reads. Therefore
compare the times that include the first forward. The null ratio compares transformers with itself: each measurement
with the next one. Without noise, it would be 1.

With `tp`, nrl_models takes 0.05 to 0.15 s longer than transformers to load a dense model. Before it reads weights, it
checks plan and checkpoint on the meta device, and all ranks must agree. It also creates each DTensor twice: on the meta
device, and with values. This time grows with the number of tensors, not with their size.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.load import MAKE
from benchmarks.reporting import Row, arguments, child, median, null_ratio, publish
from benchmarks.train_step import Peak

CONTENDERS = ("nrl_models", "transformers")


def load(which: str, layout: str, path: str) -> None:
    """Measure once. Print the larger figures of the two ranks."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_load_rank, (which, layout, path, folder), nprocs=2)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    print(json.dumps({key: max(rank[key] for rank in ranks) for key in ranks[0]}))


def _load_rank(rank: int, which: str, layout: str, path: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    options: dict[str, Any]
    from_pretrained: Callable[..., Any]
    if which == "nrl_models":
        import nrl_models
        from nrl_models import registry

        for architecture in ("LlamaForCausalLM", "MixtralForCausalLM"):
            registry.model_class(architecture)  # imports do not count
        import_module("nrl_models.loading.sharded")
        from_pretrained = nrl_models.AutoModelForCausalLM.from_pretrained

        options = {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=(layout,))}
    else:
        import transformers.models.llama.modeling_llama
        import transformers.models.mixtral.modeling_mixtral
        from transformers.distributed import DistributedConfig

        from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
        sizes: dict[str, Any] = {f"{layout}_size": 2}
        options = {"distributed_config": DistributedConfig(**sizes)}
    dist.barrier()
    with Peak() as peak:
        started = time.perf_counter()
        model: Any = from_pretrained(path, **options)
        took = time.perf_counter() - started
    with torch.no_grad():
        started = time.perf_counter()
        model(torch.arange(8)[None], use_cache=False)
        both = took + time.perf_counter() - started
    read = model.sharding.loaded_bytes if which == "nrl_models" else 0
    measurement = {"load": took, "both": both, "anonymous": peak.rise, "read": read}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measurement))
    dist.barrier()
    os._exit(0)  # destroying the gloo process group takes seconds


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=3)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("dense", "dense, 40 layers", "Mixtral"):
            path = str(Path(folder) / kind)
            size = child(MAKE, kind, path)["bytes"]
            for layout in ("tp", "fsdp"):
                measured: dict[str, list[Row]] = {name: [] for name in CONTENDERS}
                for run in range(options.runs + 1):  # alternate, so that a slow minute slows both; the first warms up
                    for name in CONTENDERS:
                        code = f"from benchmarks.load_sharded import load; load({name!r}, {layout!r}, {path!r})"
                        measurement = child(code)
                        if run:
                            measured[name].append(measurement)
                ours, theirs = measured.values()
                rows.append(
                    {
                        "checkpoint": f"{kind}, {size / 1e9:.2f} GB",
                        "mesh": f"{layout}=2",
                        "load, s": median(ours, "load"),
                        "transformers, s": median(theirs, "load"),
                        "with first forward, s": median(ours, "both"),
                        "transformers with first forward, s": median(theirs, "both"),
                        "with first forward, ours / transformers": median(ours, "both") / median(theirs, "both"),
                        "null ratio": null_ratio([row["both"] for row in theirs]),
                        "read / model": median(ours, "read") / size,
                        "anonymous memory / model": median(ours, "anonymous") / size,
                        "transformers' anonymous memory / model": median(theirs, "anonymous") / size,
                    }
                )
    publish("load_sharded", "Loading bf16 checkpoints on two CPU ranks", rows, options.out)


if __name__ == "__main__":
    main()
