"""Measure saving a model and a resumable checkpoint, with and without fsync.

The baselines are transformers' `save_pretrained`, and `torch.save` of the model's and the optimizer's state. Neither
calls fsync, and neither keeps the last checkpoint intact until the new one is complete. Each measurement is the
wall-clock time of a save that overwrites an older one, in a new process and the current directory (for a tiny model,
the median of 21 saves). Imports and the first save do not count.

`NRL_MODELS_FSYNC=0` turns fsync off in nrl_models. `--against DIRECTORY` also measures another checkout of nrl_models,
without fsync. Seconds are medians, and ratios are medians of the ratios of each pair of saves, so a ratio can differ
from the quotient of two medians. The null ratio compares the baseline with itself: each measurement with the next one.
Without noise, it would be 1.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.reporting import RESULTS, Row, child, median, median_ratio, null_ratio, publish

SAVE = """
import json, os, statistics, sys, time
import torch, transformers
from transformers import LlamaConfig
transformers.utils.logging.disable_progress_bar()
who, what, size, folder, others = sys.argv[1:]
if others:
    sys.path.insert(0, others)
torch.set_num_threads(1)
big = size == "large"
config = LlamaConfig(hidden_size=1024 if big else 64, intermediate_size=2816 if big else 128,
    num_hidden_layers=8 if big else 2, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=32000 if big else 512)
torch.manual_seed(0)
if who == "peer":
    from transformers import LlamaForCausalLM
    model = LlamaForCausalLM(config).to(torch.bfloat16)
else:
    from nrl_models import registry
    import nrl_models
    assert not others or nrl_models.__file__.startswith(others), nrl_models.__file__
    model = registry.model_class("LlamaForCausalLM")(config).to(torch.bfloat16)
if what == "resume":
    if who != "peer":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from nrl_models.distributed import parallelize, save_checkpoint
        dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
        model = parallelize(model, init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))) or model
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

def save():
    if what == "model":
        model.save_pretrained(folder)
    elif who == "peer":
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state.pt")
    else:
        save_checkpoint(folder, model, optimizer, {"step": 1})

os.sync()  # what others wrote does not count
save()
os.sync()
seconds = []
for _ in range(1 if big else 21):
    started = time.perf_counter()
    save()
    seconds.append(time.perf_counter() - started)
size = sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)
print(json.dumps({"seconds": statistics.median(seconds), "bytes": size}), flush=True)
os._exit(0)
"""

NAMES = {"model": "`save_pretrained`", "resume": "`save_checkpoint`, with AdamW's state"}


def main() -> None:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="measurements of each; the median counts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--against", type=Path, help="another checkout of nrl_models to also measure")
    options = parser.parse_args()
    # (contender, checkout, whether it calls fsync)
    contenders = {"peer": ("peer", "", "0"), "ours": ("ours", "", "0"), "waiting": ("ours", "", "1")}
    if options.against:
        contenders["against"] = ("ours", str(options.against.resolve()), "0")
    rows: list[Row] = []
    for what, name in NAMES.items():
        for size in ("large", "tiny"):
            measured: dict[str, list[Row]] = {contender: [] for contender in contenders}
            for run in range(options.runs + 1):  # alternate, so that a slow minute slows all; the first warms up
                for contender, (who, others, waits) in contenders.items():
                    os.environ["NRL_MODELS_FSYNC"] = waits
                    with tempfile.TemporaryDirectory(dir=".") as folder:
                        found = child(SAVE, who, what, size, str(Path(folder) / "saved"), others)
                    if run:
                        measured[contender].append(found)
            rows.append(_row(f"{name}, {_text(measured['ours'][0]['bytes'])}", measured))
    publish("save", "Saving", rows, options.out)


def _row(what: str, measured: dict[str, list[Row]]) -> Row:
    row: Row = {"what": what}
    row |= {"peer, s": median(measured["peer"], "seconds"), "without fsync, s": median(measured["ours"], "seconds")}
    row["with fsync, s"] = median(measured["waiting"], "seconds")
    seconds = {name: [run["seconds"] for run in runs] for name, runs in measured.items()}
    row["without fsync / peer"] = median_ratio(seconds["ours"], seconds["peer"])
    row["with fsync / peer"] = median_ratio(seconds["waiting"], seconds["peer"])
    row["null ratio"] = null_ratio(seconds["peer"])
    if "against" in seconds:
        row["without fsync / other checkout"] = median_ratio(seconds["ours"], seconds["against"])
    return row


def _text(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size > 10e6 else f"{size / 1e3:.0f} kB"


if __name__ == "__main__":
    main()
