"""The loss step of RL, forward and backward, on rollouts whose lengths have a long tail.

Random weights in fp32; prompts of 48 tokens, completions of log-normal lengths with a median of 100, up to 512. The
loss is that of a policy gradient, on completions. `transformers` computes a rollout at a time, padded to the longest
of the batch as TRL's trainers do, logits of completions alone and TRL's `selective_log_softmax` (what it computes, if
TRL is not installed); `again` is the same once more, whose ratio would be 1 on a machine without noise; `all at once`
runs the whole batch padded. Ours is `token_logprobs` with the loss, a rollout at a time, and `rollout_logprobs`, which
packs. All ways give the same loss and gradient, and take turns in one process; ratios are medians over the turns.
Memory is the largest rise during the first step of a process, gradients being there before. `tokens/s` counts
tokens of rollouts, no padding. The share of the machine's speed is that of the fastest matmul in the same process, at
six operations for each of these tokens and active parameters, the head's for completions alone; what attention
computes, and what is computed twice, does not count. Growth is the time for each token, against that of the fewest
rollouts: 1 is linear.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.reporting import RESULTS, Row, arguments, child, publish
from benchmarks.train_step import Peak, active_parameters, fastest_matmul

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "kind": "Llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    "MoE, 16 experts": {
        "kind": "Qwen3Moe", "hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 256,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 32768, "max_position_embeddings": 2048,
    },
    "hybrid, LFM2": {
        "kind": "Lfm2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32768, "max_position_embeddings": 2048,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
}  # fmt: skip

SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 2048,
}  # fmt: skip
"""What a small run changes; a hybrid keeps one layer of each kind."""

PROMPT, MEDIAN, LONGEST = 48, 100, 512

DRAWS = {12: (9185, 0.55), 24: (9091, 0.7), 64: (3912, 0.7)}
"""By number of rollouts the seed and the spread of their lengths: 1,705, 4,274 and 11,000 tokens."""

AT_ONCE = 12
"""Rollouts at most for which the whole batch is padded: 24 take 30 GB."""

BASE, AGAIN = "transformers", "transformers, again"

CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "full": {"SmolLM2-135M": (12, 24), "MoE, 16 experts": (12,), "hybrid, LFM2": (12,)},  # an hour on two cores
    "long": {"SmolLM2-135M": (12, 24, 64), "MoE, 16 experts": (12, 24), "hybrid, LFM2": (12, 24)},
    "small": {"SmolLM2-135M": (12,), "MoE, 16 experts": (12,), "hybrid, LFM2": (12,)},
}
"""By size, the numbers of rollouts of each shape."""


def lengths_of(rollouts: int) -> list[int]:
    """Tokens of each rollout, its prompt included."""
    seed, spread = DRAWS[rollouts]
    draw = random.Random(seed)
    drawn = (math.exp(draw.gauss(math.log(MEDIAN), spread)) for _ in range(rollouts))
    return [PROMPT + min(LONGEST, max(1, round(length))) for length in drawn]


def config_of(shape: str, size: str) -> Any:
    """The configuration of a shape."""
    import transformers

    values = dict(SHAPES[shape])
    kind = values.pop("kind")
    if size == "small":
        values |= SMALL
        if "layer_types" in values:
            values["layer_types"] = ["conv", "full_attention"]
    return getattr(transformers, f"{kind}Config")(**values, architectures=[f"{kind}ForCausalLM"])


def build(shape: str, size: str, theirs: bool) -> Any:
    """A model with the same weights each time, and zeros for gradients."""
    import transformers

    from nrl_models import AutoModelForCausalLM

    config = config_of(shape, size)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if not theirs:
        weights, model = model.state_dict(), AutoModelForCausalLM.from_config(config)
        model.load_state_dict(weights)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@dataclass(eq=False)
class Rollouts:
    """A batch: its sequences, an advantage for each, and the ways to the gradient of the loss."""

    lengths: list[int]
    sequences: list[torch.Tensor]
    advantages: torch.Tensor

    @classmethod
    def of(cls, rollouts: int, model: Any) -> Rollouts:
        """Random tokens and advantages."""
        lengths, generator = lengths_of(rollouts), torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
        advantages = torch.randn(rollouts, generator=generator)
        return cls(lengths, [ids.to(model.device) for ids in sequences], advantages.to(model.device))

    def shortest(self) -> Rollouts:
        """The two shortest rollouts, for a step that warms up."""
        rows = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)[:2]
        return Rollouts(
            [self.lengths[row] for row in rows], [self.sequences[row] for row in rows], self.advantages[rows]
        )

    @property
    def scored(self) -> int:
        """Tokens of completions."""
        return sum(self.lengths) - PROMPT * len(self.lengths)

    def of_rows(self, model: Any, rows: slice) -> torch.Tensor:
        """Some rollouts, padded to the longest of all, with transformers' class."""
        ids = pad_sequence(self.sequences, batch_first=True)[rows]
        there = pad_sequence([torch.ones_like(row) for row in self.sequences], batch_first=True)[rows]
        kept = ids.shape[1] - PROMPT
        logits = model(input_ids=ids, attention_mask=there, logits_to_keep=kept + 1, use_cache=False).logits
        logprobs = selective_log_softmax(logits[:, :-1], ids[:, -kept:])
        loss = -(logprobs * there[:, -kept:] * self.advantages[rows, None]).sum() / self.scored
        loss.backward()
        return loss.detach()

    def padded(self, model: Any) -> torch.Tensor:
        """A rollout at a time."""
        losses = [self.of_rows(model, slice(row, row + 1)) for row in range(len(self.lengths))]
        return torch.stack(losses).sum()

    def at_once(self, model: Any) -> torch.Tensor:
        """All rollouts in one batch."""
        return self.of_rows(model, slice(None))

    def alone(self, model: Any) -> torch.Tensor:
        """Ours, a rollout at a time."""
        from nrl_models.logprobs import TokenLogprobs, token_logprobs

        losses = []
        for ids, advantage in zip(self.sequences, self.advantages, strict=True):

            def loss(found: TokenLogprobs, advantage: torch.Tensor = advantage) -> torch.Tensor:
                return -advantage * found.logprobs.sum() / self.scored

            score = torch.arange(len(ids), device=ids.device)[None] >= PROMPT
            result = token_logprobs(model, ids[None], score=score, loss=loss).loss
            assert result is not None
            result.backward()
            losses.append(result.detach())
        return torch.stack(losses).sum()

    def packed(self, model: Any) -> torch.Tensor:
        """Ours, in one call."""
        from nrl_models.logprobs import TokenLogprobs, rollout_logprobs

        def loss(found: TokenLogprobs) -> torch.Tensor:
            return -(found.logprobs * self.advantages[:, None]).sum() / self.scored

        score = [torch.arange(length) >= PROMPT for length in self.lengths]
        result = rollout_logprobs(model, self.sequences, score=score, loss=loss).loss
        assert result is not None
        return result


