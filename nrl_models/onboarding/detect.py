"""What a model class combines: found by building a tiny model of it and running that."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.tracing import Trace, trace_linears
from nrl_models.errors import in_words
from nrl_models.parity.inputs import inputs_for, takes_images
from nrl_models.testing.case import randomise
from nrl_models.testing.tiny import find_tiny

AUDIO = {"input_features", "input_values", "audio_input_ids", "audio_input_features"}
"""What arguments that hold sound are called."""

STEPS = ("configuration", "build", "text", "images", "backward")
"""What is done with a class, in this order."""


@dataclass(frozen=True)
class Detection:
    """What was found out about a model class.

    Args:
        architecture: its name.
        model_type: of its configuration.
        modalities: what the tiny model ran on: `text`, `images` (with text), or both.
        parameters: how many the tiny model has.
        needs: what had to be added to the configuration for the class to build and run, in words.
        groups: for each layer class, as `module:Class`, the groups of its linears that read one input and can be
            combined; where layers of one class differ, the largest.
        obstacles: for each layer class, linears that read one input and cannot be combined, with the reason.
        uncalled: for each layer class with groups, linears that some layer has and never called.
        note: what is worth knowing about a class that is right.
        step: the step that failed, one of `STEPS`; empty if none did.
        failure: how it failed.
    """

    architecture: str
    model_type: str
    modalities: tuple[str, ...] = ()
    parameters: int = 0
    needs: str = ""
    groups: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    obstacles: dict[str, list[str]] = field(default_factory=dict)
    uncalled: dict[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""
    step: str = ""
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Whether every step succeeded."""
        return not self.step

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok} | asdict(self)


def detect(
    model_class: type[PreTrainedModel],
    source: type[PreTrainedConfig] | PreTrainedConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Detection:
    """Build a tiny model of `model_class`, run it on text, on images if it takes any, and backwards, and look.

    Args:
        model_class: an uncombined Hugging Face class.
        source: a configuration to make small; the class's default if None.
        overrides: values for the tiny configuration, as a family's `tiny`.

    Returns:
        What was found, also where a step failed: this raises nothing.
    """
    source = source if source is not None else model_class.config_class
    tiny = find_tiny(source, overrides, model_class)
    found: dict[str, Any] = {"needs": str(tiny.needs)}
    step = "configuration"
    try:
        if tiny.config is None:
            raise tiny.failure or ValueError("no configuration")
        step = "build"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class._from_config(copy.deepcopy(tiny.config)).eval()
            randomise(model)  # zeros would keep a gated image, say, from the logits
        found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        step = "text"
        multimodal = takes_images(model)
        try:
            trace = _run(model, images=False)
            found["modalities"] = ("text",)
        except Exception as error:
            if not multimodal:
                raise
            found["note"] = f"takes no text alone: {in_words(error)}"  # it describes images, say
        if multimodal:
            step = "images"
            trace = _run(model, images=True)
            if not _images_matter(model):
                raise ValueError("the logits do not depend on the image: its tokens are not known")
            found["modalities"] = (*found.get("modalities", ()), "images")
        if AUDIO & set(inspect.signature(model.forward).parameters):
            found["note"] = "; ".join([*filter(None, [found.get("note")]), "takes sound, which was not tried"])
        found |= _by_class(model, trace)
        step = "backward"
        model.train()
        loss = model(**inputs_for(model, labels=True)).loss
        if loss is None or not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss}")
        loss.backward()
        step = ""
    except Exception as error:
        found["failure"] = in_words(error)
    return Detection(model_class.__name__, source.model_type, **found, step=step)


def _run(model: PreTrainedModel, *, images: bool) -> Trace:
    inputs = inputs_for(model, images=images)

    def run() -> None:
        if not torch.isfinite(model(**inputs).logits).all():
            raise ValueError("the logits are not finite")

    return trace_linears(model, run)


@torch.no_grad()
def _images_matter(model: PreTrainedModel) -> bool:
    inputs = inputs_for(model)
    others = {name: value + 1.0 if value.is_floating_point() else value for name, value in inputs.items()}
    return not torch.equal(model(**inputs).logits, model(**others).logits)


def _by_class(model: nn.Module, trace: Trace) -> dict[str, Any]:
    names = {name: f"{type(module).__module__}:{type(module).__qualname__}" for name, module in model.named_modules()}
    groups: dict[str, dict[tuple[str, ...], None]] = defaultdict(dict)
    obstacles: dict[str, dict[str, None]] = defaultdict(dict)
    for one in trace.readers:
        if one.obstacle:
            obstacles[names[one.owner]][f"{' + '.join(one.names)}: {one.obstacle}"] = None
        else:
            groups[names[one.owner]][one.names] = None
    uncalled: dict[str, set[str]] = defaultdict(set)
    for owner, linears in trace.uncalled.items():
        if names[owner] in groups:
            uncalled[names[owner]].update(linears)
    return {
        "groups": {
            name: [one for one in found if not any(set(one) < set(other) for other in found)]
            for name, found in groups.items()
        },
        "obstacles": {name: list(found) for name, found in obstacles.items()},
        "uncalled": {name: tuple(sorted(found)) for name, found in uncalled.items()},
    }
