"""Prompts with images for vLLM, and what its model gets of them.

vLLM takes images as they are: its own processor, around that of the checkpoint, makes tensors of them and puts as many
tokens as an image has in the place of its one placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nrl_models.engines.engine_types import Tokens

INPUT_NORM = "input_norm"
"""What vLLM calls the module that normalises pixels on the device, in models that have one."""


@dataclass
class ImageCalls:
    """What vLLM's model got of the images of one prompt, on the CPU.

    Args:
        tensors: what the engine's processor made, by name; one of each call of the vision tower.
        features: `(tokens, width)` of each image, out of the tower.
        positions: `(tokens,)`, or `(3, tokens)` where they have sections; None before the first forward.
        embedded: `(tokens, hidden size)` that the text model began with; None if it embedded the tokens itself.
    """

    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    positions: torch.Tensor | None = None
    embedded: torch.Tensor | None = None


def takes_raw_images(llm: Any) -> bool:
    """Whether a `vllm.LLM` serves a model that takes images, and was started with its processor."""
    config = llm.llm_engine.vllm_config.model_config
    if not config.is_multimodal_model or config.multimodal_config.language_model_only:
        return False
    processor = llm.llm_engine.renderer.mm_processor
    return processor is not None and "image" in processor.info.supported_mm_limits


def with_images(prompts: Sequence[Tokens], images: Sequence[Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Prompts in the form that `vllm.LLM.generate` takes."""
    found: list[dict[str, Any]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    for prompt, own in zip(found, images or [()] * len(found), strict=True):
        if own:
            prompt["multi_modal_data"] = {"image": list(own)}
    return found


class ImageWorker:
    """What workers do about images, see `nrl_models.engines.vllm_worker`."""

    def nrl_images_start(self) -> None:
        """Start recording what the model gets of the next prompt's images, and drop features that are cached."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # vLLM's worker has it
        runner.reset_encoder_cache()
        model, calls = runner.get_model(), ImageCalls()
        embed: Any = model.embed_multimodal
        normalised: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda module, args, output: normalised.append(_joined(output)))
            for name, module in model.named_modules()
            if name.endswith(INPUT_NORM)
        ]

        def embed_and_record(**tensors: Any) -> Any:
            normalised.clear()
            features = embed(**tensors)
            made = {name: _joined(value) for name, value in tensors.items() if _has_tensors(value)}
            # Where the model normalises pixels, what comes in are bytes, which no processor of transformers gives.
            pixels = torch.cat(normalised) if normalised else torch.empty(0)
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
        """What was recorded."""
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
    """The numbers of one tensor, or of all in a list, in one dimension."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().flatten().clone()
    return torch.cat([_joined(item) for item in value])
