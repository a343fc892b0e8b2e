"""Compare an engine and a trainer on prompts with images. Both get the same pixels and use their own processors.

If they disagree, the inputs of the two text models are compared in the order of computation: tensors and token ids of
the processors, positions of the tokens, features of the images. The first difference is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.causality import marks_prefix
from nrl_models.common.trust.weight_names import require_standard_names
from nrl_models.consistency.cells import NOISE_FACTOR, THRESHOLD, largest_error
from nrl_models.consistency.vision.image_differences import differ, positions_differ, processed_differs
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import ConsistencyError
from nrl_models.inputs.images import cast, image_token
from nrl_models.inputs.processors import load_processor
from nrl_models.logprobs.metrics import token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.noise import rounded_otherwise
from nrl_models.parity.worst import worst_of

TOLERANCE = 1e-3
"""Maximum difference between equal tensors in fp32, relative to their size, because kernels round differently."""

ROUNDINGS = 4.0
"""The same bound in a lower precision, as a multiple of the distance from 1 to the next number."""


class ImageFault(StrEnum):
    """The first step that engine and transformers compute differently."""

    PROCESSOR = "processor"
    """Tensors of the images, or the token ids around them."""
    POSITIONS = "positions"
    """Positions of the tokens, for the rotary embedding."""
    TOWER = "tower"
    """Features of the images. Also the pixels, if the processors' tensors have no name in common to compare them by."""
    ATTENTION = "attention"
    """Attention mask: the engine agrees with transformers if transformers uses a causal mask for all tokens."""
    TEXT = "text"
    """None of the above, so the difference is in the text model."""


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images.

    Args:
        text: Text with one placeholder per image, as the processor expects it.
        images: PIL images, in the order of their placeholders.
    """

    text: str
    images: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """Result of one prompt.

    Args:
        sizes: `(width, height)` of its images.
        prompt_tokens: Number of tokens of the trainer's prompt, including image tokens.
        new_tokens: Number of sampled and compared tokens.
        decode: `token_mult_prob_error` between the trainer and the engine's decoding. Infinite if the prompts differ.
        prefill: `token_mult_prob_error` between the trainer and the engine's prefill of the same tokens. Infinite if
            the prompts differ.
        bound: Bound of both errors: the threshold, or more if the noise floor of the trainer's precision is higher.
        fault: The first difference; None if the prompt agrees.
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
        return self.worst <= self.bound

    @property
    def worst(self) -> float:
        """The larger error; NaN counts as infinite."""
        return worst_of((self.decode, self.prefill))


@dataclass(frozen=True, slots=True)
class _Scored:
    """Results of trainer and engine for a prompt and the engine's completion.

    Args:
        prompt: The prompt.
        tokens: Token ids of the text, with placeholders.
        sample: The engine's sample.
        ids: Token ids of the trainer's prompt.
        model_inputs: Image inputs of the trainer.
        trainer: Log-probabilities of the completion from the trainer; None if the prompts differ.
        prefill: Log-probabilities of the completion from the engine's prefill.
    """

    prompt: ImagePrompt
    tokens: Sequence[int]
    sample: Sample
    ids: tuple[int, ...]
    model_inputs: dict[str, torch.Tensor]
    trainer: torch.Tensor | None
    prefill: torch.Tensor

    @property
    def errors(self) -> tuple[float, float]:
        """Errors of the trainer compared with the engine's decoding, and with its prefill."""
        return (float("inf"), float("inf")) if self.trainer is None else self.errors_of(self.trainer)

    def errors_of(self, scores: torch.Tensor) -> tuple[float, float]:
        """Return the errors that the trainer would have if its log-probabilities were `scores`."""
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
    """Sample completions of prompts with images in the engine, and score them in the trainer.

    Args:
        engine: Engine that accepts raw images.
        trainer: Trainer with the same weights.
        processor: Processor of the checkpoint from transformers.
        prompts: Prompts to compare.
        sampling: Sampling parameters of the engine.
        threshold: Maximum `token_mult_prob_error` that passes, unless the noise floor allows more.
        noise_factor: Allowed distance from 1 as a multiple of the noise floor's distance; 0 uses only the threshold.
        new_tokens: Maximum number of sampled tokens per prompt.
        seed: Random seed of the sampling.

    Returns:
        One result per prompt.

    Raises:
        EngineError: If the engine fails, or does not support images.
        ConsistencyError: If the engine sampled nothing that can be compared.
    """
    plain = [processor.tokenizer(prompt.text).input_ids for prompt in prompts]
    images = [prompt.images for prompt in prompts]
    samples = engine.generate(plain, sampling, max_new_tokens=new_tokens, seed=seed, ignore_end=False, images=images)
    sequences = [[*tokens, *sample.tokens] for tokens, sample in zip(plain, samples, strict=True)]
    prefilled = engine.score(sequences, sampling, images=images)
    scored = []
    for prompt, tokens, sample, prefill in zip(prompts, plain, samples, prefilled, strict=True):
        if not sample.tokens:
            raise ConsistencyError(f"{engine.name} returned empty completions for images: there is nothing to compare")
        model_inputs = trainer_inputs(processor, prompt)
        ids = tuple(model_inputs.pop("input_ids")[0].tolist())
        ours = _trainer_scores(trainer, ids, sample, model_inputs, sampling) if ids == sample.prompt else None
        last = torch.tensor(prefill[-len(sample.tokens) :], dtype=torch.float64)
        scored.append(_Scored(prompt, tokens, sample, ids, model_inputs, ours, last))
    bound = threshold
    if any(threshold < worst_of(one.errors) < float("inf") for one in scored):
        bound = largest_error(threshold, noise_factor, _noise(trainer, scored, sampling))
    comparisons = []
    for one in scored:
        against_decode, against_prefill = one.errors
        fault = None
        if not worst_of(one.errors) <= bound:
            fault = ImageFault.PROCESSOR if one.trainer is None else _fault(engine, trainer, one, sampling, bound)
        sizes = tuple(image.size for image in one.prompt.images)
        comparisons.append(
            ImageComparison(sizes, len(one.ids), len(one.sample.tokens), against_decode, against_prefill, bound, fault)
        )
    return comparisons


