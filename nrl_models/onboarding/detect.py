"""Detect the linears of a model class that can be fused, by building and running a tiny model."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.forward.random_states import random_states_kept
from nrl_models.common.modules import is_at
from nrl_models.common.process_state import BUILDING
from nrl_models.common.projections.tracing import Trace, trace_linears
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.upstream import cache_in, cache_input
from nrl_models.errors import one_line
from nrl_models.inputs.audio import AUDIO, takes_audio
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.inputs.images import PIXELS, takes_images
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import find_tiny

AUDIO_ARGUMENTS = {*AUDIO, "audio_input_ids", "audio_input_features"}
"""Names of audio arguments."""

MEDIA = {"images": PIXELS, "audio": AUDIO}
"""Inputs other than text, with the names of their arguments."""


class DetectionStep(StrEnum):
    """Steps of the detection, in order."""

    CONFIGURATION = "configuration"
    BUILD = "build"
    TEXT = "text"
    MEDIA = "images"
    BACKWARD = "backward"


LOGITS_DIFFER = 1e-3
"""Largest difference of logits that rounding explains in tiny models with random weights."""


@dataclass(frozen=True)
class Detection:
    """Results of the detection for a model class.

    Args:
        architecture: Name of the class.
        model_type: Model type of its configuration.
        modalities: Inputs on which the tiny model ran: `text`, and `images` and `audio` (with text).
        groups: For each layer class (`module:Class`), groups of linears with a common input that can be fused. If
            layers of a class differ, the largest groups.
        places: For layer classes whose layers have different inputs (self-attention and cross-attention), the groups
            that apply only to some layers, with a component of the names of these layers.
        obstacles: For each layer class, linears with a common input that cannot be fused, with the reason.
        uncalled: For each layer class with groups, linears that exist but were never called.
        keeps_offsets: Classes that keep the position offset of an image for later inputs, see `FreshPositions`.
        note: A remark if all steps succeeded.
        step: The failed step; None if there is none.
        failure: Its error.
    """

    architecture: str
    model_type: str
    modalities: tuple[str, ...] = ()
    groups: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    places: dict[str, dict[tuple[str, ...], str]] = field(default_factory=dict)
    obstacles: dict[str, list[str]] = field(default_factory=dict)
    uncalled: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keeps_offsets: tuple[str, ...] = ()
    note: str = ""
    step: DetectionStep | None = None
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Whether all steps succeeded."""
        return self.step is None

    def declarations(self, layer: str) -> list[str]:
        """Return the groups of a layer class in the format of `nrl_models.common.projections.combine_groups`."""
        places = self.places.get(layer, {})
        return [" ".join(group) + (f" @ {places[group]}" if group in places else "") for group in self.groups[layer]]


