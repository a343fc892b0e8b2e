"""Diagnostic 4: do compiled modes give the log-probabilities of eager mode? Informative, not a strict check.

Every mode scores the same tokens: prompts, and what eager mode generated for them. Modes that generate for themselves
go other ways after the first different token, and nothing can be compared from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.base import Engine, Sample, padded
from nrl_models.logprobs.sampling import Sampling

TOLERANCE = 1e-3
"""The guide's, absolute and relative."""

MODES: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "compiled, with torch inductor precision flag": {
        "enforce_eager": False,
        "compilation_config": {"inductor_compile_config": {"emulate_precision_casts": True}},
    },
    "compiled, with backend=eager": {"enforce_eager": False, "compilation_config": {"backend": "eager"}},
}
"""What is held against eager mode: names, and vLLM's options. The flag is what the environment variable
`TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1` sets. On a GPU, compiled modes capture CUDA graphs."""

Start = Callable[[dict[str, Any]], AbstractContextManager[Engine]]
"""Starts an engine with options added to its own."""


def diagnose_precision(
    start: Start,
    subject: str,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 64,
    modes: Sequence[str] = tuple(MODES),
    tolerance: float = TOLERANCE,
) -> Diagnosis:
    """Score the same tokens in eager mode and in others, and compare.

    Args:
        start: starts the engine in a mode.
        subject: the checkpoint, for the output.
        prompts: token ids.
        new_tokens: how many eager mode generates for each prompt.
        modes: which of `MODES`.
        tolerance: absolute and relative.

    Raises:
        EngineError: the engine does not start in a mode, or fails.
    """
    result = Diagnosis("precision", subject, informative=True)
    with start({"enforce_eager": True}) as engine:
        samples = engine.generate(prompts, Sampling(0.0), max_new_tokens=new_tokens)
        sequences = [sample.sequence for sample in samples]
        truth = engine.score(sequences, Sampling())
    measured = []
    for mode in modes:
        with start(MODES[mode]) as engine:
            scores = engine.score(sequences, Sampling())
            free = engine.generate(prompts, Sampling(0.0), max_new_tokens=new_tokens)
        for part in ("prompt", "generation"):
            expected, actual = (_part(rows, samples, part) for rows in (truth, scores))
            measured.append(_compare(result, f"Eager and {mode} lps ({part} lps)", expected, actual, tolerance))
        same = [_common(one.tokens, other.tokens) for one, other in zip(samples, free, strict=True)]
        result.say(f"  left to itself, it samples eager's first {same} of {new_tokens} tokens")
    result.measured = {"tolerance": tolerance, "comparisons": measured}
    failed = [one["comparison"] for one in measured if not one["close"]]
    result.say("=" * 100)
    return result.finish(f"{len(failed)} of {len(measured)} comparisons differ; see above" if failed else "")


def _part(rows: Sequence[Sequence[float]], samples: Sequence[Sample], part: str) -> torch.Tensor:
    """Log-probabilities of the prompts (but for their first tokens) or of what was generated."""
    places = [slice(1, len(one.prompt)) if part == "prompt" else slice(len(one.prompt), None) for one in samples]
    return padded([row[place] for row, place in zip(rows, places, strict=True)])


def _compare(
    result: Diagnosis, name: str, expected: torch.Tensor, actual: torch.Tensor, tolerance: float
) -> dict[str, Any]:
    there = ~expected.isnan() | ~actual.isnan()  # both are NaN behind the end of a shorter sequence
    wanted, given = expected[there], actual[there]
    difference = (wanted - given).abs()
    off = ~(difference <= tolerance + tolerance * wanted.abs())
    result.say("=" * 100)
    largest = difference.nan_to_num(nan=float("inf")).max().item() if difference.numel() else 0.0
    if not off.any():
        result.say(f"{name}: PASSED - Arrays are close within tolerance (atol={tolerance}, rtol={tolerance})")
    else:
        relative = (difference / wanted.abs().clamp(min=1e-12))[off].nan_to_num(nan=float("inf")).max().item()
        result.say(f"{name}: FAILED - Arrays are different")
        result.say(f"  Not equal to tolerance rtol={tolerance}, atol={tolerance}")
        result.say(f"  Mismatched elements: {int(off.sum())} / {off.numel()} ({off.double().mean().item():.1%})")
        result.say(f"  Max absolute difference among violations: {difference[off].max().item():.6g}")
        result.say(f"  Max relative difference among violations: {relative:.6g}")
    return {
        "comparison": name,
        "close": not bool(off.any()),
        "mismatched": int(off.sum()),
        "elements": off.numel(),
        "max_diff": largest,
    }


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
