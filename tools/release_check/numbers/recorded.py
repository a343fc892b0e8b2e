"""One of transformers' classes, loaded from its fixture, for the sections of `numbers`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tools.release_check.numbers.cases import NumberCase


class NotApplicableError(Exception):
    """The class has nothing that the section records."""


class Recorded:
    """One class, loaded from its fixture.

    Args:
        case: The fixture.
        model_class: transformers' class.
        folder: An empty folder for checkpoints.
    """

    def __init__(self, case: NumberCase, model_class: type[PreTrainedModel], folder: Path) -> None:
        self.case, self.model_class, self.folder = case, model_class, folder

    def config(self) -> Any:
        """Return a new copy of the tiny configuration."""
        assert self.model_class.config_class is not None
        return self.model_class.config_class.from_dict(self.case.config_values())

    def write_checkpoint(self, name: str, dtype: torch.dtype) -> Path:
        """Save the fixture as a checkpoint in a dtype."""
        path = self.folder / name
        if not path.exists():
            config = self.config()
            config.dtype, config.architectures = dtype, [self.case.architecture]
            config.save_pretrained(path)
            tensors = {
                key: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for key, tensor in self.case.checkpoint().items()
            }
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    def load(self, dtype: torch.dtype | str, stored: torch.dtype, **options: Any) -> Any:
        """Load the class in a dtype (or `auto`) from the checkpoint stored in another dtype."""
        path = self.write_checkpoint(str(stored).removeprefix("torch."), stored)
        torch.manual_seed(0)  # for weights missing in the file
        return self.model_class.from_pretrained(path, dtype=dtype, **options)

    @cached_property
    def _model_and_info(self) -> tuple[PreTrainedModel, dict[str, Any]]:
        model, info = self.load(torch.float32, torch.float32, attn_implementation="eager", output_loading_info=True)
        return model.eval(), info

    @property
    def loading_info(self) -> dict[str, Any]:
        """Return transformers' lists of missing, unexpected and mismatched names."""
        return self._model_and_info[1]

    def model(self, *, incomplete: bool = False) -> PreTrainedModel:
        """Load a new copy in fp32 with eager attention. Not cached, because some models keep state of their last
        forward.

        Args:
            incomplete: Whether weights may be missing in the file. They are random or uninitialized.

        Raises:
            NotApplicableError: Weights are missing.
        """
        if not incomplete:
            require_complete(self.loading_info)
        return deepcopy(self._model_and_info[0])

    def inputs(self, kind: str, *, labels: bool = False) -> dict[str, torch.Tensor]:
        """Return inputs of a kind.

        Raises:
            NotApplicableError: The fixture has none.
        """
        inputs = self.case.input_tensors(kind)
        if inputs is None:
            raise NotApplicableError(f"no {kind} inputs")
        return inputs if labels else {name: value for name, value in inputs.items() if name != "labels"}

    def any_inputs(self, *, labels: bool = False) -> dict[str, torch.Tensor]:
        """Return text inputs, or text with media if the class does not accept text only."""
        return self.inputs("text" if "text" in self.case.inputs else "media", labels=labels)


def require_complete(loading_info: Mapping[str, Any]) -> None:
    """Raise NotApplicableError if loading did not use all weights of the file."""
    if loading_info["missing_keys"]:
        raise NotApplicableError("weights were not loaded")


@torch.no_grad()
def forward(model: PreTrainedModel, inputs: Mapping[str, Any], use_cache: bool | None = False) -> Any:
    """Run a forward without gradients. With `use_cache=None` the model decides."""
    return model(**inputs, **({} if use_cache is None else {"use_cache": use_cache}))


def parameters_of(model_class: type[PreTrainedModel]) -> Mapping[str, inspect.Parameter]:
    """Return the parameter names of a class's forward."""
    return inspect.signature(model_class.forward).parameters
