"""What engines take and give: token ids, samples, what an engine can do, reports of refits and calls of modules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

Tokens = Sequence[int]
NamedTensor = tuple[str, torch.Tensor]

VLLM_TEMPERATURES = 0.01, 2.0
"""Lowest and highest temperature of vLLM's samplers: lower ones are raised to 0.01, higher ones rejected."""

LOGITS = "logits"
"""The name under which `Engine.module_calls` has the model's last hidden states and its logits."""

AT_PLACEHOLDER = "placeholder"
"""Why a reply ends at the token that stands for an image: it is of no image, and left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation of a prompt.

    Args:
        prompt: token ids.
        tokens: the sampled token ids.
        logprobs: of each sampled token, under the distribution it was sampled from.
        finish_reason: why it ended: `length`, `stop`, `AT_PLACEHOLDER`, or what else the engine reports.
        routed_experts: the experts chosen for each token but the last, `(tokens, layers, experts per token)`, for
            `engine_routing`; None if the engine does not report them.
        model_inputs: what was given beside the prompt's token ids, see `Engine.generate`.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = "length"
    routed_experts: torch.Tensor | None = field(default=None, compare=False, repr=False)
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.prompt + self.tokens

    @property
    def sequence_inputs(self) -> dict[str, torch.Tensor]:
        """`model_inputs` for prompt and continuation: kinds of tokens are zero, text, in a continuation."""
        of_tokens = (1, len(self.prompt))
        return {
            name: F.pad(value, (0, len(self.tokens))) if value.shape == of_tokens else value
            for name, value in self.model_inputs.items()
        }


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do.

    Args:
        score: whether it gives log-probabilities of given tokens in one prefill.
        processed_scores: whether it does so under any `Sampling`; otherwise only at temperature 1, without truncation.
        refit: whether it takes new weights.
        modules: whether the inputs and outputs of its modules can be recorded.
        images: whether prompts may come with `model_inputs` of images.
        raw_images: whether prompts may come with `images`, which the engine's own processor prepares.
        prefix_caching: whether it may reuse what it computed for an earlier prompt.
        max_length: most tokens of a prompt and its continuation together; None if unknown.
        own_limit: whether the engine itself enforces that.
        vocabulary: number of token ids; None if unknown.
        dtype: what it computes in; None if unknown.
        min_temperature: lowest temperature above 0 that it samples at. vLLM uses 0.01 in place of anything lower.
        max_temperature: highest temperature that it samples at.
        transformers_classes: whether it could compute with transformers' classes in place of its own, which it has now.
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
    min_temperature: float = 1e-6
    max_temperature: float = math.inf
    transformers_classes: bool = False


@dataclass(frozen=True, slots=True)
class RefitReport:
    """The outcome of sending weights to an engine.

    Args:
        tensors: how many were sent.
        nbytes: their size in bytes.
        seconds: time taken, including the engine's own processing.
        buckets: number of calls they were sent in.
        largest_bucket: bytes in the largest call, all of which had to be held at once.
        digests: the `tensor_digest` of each tensor as it arrived, by name.
        unwritten: the engine's parameters that nothing was written to.
        stale_buffers: the engine's persistent buffers that nothing was written to.
        version: the number of the weights that the engine has now: how many refits it took since it started.
    """

    tensors: int
    nbytes: int
    seconds: float
    buckets: int
    largest_bucket: int
    digests: Mapping[str, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    stale_buffers: tuple[str, ...] = ()
    version: int = 0


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Inputs and outputs of a module for the tokens of one sequence.

    Args:
        class_name: its class.
        inputs: its floating-point arguments.
        outputs: the floating-point tensors it returned.
    """

    class_name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
