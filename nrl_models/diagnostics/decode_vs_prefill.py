"""Diagnostic 2: does decoding give the log-probabilities of one prefill?

Only generated tokens count: prompt tokens are prefilled both times, and would dilute an error of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.base import Engine, padded
from nrl_models.logprobs.metrics import consistency_metrics
from nrl_models.logprobs.sampling import Sampling

THRESHOLD = 1.05


def diagnose_decode_vs_prefill(
    engine: Engine,
    subject: str,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 512,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> Diagnosis:
    """Sample long continuations at temperature 1, and score prompt and continuation again in one prefill.

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
    scores = engine.score([sample.sequence for sample in samples], Sampling(), last=new_tokens)
    sequences = []
    for index, (sample, score) in enumerate(zip(samples, scores, strict=True)):
        decode = padded([sample.logprobs])
        found = consistency_metrics(padded([score[len(sample.prompt) :]]), decode)
        sequences.append(found)
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