Step = Callable[[Rollouts, Any], torch.Tensor]

WAYS: dict[str, Step] = {
    BASE: Rollouts.padded,
    AGAIN: Rollouts.padded,
    "transformers, all at once": Rollouts.at_once,
    "ours, one at a time": Rollouts.alone,
    "ours, packed": Rollouts.packed,
}


def ways_of(rollouts: int) -> dict[str, Step]:
    """Those that find room."""
    return {name: step for name, step in WAYS.items() if step is not Rollouts.at_once or rollouts <= AT_ONCE}


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """TRL's, or what it computes in fp32: the wanted logits less the log of the sum, row by row."""
    try:
        from trl.trainer.utils import selective_log_softmax as of_trl
    except ImportError:
        wanted = logits.gather(-1, index[..., None])[..., 0]
        return wanted - torch.stack([row.logsumexp(-1) for row in logits])
    return of_trl(logits, index)


def run(step: Step, batch: Rollouts, model: Any) -> tuple[float, int, tuple[float, float]]:
    """Seconds of a step, its memory in bytes, its loss and the norm of its gradient."""
    model.zero_grad(set_to_none=False)
    gc.collect()
    with Peak() as peak:
        started = time.perf_counter()
        loss = step(batch, model)
        if loss.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    return seconds, peak.rise, (loss.item(), torch.stack(norms).norm().item())


