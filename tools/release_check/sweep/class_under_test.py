"""One architecture under test: our class, transformers' own, their checkpoints, and inputs."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models import registry
from nrl_models.inputs.audio import AUDIO, takes_audio
from nrl_models.inputs.images import PIXELS, takes_images
from nrl_models.testing.case import FamilyCase
from tools.release_check.numbers.cases import stored_tensors
from tools.variants import split_variant

PROMPT = 12
"""Text length of an input in tokens."""

FP8_LIMIT = 448.0
"""The largest number in `float8_e4m3fn`."""


class NotApplicableError(Exception):
    """The class has nothing that the check compares."""


class MediaInputsError(Exception):
    """The media format of a class with images or audio is unknown."""


class ClassUnderTest:
    """One architecture, with the models and inputs that its checks share.

    Args:
        architecture: A registered name, or one of its variants.
        folder: An empty folder for checkpoints.
    """

    def __init__(self, architecture: str, folder: Path) -> None:
        name, values = split_variant(architecture)
        model_class: Any = registry.model_class(name)
        self.case = FamilyCase(model_class, torch.device("cpu"), values)
        self.folder = folder

    @property
    def reference_class(self) -> type[PreTrainedModel]:
        """The class that ours must equal."""
        return self.case.reference_class

    @property
    def is_transformers(self) -> bool:
        """Whether the reference is transformers' own class."""
        return self.reference_class.__module__.startswith("transformers.")

    @cached_property
    def _reference(self) -> PreTrainedModel:
        return copy.deepcopy(self.case.reference())

    def reference(self) -> PreTrainedModel:
        """Create a new copy of the reference, because some models keep state of their last forward.

        The copies share parameters and configurations, which no forward changes.
        """
        shared = [*self._reference.parameters(), *configurations(self._reference)]
        return copy.deepcopy(self._reference, {id(value): value for value in shared})

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint of the reference in fp32, saved by transformers."""
        path = self.folder / "fp32"
        self._reference.save_pretrained(path)
        return path

    @cached_property
    def bf16_checkpoint(self) -> Path:
        """The checkpoint of the reference in bf16, saved by transformers."""
        path = self.folder / "bf16"
        self.case.reference(torch.bfloat16).save_pretrained(path)
        return path

    @cached_property
    def bf16_checkpoint_without_dtype(self) -> Path:
        """`bf16_checkpoint` with a configuration without a dtype."""
        return without_dtype(self.bf16_checkpoint, self.folder / "bf16-no-dtype")

    @cached_property
    def dtypes_with_auto(self) -> Mapping[str, torch.dtype]:
        """Dtypes of the reference loaded from `bf16_checkpoint_without_dtype` with `dtype="auto"`, by name."""
        return self.reference_dtypes(self.bf16_checkpoint_without_dtype, "auto")

    def reference_dtypes(self, path: Path, dtype: str | torch.dtype) -> Mapping[str, torch.dtype]:
        """Load the reference from `path`, and return the dtype of each tensor by name."""
        tensors = self.reference_class.from_pretrained(path, dtype=dtype).state_dict()
        return {name: tensor.dtype for name, tensor in tensors.items()}

    def load(self, path: Path, **options: Any) -> Any:
        """Load our class strictly."""
        return self.case.model_class.from_pretrained(path, **options).eval()

    @cached_property
    def model(self) -> Any:
        """Our class with the reference's weights. All checks share one model, as in normal use."""
        return self.load(self.checkpoint, dtype=torch.float32)

    @cached_property
    def takes_media(self) -> bool:
        """Whether the class takes images or audio."""
        return takes_images(self._reference) or takes_audio(self._reference)

    def text(self) -> dict[str, Any]:
        """Text only."""
        return self.case.inputs(length=PROMPT, images=False)

    def media(self) -> dict[str, Any]:
        """Text with an image, a clip or both in each sequence.

        Raises:
            ImageInputsError, MediaInputsError: The format is unknown.
        """
        inputs = self.case.inputs(length=PROMPT)
        for takes, names in ((takes_images, PIXELS), (takes_audio, AUDIO)):
            if takes(self._reference) and not any(name in inputs for name in names):
                raise MediaInputsError(f"no input among {', '.join(names)} for {self.reference_class.__name__}")
        return inputs

    def generates(self) -> bool:
        """Whether the class has `generate`."""
        return self.case.model_class.can_generate()

    @cached_property
    def why_no_text(self) -> str:
        """Why the class does not accept text only. Empty if it does."""
        if "input_ids" not in inspect.signature(self.reference_class.forward).parameters:
            return "takes no tokens"
        if self.takes_media and self.is_transformers:
            try:
                with torch.no_grad():
                    self.reference()(**self.text())
            except Exception as error:
                return f"takes no text without an image or a clip: {error}"
        return ""


def configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configuration of a model and those of its modules."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in found if isinstance(config, PreTrainedConfig)]


def without_dtype(source: Path, path: Path) -> Path:
    """Copy a checkpoint, and remove the dtype from its configuration."""
    path.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (path / file.name).hardlink_to(file)
    config = _drop(json.loads((source / "config.json").read_text()), ("dtype", "torch_dtype"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def _drop(values: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(values, dict):
        return {key: _drop(value, keys) for key, value in values.items() if key not in keys}
    return [_drop(value, keys) for value in values] if isinstance(values, list) else values


def fp8_checkpoint(case: ClassUnderTest) -> Path:
    """Save the bf16 checkpoint with FP8 linears in blocks of 128 and no dtype in its configuration.

    Raises:
        NotApplicableError: The class has no routed experts, so it is not published in this FP8 format.
    """
    source, path = case.bf16_checkpoint, case.folder / "fp8"
    tensors = stored_tensors(source)
    if not any("e_score_correction_bias" in name for name in tensors):
        raise NotApplicableError("is not published in FP8 with blocks")
    without_dtype(source, path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    quantized: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        quantized[name] = tensor
        if name.endswith("proj.weight") and tensor.ndim == 2:
            scale = tensor.float().abs().max() / FP8_LIMIT
            blocks = [-(-size // 128) for size in tensor.shape]
            quantized[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scale.expand(blocks).clone()
    save_file(quantized, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
