"""Compares an architecture at tiny size with vLLM on prompts with images."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nrl_models import registry
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.switches import quirks_off
from nrl_models.consistency.vision.image_check import ImageComparison, compare_images
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import one_line
from nrl_models.logprobs import Sampling
from tests.engine.families import AGREES, DISAGREES, NOT_RUN, Start, spreading_temperature, tiny_model
from tests.engine.image_processors import save_processor
from tests.engine.image_tokens import image_prompts
from tests.engine.published import BF16, BOUND, OPTIONS, OVERRIDES

INTERLEAVED = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500_000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
}
"""How published configurations say what transformers' code always does: vLLM reads it."""

IMAGE_OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen3VLForConditionalGeneration": {"text_config": INTERLEAVED},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": INTERLEAVED},
    # What its processor makes of every image.
    "AriaForConditionalGeneration": {
        "vision_config": {"image_size": 980},
        "projector_patch_to_query_dict": {"4900": 4},
    },
    "MuseGlimmerForConditionalGeneration": {"vision_config": {"adapter_dim": 256}},
    # As it is published.
    "Lfm2VlForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Gemma4ForConditionalGeneration": {"vision_config": {"default_output_length": 70}},
    "Gemma4UnifiedForConditionalGeneration": {"vision_config": {"num_soft_tokens": 70}},
}
"""What a tiny model has to have for images, beside `OVERRIDES`."""

AS_TEXT = "It disagrees without images, too."
CAUSAL = "vLLM's attention for CPUs has no mask by which the tokens of an image see each other."

CAUSES: dict[str, str] = {
    "Cohere2VisionForConditionalGeneration": AS_TEXT,
    "CohereCompassForConditionalGeneration": AS_TEXT,
    "Gemma3ForConditionalGeneration": CAUSAL,
    "Gemma3nForConditionalGeneration": "Its text model, Gemma3nForCausalLM, disagrees without images, too.",
    "Gemma4UnifiedForConditionalGeneration": CAUSAL,
    "MuseGlimmerForConditionalGeneration": "The two resize images differently, and have no tensors of one name to "
    "tell it by: images that need no resizing agree.",
    "PaddleOCRVLForConditionalGeneration": "transformers interpolates the tower's positions with aligned corners, vLLM "
    "without: they agree on square images.",
}
"""Why architectures disagree, where that is known."""

ONLY_IMAGES = {"image": 4, "video": 0, "audio": 0}
"""Of a prompt, at most: the tiny processors are of images alone."""

LENGTH = 1024
"""Tokens that an engine and a model take at most: images are long."""


@dataclass(frozen=True)
class ImageOutcome:
    """The outcome of one architecture.

    Args:
        architecture: which.
        status: `agrees` (each prompt, after a refit from random weights), `disagrees` or `not run`.
        refitted: the worst `token_mult_prob_error`; None if nothing was compared, or it is not finite.
        bounds: on it: more than `BOUND` where the noise floor explains more.
        reason: what differs first, of the prompts that disagree; or why nothing was compared: an error.
        dtype: of both sides.
        faults: what differs first, of each prompt that disagrees.
        prompts: tokens of each prompt.
    """

    architecture: str
    status: str
    refitted: float | None = None
    bounds: tuple[float, ...] = ()
    reason: str = ""
    dtype: str = "float32"
    faults: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


def hold_images(architecture: str, start: Start, folder: Path) -> ImageOutcome:
    """Refit an engine that starts on random weights, vision tower included, and compare prompts with images.

    Args:
        architecture: which.
        start: starts an engine on a checkpoint, and stops the one before.
        folder: an empty one, for the checkpoint.
    """
    checkpoint = folder / "checkpoint"
    dtype = torch.bfloat16 if architecture in BF16 else torch.float32
    try:
        model = tiny_model(architecture, _for_images(architecture), dtype)
        model.save_pretrained(checkpoint)
        processor = save_processor(model.config, checkpoint)
        prompts = image_prompts(model.config, processor)
        sampling = Sampling(spreading_temperature(model))
    except Exception as error:  # whatever a model's code raises
        return ImageOutcome(architecture, NOT_RUN, reason=f"no tiny model or processor: {one_line(error)}")
    try:
        options = OPTIONS.get(architecture, {}) | {
            "language_model_only": False,
            "max_length": LENGTH,
            "limit_mm_per_prompt": ONLY_IMAGES,
        }
        with quirks_off("engine-dummy-buffers"):
            engine = start(checkpoint, dtype=dtype, load_format="dummy", seed=1, **options)
        most = engine.llm.llm_engine.renderer.get_mm_processor().info.allowed_mm_limits["image"]
        prompts = [prompt for prompt in prompts if len(prompt.images) <= most]
        engine.refit(model.state_dict_adapter.iter_export(model))
        found = compare_images(engine, HFEngine(model, "trainer"), processor, prompts, sampling, threshold=BOUND)
    except Exception as error:  # the engine's, or the model's
        return ImageOutcome(architecture, NOT_RUN, reason=one_line(error).replace(f"{folder}/", ""))
    return replace(outcome_of(architecture, found), dtype=dtype_name(dtype))


def _for_images(architecture: str) -> dict[str, Any]:
    """Overrides by which a tiny text model takes long sequences, and its tower images; what else they have to have
    stays."""
    found: dict[str, Any] = {}
    for values in (
        registry.model_class(architecture).tiny,
        OVERRIDES.get(architecture, {}),
        IMAGE_OVERRIDES.get(architecture, {}),
        {"text_config": {"max_position_embeddings": 2 * LENGTH}},
    ):
        for key, value in values.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def outcome_of(architecture: str, found: list[ImageComparison]) -> ImageOutcome:
    """The outcome of what was compared."""
    faults = tuple(one.fault for one in found if one.fault is not None)
    error = max(max(one.decode, one.prefill) for one in found)
    return ImageOutcome(
        architecture,
        AGREES if all(one.passed for one in found) else DISAGREES,
        refitted=error if error < float("inf") else None,
        bounds=(found[0].bound,),
        reason=f"What differs first: {', '.join(sorted(set(faults)))}." if faults else "",
        faults=faults,
        prompts=tuple(one.prompt_tokens for one in found),
    )
