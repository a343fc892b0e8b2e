"""A bigram model in a subprocess, to test the protocol: `python -m bigram_worker`."""

from __future__ import annotations

import time
from typing import Any

import torch

from nrl_models.engines.processes.environment_worker import serve
from nrl_models.engines.processes.worker_loop import DecodingStep, WorkerModel

VOCABULARY = 512

SLOW_TOKEN = 500
"""A sequence that begins with this token takes `DELAY` seconds. So does a refit whose table begins with it."""

DELAY = 0.8


def table(seed: int) -> dict[str, torch.Tensor]:
    """Return logits of the next token, `(token, next token)`, computed from a head and its gate."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(VOCABULARY, VOCABULARY, generator=generator) for name in ("head", "gate")}


def scores(weights: dict[str, torch.Tensor], tokens: list[int]) -> list[float]:
    """Return the log-probability of each token except the first."""
    logprobs = (weights["head"] + weights["gate"])[tokens[:-1]].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


class Model(WorkerModel):
    """The table of a seed."""

    def __init__(self, path: str, dtype: str | None, weights: bool, seed: int) -> None:
        self.weights = table(seed)

    def describe(self) -> dict[str, Any]:
        return {"dtype": "float32", "vocabulary": VOCABULARY}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        if tokens[0] == SLOW_TOKEN:
            time.sleep(DELAY)
        return self.weights["head"][tokens] + self.weights["gate"][tokens]

    def decoding(self) -> DecodingStep:
        return lambda new: torch.stack([self.logits(row)[-1] for row in new])

    def apply(self) -> dict[str, Any]:
        if self.arrived["head"][0, 0] == SLOW_TOKEN:
            time.sleep(DELAY)
        unwritten = sorted(self.weights.keys() - self.arrived.keys())
        self.weights |= self.arrived
        return {"unwritten": unwritten}


if __name__ == "__main__":
    serve(Model)
