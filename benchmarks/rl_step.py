"""Measure the loss step of RL, forward and backward, on rollouts whose lengths have a long tail.

Weights are random, in fp32. Prompts have 48 tokens. Completions have log-normal lengths with a median of 100 and a
maximum of 512. The loss is a policy gradient on the completions. In the shape with a shared prompt, all rollouts have
the same prompt of 512 tokens and completions of 128.

`transformers` runs one rollout per forward, padded to the length of the longest rollout as in TRL's trainers. It
computes logits of the completions and TRL's `selective_log_softmax`, or the same formula if TRL is not installed.
`again` repeats it: its ratio would be 1 on a machine without noise. `all at once` runs the complete batch padded.
`ours, one at a time` calls `token_logprobs(..., loss=...)` with one rollout per call. `ours, packed` calls
`rollout_logprobs`, which packs several rollouts into one sequence and computes a shared prompt once (with
`share_prompts=False`, once per rollout). All variants give the same loss and gradient. They take turns in one process,
and ratios are medians over the turns.

Memory is measured in a separate process for each method. Gradients are allocated first; memory is the largest increase
above that during the first step. `tokens/s` counts tokens of rollouts without padding. `share of matmul speed` is the
step's operations per second, divided by those of the fastest matmul in the same process. We count six operations per
token and active parameter. The head counts for completions only, and a shared prompt counts once. Attention and
recomputation do not count.
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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.reporting import RESULTS, Row, arguments, child, machine, publish, save
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

TITLE = "RL loss step"

SHARED = ", shared prompt"
"""Suffix of shapes whose rollouts have the same prompt."""

SHAPES |= {f"{shape}{SHARED}": SHAPES[shape] for shape in ("SmolLM2-135M", "MoE, 16 experts")}

SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 2048,
}  # fmt: skip
"""Changes to the shapes in a small run. A hybrid keeps one layer of each kind."""

PROMPT, MEDIAN, LONGEST = 48, 100, 512

SHARED_PROMPT, COMPLETION = 512, 128
"""Tokens of the shared prompt and of each of its completions."""

DRAWS = {12: (9185, 0.55), 24: (9091, 0.7), 64: (3912, 0.7)}
"""By number of rollouts: the seed and the spread of their lengths (1,705, 4,274 and 11,000 tokens)."""

AT_ONCE = 12
"""Largest number of rollouts to run as one padded batch, because 24 take 30 GB."""

BASE, AGAIN = "transformers", "transformers, again"

CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "full": {"SmolLM2-135M": (12, 24), "MoE, 16 experts": (12,), "hybrid, LFM2": (12,)},  # an hour on two cores
    "long": {"SmolLM2-135M": (12, 24, 64), "MoE, 16 experts": (12, 24), "hybrid, LFM2": (12, 24)},
    "small": {"SmolLM2-135M": (12,), "MoE, 16 experts": (12,), "hybrid, LFM2": (12,)},
    "shared": {},
    "shared, MoE": {},
}
"""By size: the numbers of rollouts of each shape."""

for size in ("full", "long", "small", "shared"):
    CASES[size] |= {f"SmolLM2-135M{SHARED}": (8,), f"MoE, 16 experts{SHARED}": (8,)}
CASES["shared, MoE"] = {f"MoE, 16 experts{SHARED}": (8,)}


def lengths_of(shape: str, rollouts: int) -> list[int]:
    """Return the length of each rollout in tokens, prompt included."""
    if shape.endswith(SHARED):
        return [SHARED_PROMPT + COMPLETION] * rollouts
    seed, spread = DRAWS[rollouts]
    draw = random.Random(seed)
    drawn = (math.exp(draw.gauss(math.log(MEDIAN), spread)) for _ in range(rollouts))
    return [PROMPT + min(LONGEST, max(1, round(length))) for length in drawn]


def config_of(shape: str, size: str) -> Any:
    """Return the configuration of a shape."""
    import transformers

    values = dict(SHAPES[shape])
    kind = values.pop("kind")
    if size == "small":
        values |= SMALL
        if "layer_types" in values:
            values["layer_types"] = ["conv", "full_attention"]
    return getattr(transformers, f"{kind}Config")(**values, architectures=[f"{kind}ForCausalLM"])


def build(shape: str, size: str, theirs: bool) -> Any:
    """Build a model with the same weights on every call, and with gradients allocated as zeros."""
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
    """A batch of sequences with their advantages, and the variants that compute the gradient of the loss."""

    prompt: int
    lengths: list[int]
    sequences: list[torch.Tensor]
    advantages: torch.Tensor

    @classmethod
    def of(cls, shape: str, rollouts: int, model: Any) -> Rollouts:
        """Draw random tokens and advantages."""
        lengths, generator = lengths_of(shape, rollouts), torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
        advantages = torch.randn(rollouts, generator=generator)
        prompt = SHARED_PROMPT if shape.endswith(SHARED) else PROMPT
        if shape.endswith(SHARED):
            sequences = [torch.cat([sequences[0][:prompt], ids[prompt:]]) for ids in sequences]
        return cls(prompt, lengths, [ids.to(model.device) for ids in sequences], advantages.to(model.device))

    def shortest(self) -> Rollouts:
        """Return the two shortest rollouts, for a warm-up step."""
        rows = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)[:2]
        lengths, sequences = [self.lengths[row] for row in rows], [self.sequences[row] for row in rows]
        return Rollouts(self.prompt, lengths, sequences, self.advantages[rows])

    @property
    def scored(self) -> int:
        """Return the number of completion tokens."""
        return sum(self.lengths) - self.prompt * len(self.lengths)

    @property
    def computed(self) -> int:
        """Return the number of tokens, with a shared prompt once."""
        shared = all(ids[: self.prompt].equal(self.sequences[0][: self.prompt]) for ids in self.sequences)
        return self.scored + self.prompt * (1 if shared else len(self.lengths))

    def of_rows(self, model: Any, rows: slice) -> torch.Tensor:
        """Run the rollouts of `rows` with transformers' class, padded to the longest of the batch."""
        ids = pad_sequence(self.sequences, batch_first=True)[rows]
        there = pad_sequence([torch.ones_like(row) for row in self.sequences], batch_first=True)[rows]
        kept = ids.shape[1] - self.prompt
        logits = model(input_ids=ids, attention_mask=there, logits_to_keep=kept + 1, use_cache=False).logits
        logprobs = selective_log_softmax(logits[:, :-1], ids[:, -kept:])
        loss = -(logprobs * there[:, -kept:] * self.advantages[rows, None]).sum() / self.scored
        loss.backward()
        return loss.detach()

    def padded(self, model: Any) -> torch.Tensor:
        """Run one padded rollout per forward."""
        losses = [self.of_rows(model, slice(row, row + 1)) for row in range(len(self.lengths))]
        return torch.stack(losses).sum()

    def at_once(self, model: Any) -> torch.Tensor:
        """Run all rollouts in one batch."""
        return self.of_rows(model, slice(None))

    def alone(self, model: Any) -> torch.Tensor:
        """Run `token_logprobs`, one rollout per call."""
        from nrl_models.logprobs import TokenLogprobs, token_logprobs

        losses = []
        for ids, advantage in zip(self.sequences, self.advantages, strict=True):

            def loss(found: TokenLogprobs, advantage: torch.Tensor = advantage) -> torch.Tensor:
                return -advantage * found.logprobs.sum() / self.scored

            score = torch.arange(len(ids), device=ids.device)[None] >= self.prompt
            result = token_logprobs(model, ids[None], score=score, loss=loss).loss
            assert result is not None
            result.backward()
            losses.append(result.detach())
        return torch.stack(losses).sum()

    def packed(self, model: Any, *, share_prompts: bool = True) -> torch.Tensor:
        """Run `rollout_logprobs`, all rollouts in one call."""
        from nrl_models.logprobs import TokenLogprobs, rollout_logprobs

        def loss(found: TokenLogprobs) -> torch.Tensor:
            return -(found.logprobs * self.advantages[:, None]).sum() / self.scored

        score = [torch.arange(length) >= self.prompt for length in self.lengths]
        result = rollout_logprobs(model, self.sequences, score=score, loss=loss, share_prompts=share_prompts).loss
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

