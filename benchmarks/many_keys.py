"""Measure the cost of tensor names: a checkpoint of 45,395 tensors in 163 files, named like DeepSeek-V3's.

The configuration is that of the published model (61 layers, 256 experts, MLA) with small widths (for `plan`, with its
own), so that copying values takes almost no time. Each measurement is CPU seconds in a new process, without imports.
Runs alternate with transformers doing the same work. The null ratio compares transformers with itself: each measurement
with the next one. Without noise, it would be 1.  `nrl-models plan` reads no values and uses the published widths.
"""

from __future__ import annotations

import tempfile
from statistics import median as median_of

from benchmarks.reporting import Row, arguments, child, median, null_ratio, publish

MAKE = """
import json, sys
from collections import defaultdict
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.core_model_loading import revert_weight_conversion

FILES = 163
folder = Path(sys.argv[1])
config = DeepseekV3Config(hidden_size=8, intermediate_size=4, moe_intermediate_size=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2,
    vocab_size=32, dtype="bfloat16", architectures=["DeepseekV3ForCausalLM"])
torch.manual_seed(0)
model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
model.config.save_pretrained(folder)
tensors = revert_weight_conversion(model, model.state_dict())
files = defaultdict(dict)
for number, (key, tensor) in enumerate(tensors.items()):
    files[number * FILES // len(tensors)][key] = tensor.clone()
weight_map = {}
for number, inside in files.items():
    name = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
    save_file(inside, folder / name, {"format": "pt"})
    weight_map |= dict.fromkeys(inside, name)
index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
print(json.dumps({"tensors": len(tensors), "files": len(files)}))
"""

MEASURE = """
import json, sys, tempfile, time
import torch, transformers, accelerate
from transformers import DeepseekV3Config
import transformers.models.deepseek_v3.modeling_deepseek_v3
transformers.utils.logging.disable_progress_bar()
which, path = sys.argv[1:]

def seconds(function):
    started = time.process_time()
    function()
    return time.process_time() - started

if which == "transformers":
    from transformers import AutoModelForCausalLM
else:
    from nrl_models import AutoModelForCausalLM
    import nrl_models.families.deepseek_v3.model
    from nrl_models.onboarding.estimate import Setting, estimate
    from nrl_models.onboarding.inspect import inspect
figures = {}
if which in ("transformers", "nrl_models"):
    started = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(path)
    figures["load"] = time.process_time() - started
    with tempfile.TemporaryDirectory() as folder:
        figures["save"] = seconds(lambda: model.save_pretrained(folder))
if which == "nrl_models":
    adapter = model.state_dict_adapter
    for _ in range(2):
        figures["export"] = seconds(lambda: [None for _ in adapter.iter_export(model)])
if which == "inspect":
    figures["inspect"] = seconds(lambda: inspect(path))
if which == "plan":
    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])
    figures["plan"] = seconds(lambda: estimate(config, Setting({"fsdp": 32, "ep": 16})))
print(json.dumps(figures))
"""

LIMITS: dict[str, float] = {"export": 1.0, "inspect": 3.0, "plan": 10.0}
"""CPU seconds of commands that transformers does not have."""


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=3)
    measured: dict[str, list[Row]] = {"nrl_models": [], "transformers": [], "inspect": [], "plan": []}
    with tempfile.TemporaryDirectory() as folder:
        made = child(MAKE, folder)
        for run in range(options.runs + 1):  # alternate, so that a slow minute slows all; the first warms the caches
            for which, results in measured.items():
                figures = child(MEASURE, which, folder)
                if run:
                    results.append(figures)
    ours, theirs = measured["nrl_models"], measured["transformers"]
    rows: list[Row] = [
        {
            "what": f"{what} {made['tensors']} tensors in {made['files']} files",
            "CPU s": median(ours, what),
            "transformers, CPU s": median(theirs, what),
            "ours / transformers": median_of(
                first[what] / second[what] for first, second in zip(ours, theirs, strict=True)
            ),
            "null ratio": null_ratio([run[what] for run in theirs]),
            "limit, CPU s": "",
        }
        for what in ("load", "save")
    ]
    names = {
        "export": "`iter_export`, with an existing state-dict adapter",
        "inspect": "`nrl-models inspect`",
        "plan": "`nrl-models plan` of 671B, fsdp=32, ep=16",
    }
    for what, limit in LIMITS.items():
        results = measured.get(what, ours)
        row = {"what": names[what], "CPU s": median(results, what), "transformers, CPU s": ""}
        rows.append(row | {"ours / transformers": "", "null ratio": "", "limit, CPU s": limit})
    publish("many_keys", "Many small tensors (45,395)", rows, options.out)


if __name__ == "__main__":
    main()
