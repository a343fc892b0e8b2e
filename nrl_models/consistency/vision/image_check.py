"""Compares an engine and a trainer on prompts with images: the same pixels, each side with its own processor.

Where they disagree, what the two text models begin with is compared, in the order in which it is made: the tensors and
token ids of the processors, the positions of the tokens, the features of the images. The first that differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.consistency.cells import NOISE_FACTOR, THRESHOLD, largest_error
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.engines.vllm_images import ImageCalls
from nrl_models.errors import ConsistencyError
from nrl_models.inputs.images import cast, image_token
from nrl_models.logprobs.metrics import token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.noise import rounded_otherwise

TOLERANCE = 1e-3
"""By how much tensors that should be equal may differ in fp32, relative to their size: kernels round differently."""

ROUNDINGS = 4.0
"""In a lower precision, by how many of its smallest steps from 1."""


class ImageFault(StrEnum):
    """What an engine and transformers compute differently, the first of them."""

    PROCESSOR = "processor"
    """The tensors made of the images, or the token ids around them."""
    POSITIONS = "positions"
    """Of the tokens, for the rotary embedding."""
    TOWER = "tower"
    """The features of the images. The pixels, if the processors' tensors have no name in common to compare them by."""
    ATTENTION = "attention"
    """Whether tokens see those after them: the engine gives what transformers gives if none does."""
    TEXT = "text"
    """None of these, so what the text model makes of them."""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images.

    Args:
        text: with one placeholder for each image, as the processor takes it.
        images: PIL, in the order of their placeholders.
    """

    text: str
    images: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """The outcome of one prompt.

    Args:
        sizes: `(width, height)` of its images.
        prompt_tokens: of the trainer's prompt, those of images included.
        new_tokens: sampled, and compared.
        decode: `token_mult_prob_error` of the trainer and the engine as it sampled; infinite if the prompts differ.
        prefill: of the trainer and the engine's prefill of the same tokens; likewise.
        bound: on both: the threshold, or more if the noise floor of the trainer's precision explains more.
        fault: what differs first; None if the prompt agrees.
    """

    sizes: tuple[tuple[int, int], ...]
    prompt_tokens: int
    new_tokens: int
    decode: float
    prefill: float
    bound: float
    fault: ImageFault | None = None

    @property
    def passed(self) -> bool:
        """Whether both errors are within the bound."""
        return max(self.decode, self.prefill) <= self.bound


@dataclass(frozen=True, slots=True)
class _Scored:
    """What the trainer and the engine make of one prompt and the engine's reply.

    Args:
        prompt: which.
        tokens: of its text, with placeholders.
        sample: of the engine.
        ids: of the trainer's prompt.
        own: what the trainer gets of the images.
        trainer: log-probabilities of the reply; None if the prompts differ.
        prefill: the engine's.
    """

    prompt: ImagePrompt
    tokens: Sequence[int]
    sample: Sample
    ids: tuple[int, ...]
    own: dict[str, torch.Tensor]
    trainer: torch.Tensor | None
    prefill: torch.Tensor

    @property
    def errors(self) -> tuple[float, float]:
        """Against decode, and against prefill."""
        return (float("inf"), float("inf")) if self.trainer is None else self.errors_of(self.trainer)

    def errors_of(self, scores: torch.Tensor) -> tuple[float, float]:
        """The errors that the trainer would have if it gave these log-probabilities."""
        decode = torch.tensor(self.sample.logprobs, dtype=torch.float64)
        return token_mult_prob_error(scores, decode), token_mult_prob_error(scores, self.prefill)


def compare_images(
    engine: VLLMEngine,
    trainer: HFEngine,
    processor: Any,
    prompts: Sequence[ImagePrompt],
    sampling: Sampling,
    *,
    threshold: float,
    noise_factor: float = NOISE_FACTOR,
    new_tokens: int = 16,
    seed: int = 0,
) -> list[ImageComparison]:
    """Have the engine continue prompts with images, and the trainer score what it sampled.

    Args:
        engine: takes raw images.
        trainer: with the same weights.
        processor: transformers', of the checkpoint.
        prompts: what to compare.
        sampling: how the engine samples.
        threshold: the largest `token_mult_prob_error` that passes, where the noise floor allows no more.
        noise_factor: how many times further from 1 than the noise floor it may be; 0 for the threshold alone.
        new_tokens: sampled of each prompt at most.
        seed: of the sampling.

    Returns:
        One outcome a prompt.

    Raises:
        EngineError: the engine fails, or takes no images.
        ConsistencyError: the engine sampled nothing that could be compared.
    """
    plain = [processor.tokenizer(prompt.text).input_ids for prompt in prompts]
    images = [prompt.images for prompt in prompts]
    samples = engine.generate(plain, sampling, max_new_tokens=new_tokens, seed=seed, ignore_end=False, images=images)
    given = [[*tokens, *sample.tokens] for tokens, sample in zip(plain, samples, strict=True)]
    prefilled = engine.score(given, sampling, images=images)
    scored = []
    for prompt, tokens, sample, prefill in zip(prompts, plain, samples, prefilled, strict=True):
        if not sample.tokens:
            raise ConsistencyError(f"{engine.name} ended a reply to images at once: there is nothing to compare")
        own = trainer_inputs(processor, prompt)
        ids = tuple(own.pop("input_ids")[0].tolist())
        ours = _trainer_scores(trainer, ids, sample, own, sampling) if ids == sample.prompt else None
        last = torch.tensor(prefill[-len(sample.tokens) :], dtype=torch.float64)
        scored.append(_Scored(prompt, tokens, sample, ids, own, ours, last))
    bound = threshold
    if any(threshold < max(one.errors) < float("inf") for one in scored):
        bound = largest_error(threshold, noise_factor, _noise(trainer, scored, sampling))
    found = []
    for one in scored:
        against_decode, against_prefill = one.errors
        fault = None
        if not max(one.errors) <= bound:
            fault = ImageFault.PROCESSOR if one.trainer is None else _fault(engine, trainer, one, sampling, bound)
        sizes = tuple(image.size for image in one.prompt.images)
        found.append(
            ImageComparison(sizes, len(one.ids), len(one.sample.tokens), against_decode, against_prefill, bound, fault)
        )
    return found


def _trainer_scores(
    trainer: HFEngine,
    ids: tuple[int, ...],
    sample: Sample,
    own: dict[str, torch.Tensor],
    sampling: Sampling,
    *,
    full_logits: bool = False,
) -> torch.Tensor:
    whole, count = Sample(ids, sample.tokens, sample.logprobs, model_inputs=own), len(sample.tokens)
    inputs = [whole.sequence_inputs]
    scores = trainer.score([whole.sequence], sampling, last=count, full_logits=full_logits, model_inputs=inputs)
    return torch.tensor(scores[0][-count:], dtype=torch.float64)


def _noise(trainer: HFEngine, scored: Sequence[_Scored], sampling: Sampling) -> float:
    """The noise floor: `token_mult_prob_error` of the trainer under other roundings, of the prompt where it is largest.

    A prompt is short, and in a mixture of experts a single token that gets others makes most of its error.
    """
    with rounded_otherwise(trainer.model):
        return max(
            token_mult_prob_error(
                one.trainer, _trainer_scores(trainer, one.ids, one.sample, one.own, sampling, full_logits=True)
            )
            for one in scored
            if one.trainer is not None
        )


def check_images(
    path: str | Path,
    prompts: Sequence[ImagePrompt],
    *,
    dtype: torch.dtype = torch.float32,
    sampling: Sampling | None = None,
    threshold: float = THRESHOLD,
    new_tokens: int = 16,
    engine_options: Mapping[str, Any] | None = None,
) -> list[ImageComparison]:
    """Start vLLM on a checkpoint and compare it with the trainer on prompts with images.

    Args:
        path: the checkpoint's directory, with its processor.
        prompts, new_tokens: see `compare_images`.
        dtype: of both sides.
        sampling: how the engine samples; at temperature 1 by default.
        threshold: the largest `token_mult_prob_error` that passes, where the noise floor allows no more.
        engine_options: vLLM's own.

    Raises:
        EngineError: vLLM does not start, fails, or takes no images.
        ConsistencyError: nothing could be compared.
        OSError, CheckpointError, ...: as `AutoProcessor` and `from_pretrained`.
    """
    folder = resolve_folder(path)
    processor = AutoProcessor.from_pretrained(folder)
    model = auto_class_for(path).from_pretrained(path, dtype=dtype, device="cpu")
    engine = VLLMEngine.start(path, dtype=dtype, **dict(engine_options or {}))
    with engine:
        trainer = HFEngine(model, "trainer")
        return compare_images(
            engine, trainer, processor, prompts, sampling or Sampling(), threshold=threshold, new_tokens=new_tokens
        )


def trainer_inputs(processor: Any, prompt: ImagePrompt) -> dict[str, torch.Tensor]:
    """What transformers' processor makes of a prompt: keywords of the forward of a batch of one, `input_ids` too."""
    made = processor(text=[prompt.text], images=list(prompt.images), return_tensors="pt")
    # There is nothing to mask in a prompt alone, a forward of prompt and reply makes its own, and no loss is computed.
    return {name: value for name, value in made.items() if name not in ("attention_mask", "labels")}


