"""Measure what `nrl_models.watch` adds to a step of RL.

A step samples 8 completions of 64 tokens with transformers (`hf-generate`), computes log-probabilities, loss and
gradients with `rollout_logprobs`, takes an optimizer step, and refits the engine in the same process. Weights are
random, in fp32. A real engine samples faster and receives weights more slowly.

`no watch` calls `engine.refit` directly. `watch` compares the rollouts' log-probabilities of engine and trainer, with
neither probes nor digests. `watch, digests` adds digests of every tensor on both sides, and the last row also adds
probes (log-probabilities of fixed sequences after each refit). All variants take turns in one process, on the same
model. `again` repeats `no watch`: its ratio would be 1 on a machine without noise.

Figures are CPU time of the process, because wall time on a shared machine also counts other processes. `in watch` is
the share of a step's time that is spent in `Watch.before_update` and `Watch.refit`, without the engine's part of the
refit. It has less noise than `ratio`. The engine's part computes the digests, so they count in the other columns only.
`ratio` is a row's time divided by that of `no watch` in the same turn. It is the median of all turns, so it can differ
from the quotient of two medians.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.reporting import Row, arguments, median, publish
from nrl_models import AutoModelForCausalLM, Sampling, rollout_logprobs
from nrl_models.engines.hf import HFEngine
from nrl_models.watch import Watch

SIZES: dict[str, dict[str, Any]] = {
    "full": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32_768},
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4_096},
}
"""Sizes of the model: 43 and 5 million parameters."""

PROMPTS = [[20 + row, *range(30, 46)] for row in range(8)]

NEW_TOKENS = 64

VARIANTS: dict[str, dict[str, Any] | None] = {
    "no watch": None,
    "no watch, again": None,
    "watch": {"probe_every": 0, "digests": False},
    "watch, digests": {"probe_every": 0, "digests": True},
    "watch, digests and probes": {"probe_every": 1, "digests": True},
}
"""Options of the watch; None for a step without one."""


class Clock:
    """Adds up the CPU time of blocks, and subtracts that of nested ones."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self, sign: int = 1) -> Iterator[None]:
        """Add the time of a block, or subtract it."""
        started = time.process_time()
        try:
            yield
        finally:
            self.seconds += sign * (time.process_time() - started)


class Loop:
    """A model, its engine, and one step of RL."""

    def __init__(self, size: str) -> None:
        config = LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **SIZES[size])
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.engine = HFEngine(copy.deepcopy(self.model))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.clock = Clock()
        self.steps = 0
        self.refit = self.engine.refit
        self.engine.refit = self._refit  # type: ignore[method-assign]

    def _refit(self, *args: Any, **options: Any) -> Any:
        with self.clock.counting(-1):
            return self.refit(*args, **options)

    def watch(self, probe_every: int) -> Watch:
        """Return a watch of this loop."""
        return Watch(self.model, self.engine, probe_every=probe_every)

    def step(self, watch: Watch | None, digests: bool) -> Row:
        """Run a step. Returns its CPU time, and the share of it in the watch's own code."""
        self.steps += 1
        self.clock.seconds, started = 0.0, time.process_time()
        samples = self.engine.generate(PROMPTS, Sampling(), max_new_tokens=NEW_TOKENS, seed=self.steps, ignore_end=True)
        score = [[False] * len(sample.prompt) + [True] * len(sample.tokens) for sample in samples]
        self.optimizer.zero_grad()
        found = rollout_logprobs(
            self.model,
            [sample.sequence for sample in samples],
            score=score,
            loss=lambda result: -(result.logprobs * result.mask).sum() / result.mask.sum(),
        )
        if watch is not None:
            with self.clock.counting():
                watch.before_update(samples, found.logprobs)
        self.optimizer.step()
        if watch is None:
            self.refit(self.model.state_dict_adapter.iter_export(self.model), digests=False)
        else:
            with self.clock.counting():
                watch.refit(digests=digests)
        seconds = time.process_time() - started
        return {"seconds": seconds, "in watch": self.clock.seconds / seconds if watch else 0.0}


def measure(size: str, runs: int) -> list[Row]:
    """Run the variants in turns, after a turn that is not counted. Returns a row for each."""
    loop = Loop(size)
    steps: dict[str, Callable[[], Row]] = {}
    for name, options in VARIANTS.items():
        watch = None if options is None else loop.watch(options["probe_every"])
        digests = options is not None and options["digests"]
        steps[name] = lambda watch=watch, digests=digests: loop.step(watch, digests)  # type: ignore[misc]
    found: dict[str, list[Row]] = {name: [] for name in steps}
    for turn in range(runs + 1):
        for name, step in steps.items():
            row = step()
            if turn:
                found[name].append(row)
    base = [row["seconds"] for row in found["no watch"]]
    for rows in found.values():
        for row, seconds in zip(rows, base, strict=True):
            row["ratio"] = row["seconds"] / seconds
    return [
        {
            "step": name,
            "CPU seconds": median(rows, "seconds"),
            "ratio": median(rows, "ratio"),
            "in watch, %": 100 * median(rows, "in watch"),
        }
        for name, rows in found.items()
    ]


def main() -> None:
    """Measure, and write the figures."""
    options = arguments(__doc__ or "", runs=15, sizes=tuple(SIZES))
    torch.set_num_threads(1)
    rows = measure(options.size, options.runs)
    layers, hidden = SIZES[options.size]["num_hidden_layers"], SIZES[options.size]["hidden_size"]
    notes = [f"A Llama of {layers} layers of {hidden}; {options.runs} turns; one thread."]
    publish("watch", "Cost of watching a training loop", rows, options.out, notes)


if __name__ == "__main__":
    main()
