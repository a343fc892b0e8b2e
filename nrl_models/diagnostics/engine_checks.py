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
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.scores import padded
from nrl_models.errors import EngineError, UnknownArgumentError
from nrl_models.logprobs.metrics import ConsistencyMetrics, consistency_metrics, shown_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.parity_report import Unit
from nrl_models.parity.worst import last_if_nan

PROMPT_TOKENS = 8
"""Number of prompt tokens for the check of the length limit."""

THRESHOLD = 1.05
"""The guide's bound for decoding compared with prefill."""

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
"""Modes to compare with eager mode, by the guide's names, with vLLM's options. The precision flag is the environment
variable `TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1`. On a CPU, modes compile, but have no graphs."""

VLLM = "--engine vllm (`make engine` installs it)"
"""Options of the engine that supports these diagnostics."""

SHOWN_TOKENS = 3
"""Number of first tokens of an answer to show if prefix caching returns NaN."""

Start = Callable[[dict[str, Any]], AbstractContextManager[Engine]]
"""Function that starts an engine with additional options."""


def diagnose_max_model_len(
    engine: Engine, subject: str, prompt: Sequence[int], *, prompt_tokens: int = PROMPT_TOKENS
) -> Diagnosis:
    """Check that the engine enforces `max_model_len`, by requesting more tokens than fit (diagnostic 1).

    Without this limit, an engine reads and writes past the end of its tables in long sequences.

    Args:
        engine: Engine started with a small limit (20 in the guide).
        subject: The checkpoint, for the output.
        prompt: Token ids.
        prompt_tokens: Number of tokens of the prompt to use; the guide uses 8.

    Raises:
        EngineError: If the engine has no limit, the limit leaves no room for a new token, or the engine fails.
    """
    result = Diagnosis("max-model-len", subject)
    known = engine.capabilities()
    limit = known.max_length
    if not known.own_limit or limit is None:
        raise EngineError(
            f"{engine.name} has no length limit, so there is nothing to check. This needs an engine that enforces "
            f"its max_model_len: {VLLM}, or a server that reports one (--engine http://HOST:PORT)."
        )
    prompt = list(prompt)[: min(prompt_tokens, limit - 1)]
    if not prompt:
        raise EngineError(f"a limit of {limit} leaves no room for a prompt and a token")
    result.measured = {"max_model_len": limit, "prompt_tokens": len(prompt)}
    result.bound, result.unit = limit, Unit.COUNT
    result.say(f"Prompt tokens: {len(prompt)}")
    try:
        sample = engine.generate([prompt], Sampling(0.0), max_new_tokens=limit, beyond_limit=True)[0]
    except EngineError as error:
        # An engine that has died also raises. An engine that rejects the request still generates tokens that fit.
        engine.generate([prompt], Sampling(0.0), max_new_tokens=limit - len(prompt), ignore_end=False)
        result.say(f"Refused: {error}")
        result.measured["refused"] = True
        return result.finish()
    total = len(sample.sequence)
    result.value = total
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
    """Compare long continuations, sampled at temperature 1, with a prefill of the same tokens (diagnostic 2).

    Only generated tokens are compared, because prompt tokens are prefilled both times and would dilute an error.

    Args:
        engine: An engine that can score.
        subject: The checkpoint, for the output.
        prompts: Token ids of each prompt.
        new_tokens: Number of tokens to generate per prompt.
        threshold: Bound of the mean of `exp(abs(difference))` over a sequence's generated tokens.
        seed: Random seed of the sampling.

    Raises:
        EngineError: If the engine cannot score, or fails.
        UnknownArgumentError: If there are no prompts.
    """
    if not prompts:
        raise UnknownArgumentError("prompts is empty: expected the token ids of at least one prompt")
    result = Diagnosis("decode-vs-prefill", subject)
    samples = engine.generate(prompts, Sampling(), max_new_tokens=new_tokens, seed=seed)
    sequences = _against_prefill(engine, samples, new_tokens)
    for index, (sample, metrics) in enumerate(zip(samples, sequences, strict=True)):
        result.say(
            f"prompt {index}: {len(sample.prompt)} tokens, {metrics.tokens} generated: mean exp(|decode - prefill|) = "
            f"{shown_error(metrics.token_mult_prob_error)}, largest difference {metrics.max:.2e}"
            + (f", {metrics.nan} NaN" if metrics.nan else "")
            + (f", {metrics.trainer_infinite} with probability 0 in the prefill" if metrics.trainer_infinite else "")
        )
    bad = [
        index
        for index, metrics in enumerate(sequences)
        if not metrics.token_mult_prob_error < threshold or metrics.impossible(Sampling())
    ]
    result.measured = {"threshold": threshold, "sequences": [metrics.to_json() for metrics in sequences]}
    errors = (metrics.token_mult_prob_error for metrics in sequences)
    result.value = max(errors, key=last_if_nan, default=None)
    result.bound, result.unit = threshold, Unit.TOKEN_MULT_PROB_ERROR
    return result.finish(f"decoding and prefill differ for prompts {bad}, threshold {threshold:g}" if bad else "")