def _fault(engine: VLLMEngine, trainer: HFEngine, scored: _Scored, sampling: Sampling, bound: float) -> ImageFault:
    """What differs first, where the token ids of both sides are the same."""
    theirs, ids = engine.image_calls(scored.tokens, scored.prompt.images), scored.ids
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(trainer.model.dtype).eps)
    if _processed_differs(theirs, scored.own, tolerance):
        return ImageFault.PROCESSOR
    ours = _text_call(trainer.model, ids, scored.own)
    here, there = ours.get("position_ids"), theirs.positions
    if here is not None and there is not None and _positions_differ(here, there, len(ids)):
        return ImageFault.POSITIONS
    at_images = torch.tensor(ids) == image_token(trainer.model.config)
    expected = ours["inputs_embeds"][0][at_images]
    deep = ours.get("deepstack_visual_embeds")
    features = torch.cat([feature.float() for feature in theirs.features]) if theirs.features else None
    if deep is not None:
        expected = torch.cat([expected, *(level.to(expected) for level in deep)], -1)
    if features is not None and features.shape != expected.shape and theirs.embedded is not None:
        features = theirs.embedded[: len(ids)][at_images]
        expected = expected[:, : features.shape[-1]]
    if features is None or _differ(expected, features, tolerance):
        return ImageFault.TOWER
    return ImageFault.ATTENTION if _agrees_causally(trainer, scored, sampling, bound) else ImageFault.TEXT


