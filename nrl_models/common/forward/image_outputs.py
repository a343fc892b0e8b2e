"""Fix for multimodal models that read a field which the output of their language model lacks."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.modules import subclass_of_same_name
from nrl_models.common.switches import is_off


class ImageOutputs(nn.Module):
    """Mixin for a multimodal model whose forward copies `image_outputs` from its language model's output.

    The output of a text model has no such field, so upstream's forward raises `AttributeError`. The mixin goes before
    the Hugging Face class and sets the field to None.
    """

    handles_quirks: ClassVar[tuple[str, ...]] = ("text-output-without-images",)

    language_model: nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.language_model.register_forward_hook(_add_image_outputs)


def with_image_outputs(upstream: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return `upstream`, or a subclass of the same name with `ImageOutputs` if its forward needs that."""
    if "outputs.image_outputs" not in inspect.getsource(inspect.unwrap(upstream.forward)):
        return upstream
    return subclass_of_same_name(upstream, ImageOutputs)


def _add_image_outputs(module: nn.Module, args: Any, output: Any) -> None:
    """Set `image_outputs` to None in an output without it. A forward hook."""
    if not hasattr(output, "image_outputs") and not is_off("text-output-without-images"):
        output.image_outputs = None