WAYS_OF_SHARED: dict[str, Step] = {
    **{name: WAYS[name] for name in (BASE, AGAIN, "ours, packed")},
    "ours, share_prompts=False": partial(Rollouts.packed, share_prompts=False),
}


def ways_of(shape: str, rollouts: int) -> dict[str, Step]:
    """Return the variants that fit into memory."""
    if shape.endswith(SHARED):
        return WAYS_OF_SHARED
    return {name: step for name, step in WAYS.items() if step is not Rollouts.at_once or rollouts <= AT_ONCE}


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Call TRL's `selective_log_softmax`, or compute the same in fp32: the label's logit minus the log-sum-exp."""
    try:
        from trl.trainer.utils import selective_log_softmax as of_trl
    except ImportError:
        wanted = logits.gather(-1, index[..., None])[..., 0]
        return wanted - torch.stack([row.logsumexp(-1) for row in logits])
    return of_trl(logits, index)


def run(step: Step, batch: Rollouts, model: Any) -> tuple[float, int, tuple[float, float]]:
    """Return the seconds of a step, its memory in bytes, its loss and its gradient norm."""
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
    """Print the seconds of each variant and the inputs of the speed share. A short warm-up batch does not count."""
    models = {theirs: build(shape, size, theirs) for theirs in (True, False)}
    batch, ways = Rollouts.of(shape, rollouts, models[True]), ways_of(shape, rollouts)
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
    operations = 6 * ((active - head) * batch.computed + head * batch.scored)
    print(json.dumps({"seconds": seconds, "operations": operations, "peak": peak}))


def memory(shape: str, size: str, rollouts: int, way: str) -> None:
    """Print the memory of a variant's first step. Later steps reuse memory that the process keeps."""
    model = build(shape, size, way.startswith("transformers"))
    print(json.dumps({"bytes": run(ways_of(shape, rollouts)[way], Rollouts.of(shape, rollouts, model), model)[1]}))