def _against_prefill(engine: Engine, samples: Sequence[Sample], new_tokens: int) -> list[ConsistencyMetrics]:
    """Compare each decoded sample with a prefill of the same tokens at temperature 1."""
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
    """Compare scores of the same tokens in eager mode and in compiled modes (diagnostic 4). Only informative.

    The tokens are prompts with their continuations from eager mode. If each mode generated its own continuation,
    nothing could be compared after the first different token.

    Args:
        start: Starts the engine in a mode.
        subject: The checkpoint, for the output.
        prompts: Token ids of each prompt.
        new_tokens: Number of tokens that eager mode generates per prompt.
        modes: Modes from `MODES`.
        tolerance: Absolute and relative tolerance.

    Raises:
        EngineError: If the engine does not start in a mode, or fails.
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
        result.say(f"  its own continuation agrees with eager on the first {same} of {new_tokens} tokens")
    result.measured = {"tolerance": tolerance, "comparisons": measured}
    failed = [comparison for comparison in measured if not comparison["close"]]
    result.value, result.bound, result.unit = sum(each["mismatched"] for each in measured), 0, Unit.COUNT
    result.say("=" * 100)
    return result.finish(f"{len(failed)} of {len(measured)} comparisons differ; see above" if failed else "")


def _part(rows: Sequence[Sequence[float]], samples: Sequence[Sample], part: str) -> torch.Tensor:
    """Return log-probabilities of the prompts (without their first tokens), or of the generated tokens."""
    lengths = [len(sample.prompt) for sample in samples]
    slices = [slice(1, length) if part == "prompt" else slice(length, None) for length in lengths]
    return padded([row[part_slice] for row, part_slice in zip(rows, slices, strict=True)])


def _compare(
    result: Diagnosis, name: str, expected: torch.Tensor, actual: torch.Tensor, tolerance: float
) -> dict[str, Any]:
    present = ~(expected.isnan() & actual.isnan())  # shorter sequences are padded with NaN
    expected_logprobs, actual_logprobs = expected[present], actual[present]
    mismatched = int((~actual_logprobs.isclose(expected_logprobs, rtol=tolerance, atol=tolerance)).sum())
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
        "elements": expected_logprobs.numel(),
        "max_diff": max((expected_logprobs - actual_logprobs).abs().nan_to_num(nan=math.inf).tolist(), default=0.0),
    }


def diagnose_prefix_caching(
    engine: Engine,
    subject: str,
    prompt: Sequence[int],
    *,
    new_tokens: int = 2048,
    threshold: float = THRESHOLD,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Diagnosis:
    """Check a continued answer with prefix caching: no NaN, and close to a prefill (diagnostic 5).

    The engine continues a count, its answer is appended to the prompt, and it continues again. Multi-turn RL does the
    same, so the cache then has entries written while decoding. vLLM 0.14 returned NaN for all tokens of the second
    answer except the first.

    The guide only requires values without NaN. This check also compares the second answer with one prefill without
    the cache.

    Args:
        engine: An engine with prefix caching.
        subject: The checkpoint, for the output.
        prompt: Token ids of a text that counts; to 3000 in the guide.
        new_tokens: Number of tokens to generate, twice.
        threshold: Bound of the second answer's `token_mult_prob_error`, compared with one prefill.
        decode: Function that decodes token ids, for the output.

    Raises:
        EngineError: If the engine has no prefix caching, or the sequences do not fit.
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
    result.value, result.bound, result.unit = 0, 0, Unit.COUNT  # number of NaN values
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
        result.value = nan
        if nan:
            result.say(f"  Sample logprobs from iteration {iteration}:")
            positions = [*range(min(SHOWN_TOKENS, len(sample.tokens))), len(sample.tokens) - 1]
            for position in dict.fromkeys(positions):
                text = f" decoded={decode([sample.tokens[position]])!r}" if decode is not None else ""
                result.say(
                    f"    token[{position}] id={sample.tokens[position]}: logprob={sample.logprobs[position]}{text}"
                )
            count = f"{nan}/{len(sample.tokens)} logprobs"
            broken = "prefix caching is broken" + (f" in vLLM {version}" if version else "")
            return result.finish(f"{count} are NaN on iteration {iteration} ({broken})")
        tokens = sample.sequence
    (metrics,) = _against_prefill(engine, [sample], new_tokens)
    compared = f"token_mult_prob_error {shown_error(metrics.token_mult_prob_error)}"
    if impossible := metrics.impossible(Sampling()):
        compared += f", {impossible} tokens with probability 0 or NaN"
    result.say(f"  compared with one prefill without the cache: {compared}")
    result.measured |= {"against_prefill": metrics.to_json(), "threshold": threshold}
    result.value, result.bound, result.unit = metrics.token_mult_prob_error, threshold, Unit.TOKEN_MULT_PROB_ERROR
    agrees = metrics.token_mult_prob_error <= threshold and not impossible
    differs = f"cached tokens and one prefill differ: {compared}, threshold {threshold:g}"
    return result.finish("" if agrees else differs)