def times(shape: str, size: str, rollouts: int, runs: int) -> None:
    """Print the seconds of each way, in turns after a short batch that does not count, and what a share needs."""
    models = {theirs: build(shape, size, theirs) for theirs in (True, False)}
    batch, ways = Rollouts.of(rollouts, models[True]), ways_of(rollouts)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results = {}
    for name, step in ways.items():
        run(step, batch.shortest(), models[name.startswith("transformers")])
    for turn in range(runs):
        for name, step in list(ways.items())[:: -1 if turn % 2 else 1]:
            took, _, results[name] = run(step, batch, models[name.startswith("transformers")])
            seconds[name].append(took)
    for result in results.values():
        torch.testing.assert_close(torch.tensor(result), torch.tensor(results[BASE]), rtol=1e-3, atol=1e-5)
    peak = fastest_matmul(models[True].device, torch.float32)
    active, head = active_parameters(models[True]), models[True].get_output_embeddings().weight.numel()
    operations = 6 * ((active - head) * sum(batch.lengths) + head * batch.scored)
    print(json.dumps({"seconds": seconds, "operations": operations, "peak": peak}))


def memory(shape: str, size: str, rollouts: int, way: str) -> None:
    """Print the memory of a way's first step: the next would take what the first had, which the process keeps."""
    model = build(shape, size, way.startswith("transformers"))
    print(json.dumps({"bytes": run(WAYS[way], Rollouts.of(rollouts, model), model)[1]}))


def measure(shape: str, size: str, rollouts: int, runs: int) -> list[Row]:
    """A row for each way, without its growth."""
    head, case = "from benchmarks.rl_step import memory, times; ", f"{shape!r}, {size!r}, {rollouts}"
    found = child(f"{head}times({case}, {runs})")
    seconds, lengths = found["seconds"], lengths_of(rollouts)
    rises = {way: child(f"{head}memory({case}, {way!r})")["bytes"] for way in seconds}
    tokens = sum(lengths)
    return [
        {
            "shape": shape,
            "rollouts": rollouts,
            "tokens": tokens,
            "padded": rollouts * max(lengths),
            "way": way,
            "seconds": (median := statistics.median(took)),
            "tokens/s": tokens / median,
            "share of matmul speed": found["operations"] / median / found["peak"],
            "memory, GB": rises[way] / 1e9,
            "time, ratio": statistics.median(ours / base for ours, base in zip(took, seconds[BASE], strict=True)),
            "memory, ratio": rises[way] / rises[BASE],
        }
        for way, took in seconds.items()
    ]


def grown(rows: list[Row]) -> list[Row]:
    """The rows with their growth: seconds for each token, against the first row of the same shape and way."""
    first: dict[tuple[str, str], float] = {}
    speeds = [first.setdefault((row["shape"], row["way"]), row["tokens/s"]) for row in rows]
    return [row | {"growth": speed / row["tokens/s"]} for row, speed in zip(rows, speeds, strict=True)]


def main() -> None:
    """Measure, print, write: a small run not among the results."""
    options = arguments(__doc__ or "", runs=3, sizes=tuple(CASES))
    cases = [(shape, rollouts) for shape, numbers in CASES[options.size].items() for rollouts in numbers]
    rows = grown([row for shape, rollouts in cases for row in measure(shape, options.size, rollouts, options.runs)])
    small = options.size == "small"
    notes = [" ".join((__doc__ or "").split()), f"{options.runs} runs of each."]
    if small:
        notes.append(
            "A small run: two narrow layers and a small vocabulary. It shows that everything runs, and no speed."
        )
    out = Path(tempfile.gettempdir()) if small and options.out == RESULTS else options.out
    publish("rl_step", "RL loss step", rows, out, notes)


if __name__ == "__main__":
    main()