def _agrees_causally(trainer: HFEngine, scored: _Scored, sampling: Sampling, bound: float) -> bool:
    """Whether the engine gives what the trainer gives if no token sees those after it, all else being the same."""
    text = trainer.model.base_model.language_model

    # Without a mask the text model makes its own, of a single text.
    def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": None}

    hook = text.register_forward_pre_hook(without_mask, with_kwargs=True)
    try:
        scores = _trainer_scores(trainer, scored.ids, scored.sample, scored.own, sampling)
    finally:
        hook.remove()
    return max(scored.errors_of(scores)) <= bound


def _processed_differs(theirs: ImageCalls, own: Mapping[str, torch.Tensor], tolerance: float) -> bool:
    """Whether a tensor that both processors have under one name has other numbers."""
    for name, value in own.items():
        found = [call[name].float() for call in theirs.tensors if name in call]
        if found and _differ(value.float().flatten(), torch.cat(found), tolerance):
            return True
    return False


def _positions_differ(expected: torch.Tensor, found: torch.Tensor, length: int) -> bool:
    """Whether positions differ by more than a constant, which a rotary embedding does not see."""
    expected = expected.reshape(-1, expected.shape[-1])
    found = found.reshape(-1, found.shape[-1])[:, :length].to(expected)
    expected = expected[-len(found) :]  # the first of four rows are those of plain text, which only masks read
    return not bool((expected - expected[:, :1] == found - found[:, :1]).all())


def _differ(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    if expected.shape != found.shape:
        return True
    expected, found = expected.double().cpu(), found.double()
    return not bool((expected - found).norm() <= tolerance * expected.norm())


@torch.no_grad()
def _text_call(model: Any, ids: Sequence[int], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The keywords with which the trainer's model calls its text model on a prompt."""
    calls: list[dict[str, Any]] = []
    text = model.base_model.language_model
    hook = text.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    try:
        model(input_ids=torch.tensor([list(ids)], device=model.device), **cast(dict(own), model))
    finally:
        hook.remove()
    return calls[0]