def measure(shape: str, size: str, rollouts: int, runs: int) -> list[Row]:
    """Return one row per variant."""
    head, case = "from benchmarks.rl_step import memory, times; ", f"{shape!r}, {size!r}, {rollouts}"
    found = child(f"{head}times({case}, {runs})")
    seconds, lengths = found["seconds"], lengths_of(shape, rollouts)
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


def recorded(file: Path) -> dict[tuple[str, int], list[Row]]:
    """Return the rows of earlier runs, by shape and number of rollouts."""
    found: dict[tuple[str, int], list[Row]] = {}
    if file.is_file():
        for row in json.loads(file.read_text())["rows"]:
            found.setdefault((row["shape"], row["rollouts"]), []).append(row)
    return found


def main() -> None:
    """Measure, print and save the results. Each case is saved at once. Cases that are not measured keep their rows."""
    options = arguments(__doc__ or "", runs=3, sizes=tuple(CASES))
    small = options.size == "small"
    small_note = "A small run: two narrow layers and a small vocabulary. It shows that everything runs, and no speed."
    out = Path(tempfile.mkdtemp()) if small and options.out == RESULTS else options.out
    rows, about = recorded(out / "rl_step.json"), machine()
    measured = f"{about['date']}, {about['processor']}, {options.runs} run{'s' if options.runs > 1 else ''}"
    for shape, numbers in CASES[options.size].items():
        for rollouts in numbers:
            case = measure(shape, options.size, rollouts, options.runs)
            rows[shape, rollouts] = [row | {"measured": measured} for row in case]
            save("rl_step", TITLE, [*chain.from_iterable(rows.values())], out)
    publish("rl_step", TITLE, [*chain.from_iterable(rows.values())], out, [small_note] if small else [])


if __name__ == "__main__":
    main()
