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
from nrl_models.consistency.cells import THRESHOLD
from nrl_models.engines.base import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.engines.vllm_images import ImageCalls
from nrl_models.errors import ConsistencyError
from nrl_models.inputs.images import cast, image_token
from nrl_models.logprobs.metrics import token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling

TOLERANCE = 1e-3
"""By how much tensors that should be equal may differ, relative to their size: kernels round differently."""


class ImageFault(StrEnum):
    """What an engine and transformers compute differently, the first of them."""

    PROCESSOR = "processor"
    """The tensors made of the images, or the token ids around them."""
    POSITIONS = "positions"
    """Of the tokens, for the rotary embedding."""
    TOWER = "tower"
    """The features of the images."""
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
        threshold: on both.
        fault: what differs first; None if the prompt agrees.
    """

    sizes: tuple[tuple[int, int], ...]
    prompt_tokens: int
    new_tokens: int
    decode: float
    prefill: float
    threshold: float
    fault: ImageFault | None = None

    @property
    def passed(self) -> bool:
        """Whether both errors are within the threshold."""
        return max(self.decode, self.prefill) <= self.threshold


def compare_images(
    engine: VLLMEngine,
    trainer: HFEngine,
    processor: Any,
    prompts: Sequence[ImagePrompt],
    sampling: Sampling,
    *,
    threshold: float,
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
        threshold: the largest `token_mult_prob_error` that passes.
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
    found = []
    for prompt, tokens, sample, prefill in zip(prompts, plain, samples, prefilled, strict=True):
        if not sample.tokens:
            raise ConsistencyError(f"{engine.name} ended a reply to images at once: there is nothing to compare")
        count = len(sample.tokens)
        own = trainer_inputs(processor, prompt)
        ids = tuple(own.pop("input_ids")[0].tolist())
        errors = [float("inf")] * 2
        if ids == sample.prompt:
            whole = Sample(ids, sample.tokens, sample.logprobs, model_inputs=own)
            scores = trainer.score([whole.sequence], sampling, last=count, model_inputs=[whole.sequence_inputs])[0]
            expected = torch.tensor(scores[-count:], dtype=torch.float64)
            errors = [
                token_mult_prob_error(expected, torch.tensor(row, dtype=torch.float64))
                for row in (sample.logprobs, prefill[-count:])
            ]
        fault = None
        if not max(errors) <= threshold:
            fault = ImageFault.PROCESSOR if ids != sample.prompt else _fault(engine, trainer, tokens, prompt, ids, own)
        sizes = tuple(image.size for image in prompt.images)
        found.append(ImageComparison(sizes, len(ids), count, errors[0], errors[1], threshold, fault))
    return found


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
        threshold: the largest `token_mult_prob_error` that passes.
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
    # There is nothing to mask in a prompt alone, and a forward of prompt and reply makes its own.
    return {name: value for name, value in made.items() if name != "attention_mask"}


def _fault(
    engine: VLLMEngine,
    trainer: HFEngine,
    tokens: Sequence[int],
    prompt: ImagePrompt,
    ids: tuple[int, ...],
    own: Mapping[str, torch.Tensor],
) -> ImageFault:
    """What differs first, where the token ids of both sides are `ids`."""
    theirs = engine.image_calls(tokens, prompt.images)
    if _processed_differs(theirs, own):
        return ImageFault.PROCESSOR
    ours = _text_call(trainer.model, ids, own)
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
    differs = features is None or _differ(expected, features)
    return ImageFault.TOWER if differs else ImageFault.TEXT


def _processed_differs(theirs: ImageCalls, own: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor that both processors have under one name has other numbers."""
    for name, value in own.items():
        found = [call[name].float() for call in theirs.tensors if name in call]
        if found and _differ(value.float().flatten(), torch.cat(found)):
            return True
    return False


def _positions_differ(expected: torch.Tensor, found: torch.Tensor, length: int) -> bool:
    """Whether positions differ by more than a constant, which a rotary embedding does not see."""
    expected = expected.reshape(-1, expected.shape[-1])
    found = found.reshape(-1, found.shape[-1])[:, :length].to(expected)
    expected = expected[-len(found) :]  # the first of four rows are those of plain text, which only masks read
    return not bool((expected - expected[:, :1] == found - found[:, :1]).all())


def _differ(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.shape != found.shape:
        return True
    expected, found = expected.double().cpu(), found.double()
    return not bool((expected - found).norm() <= TOLERANCE * expected.norm())


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