def _trainer_scores(
    trainer: HFEngine,
    ids: tuple[int, ...],
    sample: Sample,
    model_inputs: dict[str, torch.Tensor],
    sampling: Sampling,
    *,
    full_logits: bool = False,
) -> torch.Tensor:
    count, prefix_types = len(sample.tokens), marks_prefix(trainer.model)
    trainer_sample = Sample(ids, sample.tokens, sample.logprobs, model_inputs=model_inputs, prefix_types=prefix_types)
    inputs = [trainer_sample.sequence_inputs]
    scores = trainer.score(
        [trainer_sample.sequence], sampling, last=count, full_logits=full_logits, model_inputs=inputs
    )
    return torch.tensor(scores[0][-count:], dtype=torch.float64)


def _noise(trainer: HFEngine, scored: Sequence[_Scored], sampling: Sampling) -> float:
    """Measure the noise floor: the largest `token_mult_prob_error` of a prompt between trainer and rounded trainer.

    Prompts are short. In a mixture of experts, a single token with other experts causes most of a prompt's error.
    """
    with rounded_otherwise(trainer.model):
        return worst_of(
            token_mult_prob_error(
                one.trainer, _trainer_scores(trainer, one.ids, one.sample, one.model_inputs, sampling, full_logits=True)
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
    noise_factor: float = NOISE_FACTOR,
    new_tokens: int = 16,
    seed: int = 0,
    engine_options: Mapping[str, Any] | None = None,
) -> list[ImageComparison]:
    """Start vLLM on a checkpoint, and compare it with the trainer on prompts with images.

    Args:
        path: Directory of the checkpoint, with its processor.
        prompts, new_tokens: See `compare_images`.
        dtype: Dtype of both sides.
        sampling: Sampling parameters of the engine; default: temperature 1.
        threshold: Maximum `token_mult_prob_error` that passes, unless the noise floor allows more.
        noise_factor: See `compare_images`.
        engine_options: Options of vLLM.

    Raises:
        EngineError: If vLLM does not start, fails, or does not support images.
        ConsistencyError: If the processor does not load, or nothing can be compared.
        CheckpointError, ...: See `load_processor`, `from_pretrained` and `start_engine`.
    """
    folder = resolve_folder(path)
    require_standard_names(folder, "vLLM")
    processor = load_processor(folder)
    model = auto_class_for(path).from_pretrained(path, dtype=dtype, device="cpu")
    engine = VLLMEngine.start(path, dtype=dtype, **dict(engine_options or {}))
    with engine:
        trainer = HFEngine(model, "trainer")
        return compare_images(
            engine,
            trainer,
            processor,
            prompts,
            sampling or Sampling(),
            threshold=threshold,
            noise_factor=noise_factor,
            new_tokens=new_tokens,
            seed=seed,
        )


def trainer_inputs(processor: Any, prompt: ImagePrompt) -> dict[str, torch.Tensor]:
    """Process a prompt with transformers' processor. Returns keywords of the forward for batch size 1."""
    made = processor(text=[prompt.text], images=list(prompt.images), return_tensors="pt")
    # Drop the mask and labels: a single prompt needs no mask, and no loss is computed.
    return {name: value for name, value in made.items() if name not in ("attention_mask", "labels")}


def _fault(engine: VLLMEngine, trainer: HFEngine, scored: _Scored, sampling: Sampling, bound: float) -> ImageFault:
    """Find the first difference of both sides, given equal token ids."""
    theirs, ids = engine.image_calls(scored.tokens, scored.prompt.images), scored.ids
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(trainer.model.dtype).eps)
    if processed_differs(theirs, scored.model_inputs, tolerance):
        return ImageFault.PROCESSOR
    ours = _text_call(trainer.model, ids, scored.model_inputs)
    here, there = ours.get("position_ids"), theirs.positions
    if here is not None and there is not None and positions_differ(here, there, len(ids)):
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
    if features is None or differ(expected, features, tolerance):
        return ImageFault.TOWER
    return ImageFault.ATTENTION if _agrees_causally(trainer, scored, sampling, bound) else ImageFault.TEXT


def _agrees_causally(trainer: HFEngine, scored: _Scored, sampling: Sampling, bound: float) -> bool:
    """Return True if the engine agrees with a trainer that uses a causal mask for all tokens."""
    text = trainer.model.base_model.language_model

    # Without a mask, the text model creates a causal one.
    def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": None}

    with text.register_forward_pre_hook(without_mask, with_kwargs=True):
        scores = _trainer_scores(trainer, scored.ids, scored.sample, scored.model_inputs, sampling)
    return worst_of(scored.errors_of(scores)) <= bound


@torch.no_grad()
def _text_call(model: Any, ids: Sequence[int], model_inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the keywords with which the trainer's model calls its text model on a prompt."""
    calls: list[dict[str, Any]] = []
    text = model.base_model.language_model
    with text.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True):
        model(input_ids=torch.tensor([list(ids)], device=model.device), **cast(dict(model_inputs), model))
    return calls[0]
