"""Diagnostics 1, 2, 4 and 5: known failure modes of inference engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

import numpy
import torch

from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.base import Engine, padded
from nrl_models.engines.engine_types import Sample
from nrl_models.errors import EngineError
from nrl_models.logprobs.metrics import ConsistencyMetrics, consistency_metrics
from nrl_models.logprobs.sampling import Sampling

PROMPT_TOKENS = 8
"""Tokens of a prompt that are used to see where an engine stops."""

THRESHOLD = 1.05
"""The guide's bound, for decoding compared with prefill."""

TOLERANCE = 1e-3
"""The guide's tolerance for compiled modes, absolute and relative."""

MODES: dict[str, dict[str, Any]] = {
    "cuda graph mode lps": {"enforce_eager": False},
    "cuda graph mode lps with torch inductor precision flag": {
        "enforce_eager": False,
        "compilation_config": {"inductor_compile_config": {"emulate_precision_casts": True}},
    },
    "cuda graph mode lps with backend=eager": {"enforce_eager": False, "compilation_config": {"backend": "eager"}},
}
"""Modes that are compared with eager mode, under the guide's names, with vLLM's options. The precision flag is what the
environment variable `TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1` sets. On a CPU they compile, and there are no graphs."""

VLLM = "--engine vllm (`make test-engine` sets it up without a GPU, `pip install 'nrl_models[vllm]'` with one)"
"""What runs the diagnostics that other engines cannot."""

SHOWN_TOKENS = 3
"""First tokens of an answer that are shown if prefix caching gives NaN."""

Start = Callable[[dict[str, Any]], AbstractContextManager[Engine]]
"""Starts an engine with options added to its own."""


def diagnose_max_model_len(engine: Engine, subject: str, prompt: Sequence[int]) -> Diagnosis:
    """1: ask for more tokens than fit, and check that the engine enforces `max_model_len`.

    An engine that does not reads and writes past the end of its tables once a sequence is long enough.

    Args:
        engine: started with a small limit (the guide's is 20).
        subject: the checkpoint, for the output.
        prompt: token ids, of which the first 8 are used.

    Raises:
        EngineError: the engine has no limit of its own, or a limit that leaves no room.
    """
    result = Diagnosis("max-model-len", subject)
    known = engine.capabilities()
    limit = known.max_length
    if not known.own_limit or limit is None:
        raise EngineError(
            f"{engine.name} has no limit of its own, so there is nothing to check. This needs an engine that enforces "
            f"its max_model_len: {VLLM}, or a server that reports one (--engine http://HOST:PORT)."
        )
    prompt = list(prompt)[: min(PROMPT_TOKENS, limit - 1)]
    if not prompt:
        raise EngineError(f"a limit of {limit} leaves no room for a prompt and a token")
    result.measured = {"max_model_len": limit, "prompt_tokens": len(prompt)}
    result.say(f"Prompt tokens: {len(prompt)}")
    try:
        sample = engine.generate([prompt], Sampling(0.0), max_new_tokens=limit, beyond_limit=True)[0]
    except EngineError as error:
        result.say(f"Refused: {error}")
        result.measured["refused"] = True
        return result.finish()
    total = len(sample.sequence)
    result.say(f"Generated tokens: {len(sample.tokens)}")
    result.say(f"Total tokens: {total}")
    result.measured |= {"generated_tokens": len(sample.tokens), "total_tokens": total, "refused": False}
    return result.finish("" if total <= limit else f"{total} tokens, and max_model_len is {limit}")