def detect(model_class: type[PreTrainedModel], overrides: Mapping[str, Any] | None = None) -> Detection:
    """Build a tiny model of `model_class`, trace it on text and images (if it accepts them), and run a backward.

    Args:
        model_class: A Hugging Face class.
        overrides: Values for the tiny configuration, as in a family's `tiny`.

    Returns:
        The results. A failed step is recorded there, and raises no error.
    """
    assert model_class.config_class is not None
    tiny = find_tiny(model_class.config_class, overrides, model_class)
    fields: dict[str, Any] = {}
    step: DetectionStep | None = DetectionStep.CONFIGURATION
    try:
        if tiny.config is None:
            raise tiny.failure or ValueError("no configuration")
        step = DetectionStep.BUILD
        with random_states_kept():
            torch.manual_seed(0)
            with BUILDING:
                model = model_class._from_config(copy.deepcopy(tiny.config)).eval()
            randomize(model)  # with zeros, a gated image would not affect the logits
        step = DetectionStep.TEXT
        multimodal = takes_images(model) or takes_audio(model)
        try:
            trace = _run(model, inputs_for(model, images=False))
            fields["modalities"] = ("text",)
        except Exception as error:
            if not multimodal:
                raise
            fields["note"] = f"does not run on text alone: {one_line(error)}"  # for example, it describes images
        if multimodal:
            step = DetectionStep.MEDIA
            inputs = inputs_for(model)
            trace = _run(model, inputs)
            media = [kind for kind, arguments in MEDIA.items() if set(arguments) & set(inputs)]
            if media and not _media_matter(model, inputs):
                raise ValueError(f"the logits do not depend on {' and '.join(media)}: their tokens are not known")
            fields["modalities"] = (*fields.get("modalities", ()), *media)
        if AUDIO_ARGUMENTS & set(inspect.signature(model.forward).parameters) and "audio" not in fields["modalities"]:
            fields["note"] = "; ".join([*filter(None, [fields.get("note")]), "takes audio, which was not tried"])
        fields |= _by_class(model, trace)
        if fields["modalities"] == ("text", "images"):
            fields["keeps_offsets"] = _keeping_offsets(model, inputs)
        step = DetectionStep.BACKWARD
        model.train()
        loss = model(**inputs_for(model, labels=True)).loss
        if loss is None or not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss}")
        loss.backward()
        step = None
    except Exception as error:
        fields["failure"] = one_line(error)
    return Detection(model_class.__name__, model_class.config_class.model_type, **fields, step=step)


def _run(model: PreTrainedModel, inputs: Inputs) -> Trace:
    def run() -> None:
        if not torch.isfinite(model(**inputs).logits).all():
            raise ValueError("the logits are not finite")

    return trace_linears(model, run)


@torch.no_grad()
def _media_matter(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Return True if changing a single image or audio clip changes the logits, for each of them."""
    logits = model(**inputs).logits
    return not any(
        torch.equal(logits, model(**inputs | {name: value + 1.0}).logits)
        for name, value in inputs.items()
        if value.is_floating_point() and name in (*PIXELS, *AUDIO)
    )


def _by_class(model: PreTrainedModel, trace: Trace) -> dict[str, Any]:
    kinds = {name: f"{type(module).__module__}:{type(module).__qualname__}" for name, module in model.named_modules()}
    packed = _packed_on_disk(model)
    traced: dict[str, dict[str, list[tuple[str, ...]]]] = defaultdict(lambda: defaultdict(list))
    obstacles: dict[str, dict[str, None]] = defaultdict(dict)
    for readers in trace.readers:
        owner = readers.owner
        if readers.obstacle:
            obstacles[kinds[owner]][f"{' + '.join(readers.names)}: {readers.obstacle}"] = None
        else:
            traced[kinds[owner]][owner].append(_sorted(readers.names, packed.get(owner, ())))
    groups: dict[str, list[tuple[str, ...]]] = {}
    places: dict[str, dict[tuple[str, ...], str]] = {}
    uncalled: dict[str, set[str]] = {}
    for kind, groups_by_layer in traced.items():
        every = {
            name: {child for child, linear in module.named_children() if type(linear) is nn.Linear}
            for name, module in model.named_modules()
            if kinds[name] == kind
        }
        called = {name: linears - set(trace.uncalled.get(name, ())) for name, linears in every.items()}
        # Ignore layers that were not called at all (a decoder's cross-attention); other layers of the class count.
        uncalled[kind] = set().union(*(every[name] - linears for name, linears in called.items() if linears))
        groups[kind], places[kind], failures = _with_places(groups_by_layer, called)
        obstacles[kind].update(dict.fromkeys(failures))
    return {
        "groups": {kind: class_groups for kind, class_groups in groups.items() if class_groups},
        "places": {kind: class_places for kind, class_places in places.items() if class_places},
        "obstacles": {name: list(reasons) for name, reasons in obstacles.items() if reasons},
        "uncalled": {name: tuple(sorted(child_names)) for name, child_names in uncalled.items() if child_names},
    }


def _keeping_offsets(model: PreTrainedModel, with_images: Inputs) -> tuple[str, ...]:
    """Return classes that keep an image's position offset for later forwards, if that changes results."""
    remembering = ("rope_deltas", "compute_3d_position_ids")
    modules: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in remembering)]
    if not modules or not model.can_generate():
        return ()
    for module in modules:
        module.rope_deltas = None  # discard the offset of earlier forwards
    kinds = [f"{type(module).__module__}:{type(module).__qualname__}" for module in modules]
    text = inputs_for(model, images=False)["input_ids"]
    return tuple(kinds) if offsets_stay(model, with_images, text) else ()


