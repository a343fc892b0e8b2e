"""Compare tiny models of an architecture with vLLM on prompts with images."""

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
from nrl_models.errors import UnmetRequirementError, one_line
from nrl_models.logprobs import Sampling
from tests.engine.families import AGREES, DISAGREES, NOT_RUN, Start, decided, spreading_temperature, tiny_model
from tests.engine.image_processors import save_processor
from tests.engine.image_tokens import image_prompts
from tests.engine.obstacles import Stage
from tests.engine.published import BF16, BOUND, OPTIONS, OVERRIDES
from tools.variants import split_variant

INTERLEAVED = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500_000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
}
"""Settings of published configurations for behavior that is fixed in transformers. vLLM reads them."""

IMAGE_OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen3VLForConditionalGeneration": {"text_config": INTERLEAVED},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": INTERLEAVED},
    # Values that match its processor.
    "AriaForConditionalGeneration": {
        "vision_config": {"image_size": 980},
        "projector_patch_to_query_dict": {"4900": 4},
    },
    "MuseGlimmerForConditionalGeneration": {"vision_config": {"adapter_dim": 256}},
    # With a bidirectional prefix it has no log-probabilities without `token_type_ids`, which vLLM does not take.
    "PaliGemmaForConditionalGeneration": {"text_config": {"use_bidirectional_attention": False}},
    # Values of the published configuration.
    "Lfm2VlForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Gemma4ForConditionalGeneration": {"vision_config": {"default_output_length": 70}},
    "Gemma4UnifiedForConditionalGeneration": {"vision_config": {"num_soft_tokens": 70}},
}
"""Configuration values that tiny models need for images, in addition to `OVERRIDES`."""

AS_TEXT = "It also disagrees without images."
CAUSAL = "vLLM's attention on CPUs has no bidirectional mask for the tokens of an image."

CAUSES: dict[str, str] = {
    "Cohere2VisionForConditionalGeneration": AS_TEXT,
    "CohereCompassForConditionalGeneration": AS_TEXT,
    "Gemma3ForConditionalGeneration": CAUSAL,
    "Gemma3nForConditionalGeneration": "Its text model, Gemma3nForCausalLM, also disagrees without images.",
    "Gemma4UnifiedForConditionalGeneration": CAUSAL,
    "MuseGlimmerForConditionalGeneration": "vLLM and transformers resize images differently: images "
    "that need no resizing agree.",
    "PaddleOCRVLForConditionalGeneration": "transformers interpolates the tower's positions with aligned corners, "
    "vLLM without. They agree on square images.",
}
"""Known reasons why architectures disagree."""

ONLY_IMAGES = {"image": 4, "video": 0, "audio": 0}
"""Maximum per prompt. The tiny processors only support images."""

LENGTH = 1024
"""Maximum sequence length of engine and model. Images have many tokens."""


@dataclass(frozen=True)
class ImageOutcome:
    """The outcome of one architecture.

    Args:
        architecture: The architecture.
        status: `agrees` (for each prompt, after a refit from random weights), `not decided`, `disagrees` or
            `not run`. See `decided`.
        refitted: The largest `token_mult_prob_error`. None if nothing was compared, or if it is not finite.
        bounds: Its limits: `BOUND`, or more if the noise floor explains more.
        stage: The stage that failed, if the status is `not run`.
        reason: The first difference of the prompts that disagree, or the error if nothing was compared.
        dtype: Dtype of both sides.
        faults: The first difference of each prompt that disagrees.
        prompts: The number of tokens of each prompt.
    """

    architecture: str
    status: str
    refitted: float | None = None
    bounds: tuple[float, ...] = ()
    stage: str = ""
    reason: str = ""
    dtype: str = "float32"
    faults: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def compare_image_architecture(architecture: str, start: Start, folder: Path) -> ImageOutcome:
    """Refit an engine with random weights, vision tower included, and compare prompts with images.

    Args:
        architecture: The architecture, or one of its variants.
        start: Starts an engine on a checkpoint, and stops the previous one.
        folder: An empty folder for the checkpoint.
    """
    checkpoint, class_name = folder / "checkpoint", split_variant(architecture)[0]
    dtype = torch.bfloat16 if class_name in BF16 else torch.float32
    try:
        model = tiny_model(architecture, _for_images(architecture), dtype)
        model.save_pretrained(checkpoint)
        processor = save_processor(model.config, checkpoint)
        prompts = image_prompts(model.config, processor)
        sampling = Sampling(spreading_temperature(model))
    except Exception as error:  # any exception of the model's code
        stage = Stage.REQUIREMENT if isinstance(error, UnmetRequirementError) else Stage.MODEL
        reason = f"no tiny model or processor: {one_line(error)}"
        return ImageOutcome(architecture, NOT_RUN, stage=stage, reason=reason)
    stage = Stage.START
    try:
        options = OPTIONS.get(class_name, {}) | {
            "language_model_only": False,
            "max_length": LENGTH,
            "limit_mm_per_prompt": ONLY_IMAGES,
        }
        with quirks_off("engine-dummy-buffers"):
            engine = start(checkpoint, dtype=dtype, load_format="dummy", seed=1, **options)
        stage = Stage.RUN
        max_images = engine.llm.llm_engine.renderer.get_mm_processor().info.allowed_mm_limits["image"]
        prompts = [prompt for prompt in prompts if len(prompt.images) <= max_images]
        engine.refit(model.state_dict_adapter.iter_export(model))
        comparisons = compare_images(engine, HFEngine(model, "trainer"), processor, prompts, sampling, threshold=BOUND)
    except Exception as error:  # any exception of the engine or the model
        reason = one_line(error).replace(f"{folder}/", "")
        return ImageOutcome(architecture, NOT_RUN, stage=stage, reason=reason)
    return replace(outcome_of(architecture, comparisons), dtype=dtype_name(dtype))


def _for_images(architecture: str) -> dict[str, Any]:
    """Merge the overrides for long sequences and images with all other overrides of the architecture."""
    class_name, variant = split_variant(architecture)
    overrides: dict[str, Any] = {}
    for values in (
        registry.model_class(class_name).tiny,
        variant,
        OVERRIDES.get(class_name, {}),
        IMAGE_OVERRIDES.get(class_name, {}),
        {"text_config": {"max_position_embeddings": 2 * LENGTH}},
    ):
        for key, value in values.items():
            overrides[key] = {**overrides.get(key, {}), **value} if isinstance(value, dict) else value
    return overrides


def outcome_of(architecture: str, comparisons: list[ImageComparison]) -> ImageOutcome:
    """Return the outcome of the comparisons."""
    faults = tuple(one.fault for one in comparisons if one.fault is not None)
    error = max(max(one.decode, one.prefill) for one in comparisons)
    return ImageOutcome(
        architecture,
        decided(AGREES, error) if all(one.passed for one in comparisons) else DISAGREES,
        refitted=error if error < float("inf") else None,
        bounds=(comparisons[0].bound,),
        reason=f"First difference: {', '.join(sorted(set(faults)))}." if faults else "",
        faults=faults,
        prompts=tuple(one.prompt_tokens for one in comparisons),
    )