def diagnose_decode_vs_prefill(
    engine: Engine,
    subject: str,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 512,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> Diagnosis:
    """2: sample long continuations at temperature 1, and score the same tokens in one prefill.

    Only generated tokens count: prompt tokens are prefilled both times, and would dilute an error in decoding.

    Args:
        engine: any that scores.
        subject: the checkpoint, for the output.
        prompts: token ids.
        new_tokens: how many to generate for each.
        threshold: bound on the mean of `exp(abs(difference))` over a sequence's generated tokens.
        seed: of the sampling.

    Raises:
        EngineError: the engine cannot score, or fails.
    """
    result = Diagnosis("decode-vs-prefill", subject)
    samples = engine.generate(prompts, Sampling(), max_new_tokens=new_tokens, seed=seed)
    sequences = _against_prefill(engine, samples, new_tokens)
    for index, (sample, found) in enumerate(zip(samples, sequences, strict=True)):
        result.say(
            f"prompt {index}: {len(sample.prompt)} tokens, {found.tokens} generated: mean exp(|decode - prefill|) = "
            f"{found.token_mult_prob_error:.7f}, largest difference {found.max:.2e}"
            + (f", {found.nan} NaN" if found.nan else "")
        )
    bad = [
        index
        for index, found in enumerate(sequences)
        if not found.token_mult_prob_error < threshold or found.nan or found.engine_infinite
    ]
    result.measured = {"threshold": threshold, "sequences": [found.to_json() for found in sequences]}
    return result.finish(f"decoding and prefill differ for prompts {bad}, threshold {threshold:g}" if bad else "")


def _against_prefill(engine: Engine, samples: Sequence[Sample], new_tokens: int) -> list[ConsistencyMetrics]:
    """Each sample as it was decoded, compared with the same tokens in one prefill at temperature 1."""
    scores = engine.score([sample.sequence for sample in samples], Sampling(), last=new_tokens)
    return [
        consistency_metrics(padded([score[len(sample.prompt) :]]), padded([sample.logprobs]))
        for sample, score in zip(samples, scores, strict=True)
    ]


def diagnose_precision(
    start: Start,
    subject: str,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 64,
    modes: Sequence[str] = tuple(MODES),
    tolerance: float = TOLERANCE,
) -> Diagnosis:
    """4: score the same tokens in eager mode and in compiled modes. Informative, not a strict check.

    The tokens are prompts, and what eager mode generated for them: if each mode generated its own, nothing could be
    compared after the first token that differs.

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
    if not torch.cuda.is_available():
        result.say("No CUDA here: the modes compile without capturing graphs.")
    with start({"enforce_eager": True}) as engine:
        samples = engine.generate(prompts, Sampling(0.0), max_new_tokens=new_tokens)
        sequences = [sample.sequence for sample in samples]
        eager = engine.score(sequences, Sampling())
    measured = []
    for mode in modes:
        with start(MODES[mode]) as engine:
            scores = engine.score(sequences, Sampling())
            free = engine.generate(prompts, Sampling(0.0), max_new_tokens=new_tokens)
        for part in ("prompt", "generation"):
            expected, actual = (_part(rows, samples, part) for rows in (eager, scores))
            measured.append(_compare(result, f"Eager and {mode} ({part} lps)", expected, actual, tolerance))
        pairs = [zip(first.tokens, second.tokens, strict=False) for first, second in zip(samples, free, strict=True)]
        same = [len(list(takewhile(lambda pair: pair[0] == pair[1], tokens))) for tokens in pairs]
        result.say(f"  generating by itself, it agrees with eager on the first {same} of {new_tokens} tokens")
    result.measured = {"tolerance": tolerance, "comparisons": measured}
    failed = [comparison for comparison in measured if not comparison["close"]]
    result.say("=" * 100)
    return result.finish(f"{len(failed)} of {len(measured)} comparisons differ; see above" if failed else "")


def _part(rows: Sequence[Sequence[float]], samples: Sequence[Sample], part: str) -> torch.Tensor:
    """Log-probabilities of the prompts (without their first tokens), or of the generated tokens."""
    lengths = [len(sample.prompt) for sample in samples]
    places = [slice(1, length) if part == "prompt" else slice(length, None) for length in lengths]
    return padded([row[place] for row, place in zip(rows, places, strict=True)])


def _compare(
    result: Diagnosis, name: str, expected: torch.Tensor, actual: torch.Tensor, tolerance: float
) -> dict[str, Any]:
    present = ~(expected.isnan() & actual.isnan())  # shorter sequences are padded with NaN
    wanted, given = expected[present], actual[present]
    mismatched = int((~given.isclose(wanted, rtol=tolerance, atol=tolerance)).sum())
    result.say("=" * 100)
    try:
        numpy.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        result.say(f"{name}: FAILED - Arrays are different")
        result.say("Detailed error:")
        result.lines += [line.strip() for line in str(error).splitlines() if line.strip()]
    else:
        result.say(f"{name}: PASSED - Arrays are close within tolerance (atol={tolerance}, rtol={tolerance})")
    return {
        "comparison": name,
        "close": mismatched == 0,
        "mismatched": mismatched,
        "elements": wanted.numel(),
        "max_diff": max((wanted - given).abs().nan_to_num(nan=math.inf).tolist(), default=0.0),
    }


def diagnose_prefix_caching(
    engine: Engine,
    subject: str,
    prompt: Sequence[int],
    *,
    new_tokens: int = 2048,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Diagnosis:
    """5: have the engine continue counting, add its answer to the prompt, and have it continue again, without NaN.

    Multi-turn RL prompts an engine like this, and its prefix cache then holds what decoding has written. (vLLM 0.14
    gave NaN for every token but the first of the second answer.)

    Args:
        engine: one with prefix caching.
        subject: the checkpoint, for the output.
        prompt: token ids of a text that counts; the guide's counts to 3000.
        new_tokens: tokens to generate, twice.
        decode: gives the text of token ids, for the output.

    Raises:
        EngineError: no prefix caching, or the sequences do not fit.
    """
    if not engine.capabilities().prefix_caching:
        raise EngineError(
            f"{engine.name} runs without prefix caching, so there is nothing to check. This needs an engine that keeps "
            f"the keys and values of earlier prompts: {VLLM}, or several versions of it (--engine-python ENVIRONMENT)."
        )
    result = Diagnosis("prefix-caching", subject)
    iterations: list[dict[str, Any]] = []
    version = str(engine.describe().get("vllm", "")).rpartition(" ")[2]
    result.measured = {"engine": f"{engine.name} {version}".strip(), "iterations": iterations}
    tokens = tuple(prompt)
    for iteration in (1, 2):
        length = f"{len(tokens)} tokens" if decode is None else f"{len(decode(tokens))} chars"
        result.say(f"Iteration {iteration} — prompt length: {length}")
        sample = engine.generate([tokens], Sampling(0.0), max_new_tokens=new_tokens)[0]
        result.say(f"  tokens: {len(sample.tokens)}, finish_reason: {sample.finish_reason}")
        if decode is not None:
            result.say(f"  text (first 100): {decode(sample.tokens)[:100]!r}")
        nan = sum(math.isnan(logprob) for logprob in sample.logprobs)
        iterations.append({"prompt_tokens": len(tokens), "tokens": len(sample.tokens), "nan": nan})
        if nan:
            result.say(f"  Sample logprobs from iteration {iteration}:")
            places = [*range(min(SHOWN_TOKENS, len(sample.tokens))), len(sample.tokens) - 1]
            for place in dict.fromkeys(places):
                text = f" decoded={decode([sample.tokens[place]])!r}" if decode is not None else ""
                result.say(f"    token[{place}] id={sample.tokens[place]}: logprob={sample.logprobs[place]}{text}")
            count = f"{nan}/{len(sample.tokens)} logprobs"
            broken = "prefix caching is broken" + (f" in vLLM {version}" if version else "")
            return result.finish(f"{count} are NaN on iteration {iteration} ({broken})")
        tokens = sample.sequence
    # The guide only asks for no NaN; a prefill without the cache shows whether the numbers are right.
    (found,) = _against_prefill(engine, [sample], new_tokens)
    result.say(
        f"  compared with one prefill without the cache: token_mult_prob_error {found.token_mult_prob_error:.7f}"
    )
    result.measured["against_prefill"] = found.to_json()
    return result.finish()
