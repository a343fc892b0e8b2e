"""Greedy decoding, combined and separate, against transformers: what looking at each group at each call costs.

The shape is SmolLM2-135M's, weights are random, 64 tokens are decoded from a prompt of 16. All contenders hold the same
weights, decode the same tokens and take turns; ratios are medians over the turns. The second transformers model is
compared with the first: how far two models that are the same differ is what the other ratios mean nothing below. CPU
seconds are compared on a CPU, because it may be shared; on a GPU seconds.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.reporting import Row, arguments, publish
from nrl_models import AutoModelForCausalLM

CONFIG = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)

PROMPT, NEW = 16, 64
"""Tokens."""


def main() -> None:
    """Measure, print, write."""
    options = arguments(__doc__ or "", runs=9)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        models: dict[str, PreTrainedModel] = {
            "transformers": LlamaForCausalLM._from_config(CONFIG, dtype=dtype),
            "transformers again": LlamaForCausalLM._from_config(CONFIG, dtype=dtype),
            "combined": AutoModelForCausalLM.from_config(CONFIG, dtype=dtype),
            "separate": AutoModelForCausalLM.from_config(CONFIG, dtype=dtype, combine=False),
        }
        for model in models.values():
            model.load_state_dict(models["transformers"].state_dict())
            model.to(device).eval()
        prompt = torch.randint(1000, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
        turns = [{name: seconds(model, prompt) for name, model in models.items()} for _ in range(options.runs + 1)][1:]
        row: Row = {
            "dtype": str(dtype).removeprefix("torch."),
            "tokens/s": NEW / median(turn["transformers"] for turn in turns),
        }
        for name in ("combined", "separate", "transformers again"):
            row[f"{name} / transformers"] = median(turn[name] / turn["transformers"] for turn in turns)
        rows.append(row)
    title = f"Greedy decoding of {NEW} tokens, SmolLM2's shape, on {device.type}"
    publish("decode", title, rows, options.out, [" ".join((__doc__ or "").split())])


def seconds(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    """Seconds of decoding; of the CPU's time where it computes."""
    clock = time.perf_counter if prompt.is_cuda else time.process_time
    started = clock()
    output = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    assert output.shape == (1, PROMPT + NEW)
    return clock() - started


if __name__ == "__main__":
    main()
