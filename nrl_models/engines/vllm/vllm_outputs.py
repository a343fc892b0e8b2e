"""Convert vLLM's outputs to samples and log-probabilities, and check that they are complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nrl_models.engines.engine_types import AT_PLACEHOLDER, Sample, Tokens
from nrl_models.errors import EngineError


def samples_from(
    outputs: Sequence[Any], prompts: Sequence[Tokens], placeholder: int | None, *, has_images: bool
) -> list[Sample]:
    """Convert the outputs of generation.

    Args:
        outputs: vLLM's output for each prompt.
        prompts: Token ids that were sent.
        placeholder: Token id of an image, which ends a completion and is removed from it.
        has_images: Whether the prompts have images. The token ids are then those of vLLM's processor.

    Raises:
        EngineError: If log-probabilities are missing.
    """
    samples = []
    for prompt, output in zip(prompts, outputs, strict=True):
        best = output.outputs[0]
        tokens, logprobs = tuple(best.token_ids), _chosen(best.logprobs, best.token_ids)
        reason = str(best.finish_reason or "unfinished")
        if placeholder is not None and tokens[-1:] == (placeholder,):
            tokens, logprobs, reason = tokens[:-1], logprobs[:-1], AT_PLACEHOLDER
        routed = getattr(best, "routed_experts", None)  # with `enable_return_routed_experts=True`
        samples.append(
            Sample(
                tuple(output.prompt_token_ids) if has_images else tuple(prompt),
                tokens,
                logprobs,
                reason,
                None if routed is None else torch.from_numpy(routed.astype("int64")),
            )
        )
    return samples


def scores_from(outputs: Sequence[Any], sequences: Sequence[Tokens], *, has_images: bool) -> list[list[float]]:
    """Return the log-probability of each token of a prompt. The value of the first token is NaN.

    Args:
        outputs: vLLM's output for each sequence.
        sequences: Token ids that were sent.
        has_images: Whether the sequences have images. The token ids are then those of vLLM's processor.

    Raises:
        EngineError: If log-probabilities are missing, or the processor appended tokens.
    """
    scores = []
    for tokens, output in zip(sequences, outputs, strict=True):
        if output.prompt_logprobs is None:
            raise EngineError("vLLM returned no log-probabilities of the prompt")
        scored = output.prompt_token_ids if has_images else tokens
        if tokens and scored[-1] != tokens[-1]:
            raise EngineError(
                f"vLLM's processor of this model appends token {scored[-1]} after the prompt, which ended with "
                f"{tokens[-1]}: it can continue prompts with images, but not score existing tokens"
            )
        scores.append([math.nan, *_chosen(list(output.prompt_logprobs)[1:], scored[1:])])
    return scores


def _chosen(logprobs: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of each token. Looked up by id, because the likeliest token may be listed first."""
    if logprobs is None or len(logprobs) != len(tokens):
        raise EngineError(
            f"vLLM returned {0 if logprobs is None else len(logprobs)} log-probabilities for {len(tokens)} tokens"
        )
    return tuple(places[token].logprob for places, token in zip(logprobs, tokens, strict=True))
