"""Compare greedy decoding with transformers, for a batch of one sequence.

`combined` is nrl_models with fused projections (`combine=True`), `separate` is nrl_models without. The model has the
shape of SmolLM2-135M and random weights. It decodes 64 tokens from a prompt of 16. Each of several subprocesses builds
every contender with the same weights, and the contenders take turns decoding the same tokens. Ratios are of tokens per
second, so above 1 is faster than transformers. They are medians over all turns.

The memory addresses of the weights make a model some percent faster or slower for the lifetime of the process.
Therefore the order in which models are built differs between the processes. A second transformers model is compared
with the first: their ratio is the noise of the measurement. On a CPU, which may be shared, the benchmark compares CPU
seconds of one thread. On a GPU it compares wall-clock seconds.
"""

from __future__ import annotations

from statistics import median

from benchmarks.reporting import Row, arguments, child, publish

NAMES = ("transformers", "combined", "separate", "transformers again")

PROMPT, NEW = 16, 64
"""Number of tokens."""

MEASURE = f"""
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from nrl_models import AutoModelForCausalLM

order, dtype, device, turns = sys.argv[1].split(","), getattr(torch, sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
clock = time.perf_counter if device == "cuda" else time.process_time
config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])

def make(name):
    torch.manual_seed(0)
    if name.startswith("transformers"):
        return LlamaForCausalLM._from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, combine=name == "combined")

def seconds(model):
    started = clock()
    output = model.generate(prompt, max_new_tokens={NEW}, min_new_tokens={NEW}, do_sample=False, pad_token_id=0)
    if device == "cuda":
        torch.cuda.synchronize()
    assert output.shape == (1, {PROMPT + NEW})
    return clock() - started

models = {{name: make(name).to(device).eval() for name in order}}
weights = models["transformers"].state_dict()
for model in models.values():
    model.load_state_dict(weights)
prompt = torch.randint(1000, (1, {PROMPT}), generator=torch.Generator().manual_seed(0)).to(device)
print(json.dumps([{{name: seconds(model) for name, model in models.items()}} for _ in range(turns + 1)][1:]))
"""


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=4)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        turns: list[Row] = []
        for run in range(options.runs):
            at = run % len(NAMES)
            turns += child(MEASURE, ",".join(NAMES[at:] + NAMES[:at]), dtype, device, "1")
        row: Row = {"dtype": dtype, "transformers, tokens/s": NEW / median(turn["transformers"] for turn in turns)}
        for name in NAMES[1:]:
            row[f"{name} / transformers"] = median(turn[name] / turn["transformers"] for turn in turns)
        rows.append(row)
    title = f"Greedy decoding of {NEW} tokens, SmolLM2's shape, on {device}"
    publish("decode", title, rows, options.out)


if __name__ == "__main__":
    main()
