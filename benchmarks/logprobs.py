"""Log-probabilities of 4,096 tokens over a vocabulary of 128,256, from hidden states: memory and time of one pass.

`full logits` is a log-softmax over all logits in fp32, as one writes it, and again: how far two equal ways differ;
`nrl_models, loss` knows the loss beforehand (`token_logprobs(..., loss=...)`); `transformers` is its loss; `TRL` its
`selective_log_softmax`, if it is installed. Extra memory is the peak above what was there before, gradients included.
Ratios are against full logits; those of time are medians over runs in turn. Limits: a tenth of the memory, 1.05 times
the time of a forward, and of a forward and a backward where the loss is known; else 1.3 times.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import psutil
import torch
from torch import nn

from benchmarks.reporting import Row, arguments, publish
from nrl_models.logprobs.chunked import chunked_statistics
from nrl_models.logprobs.head import OutputHead
from nrl_models.logprobs.logit_buffers import TokenStatistics
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.whole_rows import Derivatives, LossAhead

TOKENS, VOCABULARY, HIDDEN = 4096, 128_256, 512

Way = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measure, print, write."""
    options = arguments(__doc__ or "", runs=3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
    hidden = torch.randn(TOKENS, HIDDEN, device=device, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (TOKENS,), device=device)
    rows: list[Row] = []
    found: dict[tuple[str, bool], tuple[float, list[float]]] = {}
    for backward in (False, True):
        for _ in range(options.runs):
            for name, way in ways(backward).items():
                peak, seconds = measure(way, hidden, head, tokens, backward)
                before = found.get((name, backward), (0.0, []))
                found[name, backward] = max(before[0], peak), [*before[1], seconds]
    for (name, backward), (peak, seconds) in found.items():
        base_peak, base_seconds = found["full logits", backward]
        rows.append(
            {
                "way": name,
                "pass": "forward and backward" if backward else "forward",
                "extra memory, MB": peak / 1e6,
                "memory, ratio": peak / base_peak,
                "seconds": median(seconds),
                "time, ratio": median(took / other for took, other in zip(seconds, base_seconds, strict=True)),
            }
        )
    notes = [" ".join((__doc__ or "").split()), f"{options.runs} run{'s' if options.runs > 1 else ''} of each."]
    publish("logprobs", f"Log-probabilities on {device.type}", rows, options.out, notes)


def ways(backward: bool) -> dict[str, Way]:
    """Ways to the same numbers; a loss is their mean, negated."""
    found: dict[str, Way] = {"full logits": full_logits, "full logits again": full_logits, "nrl_models": ours}
    if backward:
        found["nrl_models, loss"] = ours_with_loss
    found["transformers"] = of_transformers
    if find_spec("trl"):
        found["TRL"] = of_trl
    return found


def full_logits(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """Logits, log-softmax, the wanted entries."""
    return head(hidden).float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def ours(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """What `token_logprobs` does behind the model's last layer."""
    return chunked_statistics(hidden, OutputHead(head), tokens, Sampling()).logprobs


def ours_with_loss(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """The same with the loss, whose derivatives autograd finds for each pass, as `token_logprobs` has it."""

    def derivatives(found: TokenStatistics) -> Derivatives:
        with torch.enable_grad():
            leaf = found.logprobs.detach().clone().requires_grad_()
            return (*torch.autograd.grad(-leaf.mean(), leaf), None, None)

    return chunked_statistics(hidden, OutputHead(head), tokens, Sampling(), ahead=LossAhead(derivatives)).logprobs


def of_transformers(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a causal language model, a number in place of one for each token."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = head(hidden)[None]
    return -ForCausalLMLoss(logits, None, logits.shape[-1], shift_labels=tokens[None])


def of_trl(hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """What TRL's trainers call."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(head(hidden)[None], tokens[None])[0]


def measure(
    way: Way, hidden: torch.Tensor, head: nn.Linear, tokens: torch.Tensor, backward: bool
) -> tuple[float, float]:
    """Peak of the extra memory in bytes, and seconds."""
    hidden.grad = head.weight.grad = None
    gc.collect()
    with Peak(hidden.device) as peak, torch.set_grad_enabled(backward):
        started = time.perf_counter()
        result = -way(hidden, head, tokens).mean()
        if backward:
            result.backward()
        if hidden.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return peak.bytes, seconds


class Peak:
    """The most memory in use while open, above what was in use before."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0.0

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return self
        self.process = psutil.Process()
        self.before, self.open = self.process.memory_info().rss, True
        self.watcher = threading.Thread(target=self._watch)
        self.watcher.start()
        return self

    def _watch(self) -> None:
        while self.open:
            self.bytes = max(self.bytes, self.process.memory_info().rss - self.before)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self.before
            return
        self.open = False
        self.watcher.join()


if __name__ == "__main__":
    main()
