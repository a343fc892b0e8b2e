"""Measure memory and time of log-probabilities: 4,096 tokens, a vocabulary of 128,256, one pass from hidden states.

`full logits` computes a log-softmax over all logits in fp32. `full logits again` repeats it: their difference is noise.
`nrl_models, loss` passes the loss function to `token_logprobs(..., loss=...)`. `transformers` calls transformers' loss
function. `TRL` is its `selective_log_softmax`, if TRL is installed. Extra memory is the increase at the peak, gradients
included. Ratios are relative to full logits. Time ratios are medians over alternating runs. The ratios of nrl_models
should be at most 0.1 for memory, 1.05 for the time of a forward, and for the time of a forward and backward 1.05 with
`loss=...` and 1.3 without.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import torch
from torch import nn

from benchmarks.reporting import Row, arguments, publish
from benchmarks.train_step import Peak
from nrl_models.logprobs.chunked import chunked_statistics
from nrl_models.logprobs.logit_buffers import OutputHead, TokenStatistics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.whole_rows import Derivatives, LossAhead

TOKENS, VOCABULARY, HIDDEN = 4096, 128_256, 512

Way = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = compare(device, torch.float32, options.runs)
    notes = [f"{options.runs} run{'s' if options.runs > 1 else ''} of each."]
    publish("logprobs", f"Log-probabilities on {device.type}", rows, options.out, notes)


def compare(
    device: torch.device,
    dtype: torch.dtype,
    runs: int,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
    hidden_size: int = HIDDEN,
    warm_up: int = 0,
) -> list[Row]:
    """Measure each way, forward and forward with backward. The first `warm_up` runs do not count."""
    torch.manual_seed(0)
    head = nn.Linear(hidden_size, vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=device)
    rows: list[Row] = []
    found: dict[tuple[str, bool], tuple[int, list[float]]] = {}
    for backward in (False, True):
        for run in range(warm_up + runs):
            for name, way in ways(backward).items():
                rise, took = measure(way, hidden, head, labels, backward)
                if run >= warm_up:
                    before = found.get((name, backward), (0, []))
                    found[name, backward] = max(before[0], rise), [*before[1], took]
    for (name, backward), (peak, seconds) in found.items():
        base_peak, base_seconds = found["full logits", backward]
        rows.append(
            {
                "way": name,
                "pass": "forward and backward" if backward else "forward",
                "extra memory, MB": peak / 1e6,
                "memory, ratio": peak / base_peak if base_peak else "",
                "seconds": median(seconds),
                "time, ratio": median(took / other for took, other in zip(seconds, base_seconds, strict=True)),
            }
        )
    return rows


def ways(backward: bool) -> dict[str, Way]:
    """Return the functions to compare. Each loss is the negative mean of the log-probabilities."""
    found: dict[str, Way] = {"full logits": full_logits, "full logits again": full_logits, "nrl_models": ours}
    if backward:
        found["nrl_models, loss"] = ours_with_loss
    found["transformers"] = of_transformers
    if find_spec("trl"):
        found["TRL"] = of_trl
    return found


def full_logits(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """Compute logits, take the log-softmax and gather the labels."""
    return head(hidden).float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def ours(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """Run the part of `token_logprobs` that follows the model's last layer."""
    return chunked_statistics(hidden, OutputHead(head), tokens, Sampling()).logprobs


def ours_with_loss(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """Run `token_logprobs` with its loss, so that autograd differentiates the loss in each chunk."""

    def derivatives(found: TokenStatistics) -> Derivatives:
        with torch.enable_grad():
            leaf = found.logprobs.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(-leaf.mean(), leaf)
            return gradient, None, None

    return chunked_statistics(hidden, OutputHead(head), tokens, Sampling(), ahead=LossAhead(derivatives)).logprobs


def of_transformers(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """Compute transformers' causal LM loss, a scalar instead of one value per token."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = head(hidden)[None]
    return -ForCausalLMLoss(logits, None, logits.shape[-1], shift_labels=tokens[None])


def of_trl(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """Call the function that TRL's trainers call."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(head(hidden)[None], tokens[None])[0]


def measure(way: Way, hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor, backward: bool) -> tuple[int, float]:
    """Return the peak of the extra memory in bytes, and the seconds."""
    hidden.grad = head.weight.grad = None
    gc.collect()
    with Peak() as peak, torch.set_grad_enabled(backward):
        started = time.perf_counter()
        result = -way(hidden, head, tokens).mean()
        if backward:
            result.backward()
        if hidden.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return peak.rise, seconds


if __name__ == "__main__":
    main()
