"""One real RL loop: GRPO on the demo's checkpoint, sampled by a real inference engine, refitted at every step.

The reward is a rule: the share of a continuation's characters that are lower-case letters. Every step samples groups
of continuations with the engine, takes one step of GRPO (https://arxiv.org/abs/2402.03300, with one update for each
sample, so its ratio is one and nothing is clipped) with this library's model, and sends the new weights to the engine.
The error between the log-probabilities of both (`token_mult_prob_error`) is logged at every step: it stays at the noise
floor only if all weights arrive every time.

    make demo test-engine
    .venv-engine/bin/python examples/grpo_tiny.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from nrl_models import AutoModelForCausalLM
from nrl_models.consistency.cells import Cell
from nrl_models.consistency.prompts import Prompts
from nrl_models.engines import start_engine
from nrl_models.engines.base import Engine, Sample
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs import Sampling, token_logprobs, token_mult_prob_error

PROMPT_TOKENS = 16


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint with a tokenizer.")] = Path("demo/checkpoint"),
    engine: Annotated[str, typer.Option(help="vllm or hf-generate.")] = "vllm",
    steps: Annotated[int, typer.Option(min=1)] = 25,
    prompts: Annotated[int, typer.Option(help="Prompts in a step.", min=1)] = 8,
    group: Annotated[int, typer.Option(help="Continuations of each.", min=2)] = 8,
    new_tokens: Annotated[int, typer.Option(min=1)] = 24,
    learning_rate: float = 3e-4,
    bound: Annotated[float, typer.Option(help="On token_mult_prob_error, at every step.")] = 1.0001,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what every step gave here.")] = None,
) -> None:
    """Train; exit with 1 if the reward did not rise or the log-probabilities diverged."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    maker = Prompts.of_checkpoint(checkpoint, read_config(checkpoint).vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    options: dict[str, Any] = {"dtype": torch.float32, "max_length": PROMPT_TOKENS + new_tokens}
    history = []
    with start_engine(engine, checkpoint, **options) as started:
        for step in range(steps):
            made = maker.make(Cell(PROMPT_TOKENS + new_tokens, "real", "sampling", prompts), PROMPT_TOKENS, step)
            found = train_step(model, optimizer, started, maker, made, group, new_tokens, seed=10_000 * step)
            history.append({"step": step, **found})
            print("  ".join(f"{name} {value:.7g}" for name, value in history[-1].items()), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps(history, indent=1) + "\n")
    share = max(1, steps // 5)
    first, last = (sum(one["reward"] for one in some) / share for some in (history[:share], history[-share:]))
    worst = max(entry["token_mult_prob_error"] for entry in history)
    print(f"reward {first:.3f} to {last:.3f}; token_mult_prob_error at most {worst:.7f}, bound {bound:g}")
    if last <= first or worst > bound:
        raise typer.Exit(1)


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: Engine,
    maker: Prompts,
    prompts: list[list[int]],
    group: int,
    new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Sample, learn, refit."""
    repeated = [prompt for prompt in prompts for _ in range(group)]
    samples = engine.generate(repeated, Sampling(), max_new_tokens=new_tokens, seed=seed)
    rewards = torch.tensor([reward(maker.text(sample.tokens)) for sample in samples])
    advantages = advantages_of(rewards.view(-1, group)).flatten()
    tokens = torch.tensor([sample.sequence for sample in samples])
    sampled = torch.zeros_like(tokens, dtype=torch.bool)
    sampled[:, PROMPT_TOKENS:] = True
    trained = token_logprobs(model, tokens, score=sampled).logprobs[:, PROMPT_TOKENS:]
    error = token_mult_prob_error(trained, engine_logprobs(samples))
    loss = -(torch.exp(trained - trained.detach()) * advantages[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    report = engine.refit(model.state_dict_adapter.iter_export(model))
    assert not report.unwritten
    return {"reward": rewards.mean().item(), "token_mult_prob_error": error, "refit seconds": report.seconds}


def reward(text: str) -> float:
    """The share of characters that are lower-case letters."""
    return sum(one.islower() for one in text) / max(1, len(text))


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each of a group `(groups, group)` is than its group, in its group's standard deviations."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def engine_logprobs(samples: list[Sample]) -> torch.Tensor:
    """Log-probabilities that the engine sampled with, `(samples, generated)`."""
    return torch.tensor([sample.logprobs for sample in samples])


if __name__ == "__main__":
    typer.run(main)
