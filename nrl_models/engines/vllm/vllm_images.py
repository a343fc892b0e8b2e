"""Prompts with images for vLLM, and recording of its model's image inputs.

vLLM accepts raw images. Its own processor, which wraps the checkpoint's, converts them to tensors, and replaces the
placeholder of each image with as many tokens as the image needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nrl_models.engines.engine_types import Tokens

INPUT_NORM = "input_norm"
"""Name of vLLM's module that normalizes pixels on the device, in models with such a module."""


@dataclass
class ImageCalls:
    """Image inputs of vLLM's model for one prompt, on the CPU.

    Args:
        tensors: Outputs of the engine's processor by name, one per call of the vision tower.
        features: Output of the tower for each image, `(tokens, width)`.
        positions: `(tokens,)`, or `(3, tokens)` if they have sections. None before the first forward.
        embedded: Input embeddings of the text model, `(tokens, hidden_size)`. None if it embeds the tokens itself.
    """

    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    positions: torch.Tensor | None = None
    embedded: torch.Tensor | None = None


def takes_raw_images(llm: Any) -> bool:
    """Return True if a `vllm.LLM` serves a model that accepts images, and was started with its processor."""
    config = llm.llm_engine.vllm_config.model_config
    if not config.is_multimodal_model or config.multimodal_config.language_model_only:
        return False
    processor = llm.llm_engine.renderer.mm_processor
    return processor is not None and "image" in processor.info.supported_mm_limits


def with_images(prompts: Sequence[Tokens], images: Sequence[Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Return prompts in the form that `vllm.LLM.generate` accepts."""
    vllm_prompts: list[dict[str, Any]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    for prompt, prompt_images in zip(vllm_prompts, images or [()] * len(vllm_prompts), strict=True):
        if prompt_images:
            prompt["multi_modal_data"] = {"image": list(prompt_images)}
    return vllm_prompts


class ImageWorker:
    """Worker methods for images, see `nrl_models.engines.vllm.vllm_worker`."""

    def nrl_images_start(self) -> None:
        """Start recording the image inputs of the next prompt, and clear cached features."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # vLLM's worker has it
        runner.reset_encoder_cache()
        model, calls = runner.get_model(), ImageCalls()
        embed: Any = model.embed_multimodal
        normalized: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda module, args, output: normalized.append(_joined(output)))
            for name, module in model.named_modules()
            if name.endswith(INPUT_NORM)
        ]

        def embed_and_record(**tensors: Any) -> Any:
            normalized.clear()
            features = embed(**tensors)
            made = {name: _joined(value) for name, value in tensors.items() if _has_tensors(value)}
            # If the model normalizes pixels, its inputs are bytes, which no processor of transformers returns.
            pixels = torch.cat(normalized) if normalized else torch.empty(0)
            calls.tensors.append(
                {
                    name: pixels if value.dtype == torch.uint8 and value.shape == pixels.shape else value
                    for name, value in made.items()
                }
            )
            calls.features += [feature.detach().cpu().clone().flatten(0, -2) for feature in features]
            return features

        def record(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
            if calls.positions is None:
                calls.positions = kwargs["positions"].detach().cpu().clone()
                embedded = kwargs.get("inputs_embeds")
                calls.embedded = None if embedded is None else embedded.detach().cpu().clone()

        model.__dict__["embed_multimodal"] = embed_and_record
        self._nrl_images = calls, [*hooks, model.register_forward_pre_hook(record, with_kwargs=True)]

    def nrl_images_finish(self) -> ImageCalls:
        """Stop recording, and return the recorded calls."""
        calls, hooks = self._nrl_images
        for hook in hooks:
            hook.remove()
        self.model_runner.get_model().__dict__.pop("embed_multimodal", None)  # type: ignore[attr-defined]
        return calls


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (list, tuple)) and bool(value) and all(map(_has_tensors, value))
    )


def _joined(value: Any) -> torch.Tensor:
    """Return the numbers of a tensor, or of all tensors in a nested list, as one flat CPU tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().flatten().clone()
    return torch.cat([_joined(item) for item in value])