def _packed_on_disk(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Return the linears of each module that the hub packs into one tensor, in row order."""
    packed: dict[str, tuple[str, ...]] = {}
    for tensor in StateDictAdapter(model).hub.values():
        names = [parameter.removesuffix(".weight").rpartition(".") for parameter in tensor.parameters]
        if len({owner for owner, _, _ in names}) == 1 < len(names):
            packed[names[0][0]] = tuple(name for _, _, name in names)
    return packed


def _sorted(group: tuple[str, ...], first: tuple[str, ...]) -> tuple[str, ...]:
    """Move the linears of `first` to the front of a group, so that a packed tensor on disk is a view of it."""
    return (*(name for name in first if name in group), *(name for name in group if name not in first))


def _with_places(
    traced: Mapping[str, list[tuple[str, ...]]], called: Mapping[str, set[str]]
) -> tuple[list[tuple[str, ...]], dict[tuple[str, ...], str], list[str]]:
    """Return the groups of a layer class, the places of groups for some layers only, and groups without a place.

    A group applies to a layer if the linears of the group in this layer are exactly those with a common input.

    Args:
        traced: Traced groups by name of the layer.
        called: Called linears by name of the layer.
    """
    every = dict.fromkeys(group for groups in traced.values() for group in groups)
    holds: dict[tuple[str, ...], list[str]] = {}
    places: dict[tuple[str, ...], str] = {}
    failures: list[str] = []
    for group in sorted(every, key=len, reverse=True):
        seen_in = {name for name, groups in traced.items() if group in groups}
        if any(set(group) < set(larger) and seen_in <= set(layers) for larger, layers in holds.items()):
            continue  # in these layers, the group is a part of a larger one
        members = {name: set(group) & linears for name, linears in called.items() if len(set(group) & linears) > 1}
        right = [name for name in members if members[name] in map(set, traced.get(name, ()))]
        wrong = [name for name in members if name not in right]
        if wrong and not (component := _place(right, wrong)):
            failures.append(f"{' + '.join(group)}: read one input in {right[0]}, but not in {wrong[0]}")
            continue
        holds[group] = right
        if wrong:
            places[group] = component
    return [group for group in every if group in holds], places, failures


def _place(right: list[str], wrong: list[str]) -> str:
    """Return one or two name components that all names of `right` have and none of `wrong`, or an empty string."""
    components = [component for component in right[0].split(".") if not component.isdigit()]
    pairs = [f"{first}.{second}" for first, second in itertools.pairwise(components)]
    for piece in (*reversed(components), *reversed(pairs)):
        if all(is_at(name, piece) for name in right) and not any(is_at(name, piece) for name in wrong):
            return piece
    return ""


@torch.no_grad()
def offsets_stay(model: PreTrainedModel, with_images: Inputs, text: torch.Tensor) -> bool:
    """Return True if decoding `text` `(batch, seq_len)` from a cache depends on earlier sequences with images."""
    model, text = copy.deepcopy(model), text[:1]
    expected = _decoded(model, text)
    model(**with_images, use_cache=True)
    try:
        return bool((_decoded(model, text) - expected).abs().max() > LOGITS_DIFFER)
    except RuntimeError:  # the offsets belong to a larger batch
        return True


def _decoded(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the last token with a cache."""
    cache = cache_in(model(input_ids=text[:, :-1], use_cache=True))
    return model(input_ids=text[:, -1:], use_cache=True, **cache_input(model.forward, cache)).logits
