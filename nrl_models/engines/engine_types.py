"""Types of the engine interface: token ids, samples, capabilities, refit reports and recorded module calls."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from nrl_models.common.config.causality import PREFIX_TYPES
from nrl_models.common.forward.token_types import PER_TOKEN, continued
from nrl_models.logprobs.sampling import LOWEST_TEMPERATURE

Tokens = Sequence[int]
NamedTensor = tuple[str, torch.Tensor]

BUCKET_BYTES = 2**28
"""Maximum bytes of the weights that are sent to another process at once, unless a single tensor is larger."""

VLLM_TEMPERATURES = 0.01, 2.0
"""Lowest and highest temperature of vLLM's samplers: lower ones are raised to 0.01, higher ones rejected."""

LOGITS = "logits"
"""The name under which `Engine.module_calls` has the model's last hidden states and its logits."""

AT_PLACEHOLDER = "placeholder"
"""Finish reason of a completion that stopped before a sampled image, video or audio token, which is left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation of a prompt.

    Args:
        prompt: Token ids of the prompt.
        tokens: Sampled token ids.
        logprobs: Log-probability of each sampled token under the sampling distribution.
        finish_reason: Why the completion ended: `length`, `stop`, `AT_PLACEHOLDER`, or another reason of the engine.
        routed_experts: Experts chosen for each token except the last, `(tokens, layers, experts per token)`, for
            `engine_routing`. None if the engine does not report them.
        model_inputs: Further inputs of the prompt, as passed to `Engine.generate`.
        prefix_types: Whether `token_type_ids` 0 marks a bidirectional prefix (PaliGemma), so that a completion has 1.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = "length"
    routed_experts: torch.Tensor | None = field(default=None, compare=False, repr=False)
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    prefix_types: bool = field(default=False, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"Sample({len(self.prompt)} prompt tokens, {len(self.tokens)} tokens, {self.finish_reason!r})"

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.prompt + self.tokens

    @property
    def sequence_inputs(self) -> dict[str, torch.Tensor]:
        """`model_inputs` for prompt plus continuation: those of `PER_TOKEN` are continued."""
        fills = {**PER_TOKEN, PREFIX_TYPES: int(self.prefix_types)}
        return {
            name: continued(value, len(self.tokens), fills[name]) if name in fills and value is not None else value
            for name, value in self.model_inputs.items()
        }


def prompt_seeds(seed: int, count: int) -> list[int]:
    """Return seeds of 31 bits, one for each prompt.

    They are hashes. With `seed + index`, samples of consecutive seeds would share random numbers.

    Args:
        seed: Seed of the batch.
        count: Number of prompts.
    """
    digests = (hashlib.sha256(f"{seed},{index}".encode()).digest() for index in range(count))
    return [int.from_bytes(digest[:4], "big") >> 1 for digest in digests]


def by_length(rows: Sequence[Tokens], inputs: Sequence[Mapping[str, Any]] | None = None) -> list[list[int]]:
    """Group indices of rows of equal length. Rows with image inputs are grouped only if the inputs are identical."""
    first: dict[int, int] = {}
    for index, row_inputs in enumerate(inputs or ()):
        first.setdefault(id(row_inputs) if row_inputs else 0, index)

    def kind(index: int) -> tuple[int, int]:
        return len(rows[index]), 0 if inputs is None else first[id(inputs[index]) if inputs[index] else 0]

    return [list(group) for _, group in groupby(sorted(range(len(rows)), key=kind), key=kind)]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of an engine.

    Args:
        score: Whether it can score existing tokens in one prefill.
        processed_scores: Whether it scores under any `Sampling`. Otherwise only at temperature 1 without truncation.
        refit: Whether it accepts new weights.
        modules: Whether inputs and outputs of its modules can be recorded.
        images: Whether prompts can have `model_inputs`.
        raw_images: Whether prompts can have `images`, which the engine's own processor prepares.
        prefix_caching: Whether it may reuse results of earlier prompts.
        max_length: Maximum number of tokens of prompt plus continuation; None if unknown.
        own_limit: Whether the engine itself enforces `max_length`.
        vocabulary: Number of token ids; None if unknown.
        dtype: Compute dtype; None if unknown.
        min_temperature: Lowest supported temperature above 0. vLLM raises lower temperatures to 0.01.
        max_temperature: Highest supported temperature.
        transformers_classes: Whether the engine now runs its own model class and could run transformers' instead.
    """

    score: bool = True
    processed_scores: bool = True
    refit: bool = False
    modules: bool = False
    images: bool = False
    raw_images: bool = False
    prefix_caching: bool = False
    max_length: int | None = None
    own_limit: bool = False
    vocabulary: int | None = None
    dtype: torch.dtype | None = None
    min_temperature: float = LOWEST_TEMPERATURE
    max_temperature: float = math.inf
    transformers_classes: bool = False


@dataclass(frozen=True, slots=True)
class RefitReport:
    """Result of sending weights to an engine.

    Args:
        tensors: Number of tensors sent.
        nbytes: Size of the tensors in bytes.
        seconds: Time, including the engine's processing.
        buckets: Number of buckets.
        largest_bucket: Size of the largest bucket in bytes. All of it is in memory at once.
        digests: `tensor_digest` of each received tensor, by name.
        unwritten: Parameters of the engine that were not written.
        stale_buffers: Persistent buffers of the engine that were not written.
        version: Version of the engine's weights: the number of refits since its start.
    """

    tensors: int
    nbytes: int
    seconds: float
    buckets: int
    largest_bucket: int
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    unwritten: tuple[str, ...] = ()
    stale_buffers: tuple[str, ...] = ()
    version: int = 0


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Inputs and outputs of a module for the tokens of one sequence.

    Args:
        class_name: Class of the module.
        inputs: Floating-point arguments.
        outputs: Floating-point tensors in its result.
    """

    class_name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
