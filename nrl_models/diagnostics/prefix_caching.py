"""Diagnostic 5: no NaN once an answer is part of the next prompt.

That is how multi-turn RL prompts an engine, and its prefix cache then holds what decoding has written. (vLLM 0.14 gave
NaN for every token but the first of the second answer.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.base import Engine, Sample, padded
from nrl_models.errors import EngineError
from nrl_models.logprobs.metrics import consistency_metrics
from nrl_models.logprobs.sampling import Sampling

SHOWN_TOKENS = 3


def diagnose_prefix_caching(
    engine: Engine,
    subject: str,
    prompt: Sequence[int],
    *,
    new_tokens: int = 2048,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> Diagnosis:
    """Let the engine count on, put its answer into the prompt, and let it count on again.

    Args:
        engine: with prefix caching.
        subject: the checkpoint, for the output.
        prompt: token ids of a text that counts; the guide's counts to 3000.
        new_tokens: to generate, twice.
        decode: text of token ids, for the output.

    Raises:
        EngineError: no prefix caching, or the sequences do not fit.
    """
    if not engine.capabilities().prefix_caching:
        raise EngineError(f"{engine.name} runs without prefix caching, so there is nothing to check")
    result = Diagnosis("prefix-caching", subject)
    iterations: list[dict[str, Any]] = []
    tokens = list(prompt)
    for iteration in (1, 2):
        result.say(f"Iteration {iteration} - prompt length: {len(tokens)} tokens")
        sample = engine.generate([tokens], Sampling(0.0), max_new_tokens=new_tokens)[0]
        result.say(f"  tokens: {len(sample.tokens)}, finish_reason: {sample.finish_reason}")
        if decode is not None:
            result.say(f"  text (first 100): {decode(sample.tokens)[:100]!r}")
        nan = sum(math.isnan(logprob) for logprob in sample.logprobs)
        iterations.append({"prompt_tokens": len(tokens), "tokens": len(sample.tokens), "nan": nan})
        if nan:
            result.measured = {"iterations": iterations}
            return _failed(result, sample, iteration, nan, decode)
        tokens = list(sample.sequence)
    # No NaN is the guide's rule; that the numbers are right is seen from one prefill without the cache.
    score = engine.score([sample.sequence], Sampling(), last=new_tokens)[0]
    found = consistency_metrics(padded([score[len(sample.prompt) :]]), padded([sample.logprobs]))
    result.say(f"  against one prefill without the cache: token_mult_prob_error {found.token_mult_prob_error:.7f}")
    result.measured = {"iterations": iterations, "against_prefill": found.to_json()}
    return result.finish()


def _failed(
    result: Diagnosis, sample: Sample, iteration: int, nan: int, decode: Callable[[Sequence[int]], str] | None
) -> Diagnosis:
    result.say(f"  Sample logprobs from iteration {iteration}:")
    places = [*range(min(SHOWN_TOKENS, len(sample.tokens))), len(sample.tokens) - 1]
    for place in dict.fromkeys(places):
        text = f" decoded={decode([sample.tokens[place]])!r}" if decode is not None else ""
        result.say(f"    token[{place}] id={sample.tokens[place]}: logprob={sample.logprobs[place]}{text}")
    return result.finish(
        f"{nan}/{len(sample.tokens)} logprobs are NaN on iteration {iteration} (prefix caching is broken)"
    )
