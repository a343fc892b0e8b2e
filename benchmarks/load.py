"""Compare three ways to load a checkpoint: nrl_models, transformers, and a bare read and copy of the files.

Each measurement is the first load in a new process with warm file caches. Imports do not count. `anonymous memory` is
the peak of memory without a file behind it, minus its value before the load. A load can take less time than a bare read
and copy, because it maps files into memory without copying them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.reporting import Row, arguments, child, median, publish

MAKE = """
import sys, torch, transformers, json
kind, path = sys.argv[1:]
torch.set_default_dtype(torch.bfloat16)
if kind.startswith("dense"):
    config = transformers.LlamaConfig(hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=9 if kind == "dense" else 40,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=32000)
    model = transformers.LlamaForCausalLM(config)
elif kind == "Mixtral":
    config = transformers.MixtralConfig(hidden_size=1024, intermediate_size=512, num_local_experts=64,
        num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=32000)
    model = transformers.MixtralForCausalLM(config)
else:
    config = transformers.Qwen3MoeConfig(hidden_size=1024, intermediate_size=2048, moe_intermediate_size=768,
        num_experts=32, num_experts_per_tok=8, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, vocab_size=32000)
    model = transformers.Qwen3MoeForCausalLM(config)
model.save_pretrained(path, max_shard_size="500MB")
print(json.dumps({"bytes": sum(p.nbytes for p in model.parameters())}))
"""

LOAD = """
import sys, json, time, threading
which, path = sys.argv[1:]
import torch, transformers, accelerate
transformers.utils.logging.disable_progress_bar()
if which == "nrl_models":
    from nrl_models import AutoModelForCausalLM, registry
    for name in ("Llama", "Mixtral", "Qwen3Moe"):
        registry.model_class(f"{name}ForCausalLM")
else:
    from transformers import AutoModelForCausalLM
    import transformers.models.llama.modeling_llama, transformers.models.mixtral.modeling_mixtral
    import transformers.models.qwen3_moe.modeling_qwen3_moe

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

base = peak = anonymous()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
watcher = threading.Thread(target=watch); watcher.start()
started = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(path)
loaded = time.perf_counter()
done = True; watcher.join(); peak = max(peak, anonymous())
started_forward = time.perf_counter()
with torch.no_grad():
    model(torch.arange(8)[None])
forward = time.perf_counter() - started_forward
print(json.dumps({"load": loaded - started, "both": loaded - started + forward, "anonymous": peak - base}))
"""

COPY = """
import sys, json, time, pathlib
from concurrent.futures import ThreadPoolExecutor
import torch
from safetensors import safe_open
files = [safe_open(path, "pt") for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors"))]
keys = [(file, key) for file in files for key in file.keys()]
started = time.perf_counter()
with ThreadPoolExecutor(2) as pool:
    tensors = list(pool.map(lambda entry: entry[0].get_tensor(entry[1]).clone(), keys))
print(json.dumps({"load": time.perf_counter() - started}))
"""


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=7)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("dense", "Mixtral", "Qwen3-MoE"):
            path = str(Path(folder) / kind)
            size = child(MAKE, kind, path)["bytes"]
            measured: dict[str, list[Row]] = {"nrl_models": [], "transformers": [], "copy": []}
            for run in range(options.runs + 1):  # alternate, so that a slow minute slows all; the first warms the cache
                for which in ("nrl_models", "transformers"):
                    measured[which].append(child(LOAD, which, path))
                measured["copy"].append(child(COPY, path))
                if run == 0:
                    for results in measured.values():
                        results.clear()
            ours, theirs, copy = measured["nrl_models"], measured["transformers"], measured["copy"]
            rows.append(
                {
                    "checkpoint": f"{kind}, {size / 1e9:.2f} GB",
                    "load, s": median(ours, "load"),
                    "transformers, s": median(theirs, "load"),
                    "ours / transformers": median(ours, "load") / median(theirs, "load"),
                    "with first forward, ours / transformers": median(ours, "both") / median(theirs, "both"),
                    "ours / bare read and copy": median(ours, "load") / median(copy, "load"),
                    "anonymous memory / model": median(ours, "anonymous") / size,
                    "transformers' anonymous memory / model": median(theirs, "anonymous") / size,
                }
            )
    publish("load", "Loading bf16 checkpoints on a CPU", rows, options.out)


if __name__ == "__main__":
    main()
