"""Find keys of a checkpoint that belong to parts the model does not have: another head, or towers of a composite model.

A base model loads from a checkpoint of a model with a head. A text model loads from a checkpoint of a vision-language
model. Keys of the model's own layers are never treated this way: unused ones still raise.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.modules import is_base_model
from nrl_models.common.process_state import BUILDING
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.layouts import base_prefix, renamed_keys
from nrl_models.common.upstream import architectures_of, text_part
from nrl_models.common.upstream_conversions import Renaming, get_model_conversion_mapping
from nrl_models.loading.names.checkpoint_names import CheckpointNames
from nrl_models.loading.options import LoadOptions
from nrl_models.loading.shared_classes import shared_classes, takes_config

LAYER_DEPTH = 3
"""Minimum number of name components after a layer's number, in layers of a tower: `layers.0.mlp.fc1.weight`."""

OTHER_HEADS = (
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
"""transformers' mappings from model types to class names, of auto classes that this package does not have."""


def accepted_parts(
    model: PreTrainedModel,
    renamed: Mapping[str, str],
    unknown: Collection[str],
    stored: Mapping[str, StoredTensor],
    options: LoadOptions,
    composite: PreTrainedConfig | None,
) -> tuple[set[str], set[str]]:
    """Return the unknown keys of heads and of towers that may be left out, see `head_keys` and `tower_keys`."""
    heads: set[str] = set()
    if unknown and (options.new_head or is_base_model(model)):
        heads = head_keys(model, renamed, unknown, stored, options.key_mapping)
    rest = [key for key in unknown if key not in heads]
    return heads, tower_keys(model, composite, rest, options.key_mapping) if rest and composite is not None else set()


def head_keys(
    model: PreTrainedModel,
    renamed: Mapping[str, str],
    unknown: Collection[str],
    stored: Mapping[str, StoredTensor],
    key_mapping: Mapping[str, str] | None = None,
) -> set[str]:
    """Return the keys of heads that `model` does not have.

    A key belongs to a head if a class with a head has it outside its base model. Some of these keys can only be found
    through the class, such as `language_model.lm_head.weight`. If the checkpoint's names have the base model's prefix,
    a module outside the prefix is also a head, unless it has a stack of layers: TRL's `v_head`, or BERT's `cls.*`. The
    same holds for a module that the base model's class has by default, but not in `model`: BERT's pooler in a token
    classifier. With any names, an unknown module is a head if it computes one number from a hidden state: a `v_head`
    next to the published names of a vision-language model.

    Args:
        model: The model to load: a base model, or one with another head.
        renamed: The name of each checkpoint key after transformers' renamings.
        unknown: The keys without a tensor in `model`.
        stored: The checkpoint's tensors.
        key_mapping: Renamings that are applied before those of transformers.
    """
    keys = _outside_prefix(model, renamed, unknown) | _single_outputs(model, unknown, stored)
    for head_class in _head_classes(model):
        if keys >= set(unknown):
            break
        keys |= _keys_outside_base(head_class, model.config, unknown, key_mapping)
    if not keys >= set(unknown) and not is_base_model(model):
        keys |= _left_out(model, renamed, unknown)
    return keys


def new_head_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of the head's tensors: those outside the base model. Empty if the model has no base model."""
    base: Any = model.base_model
    if base is model:
        return []
    inside = {id(tensor) for tensor in base.state_dict(keep_vars=True).values()}
    state_dict = model.state_dict(keep_vars=True)
    return [name for name in names if name in state_dict and id(state_dict[name]) not in inside]


def tower_keys(
    model: PreTrainedModel,
    composite: PreTrainedConfig,
    unknown: Collection[str],
    key_mapping: Mapping[str, str] | None = None,
) -> set[str]:
    """Return the keys of a composite checkpoint's other parts: vision and audio towers, projectors.

    Args:
        model: The model to load, built from a part of `composite`.
        composite: The checkpoint's configuration.
        unknown: The keys without a tensor in `model`.
        key_mapping: Renamings that are applied before those of transformers.
    """
    for whole_class in _composite_classes(model, composite):
        composite_model = _on_meta(whole_class, composite)
        kind = type(model.config)
        parts = (item for item in composite_model.named_modules() if isinstance(item[1], PreTrainedModel))
        text = tuple(f"{name}." for name, part in parts if name and isinstance(part.config, kind))
        if not text:
            continue
        targets = CheckpointNames(composite_model, StateDictAdapter(composite_model), unknown, key_mapping).targets
        return {
            key
            for key, tensor in targets.items()
            if tensor is not None and not any(name.startswith(text) for name in tensor.parameters)
        }
    return set()


def modules_of(model: PreTrainedModel, keys: Iterable[str]) -> list[str]:
    """Return the names of the outermost modules that keys belong to, for messages."""
    prefix = base_prefix(model)
    return sorted(
        {f"{prefix if key.startswith(prefix) else ''}{key.removeprefix(prefix).partition('.')[0]}" for key in keys}
    )


def _outside_prefix(model: PreTrainedModel, renamed: Mapping[str, str], unknown: Collection[str]) -> set[str]:
    """Find unknown keys of modules outside the base model, if the checkpoint's names have the base model's prefix."""
    prefix, body = base_prefix(model), _modules_in_base(model)
    others = set(unknown)
    inside = (name for key, name in renamed.items() if key not in others)
    if not prefix or not any(name.startswith(prefix) and name[len(prefix) :].split(".")[0] in body for name in inside):
        return set()
    outside = (key for key in unknown if not key.startswith(prefix) and not renamed[key].startswith(prefix))
    groups = _by_outermost_module(outside, body)
    return {key for keys in groups if not any(map(_is_in_layers, keys)) for key in keys}


def _single_outputs(model: PreTrainedModel, unknown: Collection[str], stored: Mapping[str, StoredTensor]) -> set[str]:
    """Find unknown keys of modules outside the base model with one linear, from hidden states to a single number."""
    weight: tuple[int, ...] = (1, getattr(text_part(model.config, decoder=True), "hidden_size", 0))
    output_keys = set()
    for keys in _by_outermost_module(unknown, _modules_in_base(model)):
        shapes = [stored[key].shape if key in stored else () for key in keys]
        if shapes.count(weight) == 1 and all(shape in (weight, (1,)) for shape in shapes):
            output_keys |= {*keys}
    return output_keys


def _modules_in_base(model: PreTrainedModel) -> set[str]:
    """Return the names of the outermost modules and tensors of the base model."""
    base = model.base_model
    return {name.partition(".")[0] for name in base.state_dict()} | {name for name, _ in base.named_children()}


def _by_outermost_module(keys: Iterable[str], body: Collection[str]) -> list[list[str]]:
    """Group the keys of each outermost module that is not in `body`. Tensors outside of modules are left out."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[key.partition(".")[0]].append(key)
    return [group for module, group in groups.items() if module not in body and module not in group]


def _left_out(model: PreTrainedModel, renamed: Mapping[str, str], unknown: Collection[str]) -> set[str]:
    """Find unknown keys of modules that `model` omits from its base model because it has a head."""
    base: Any = model.base_model
    default, prefix = _on_meta(type(base), base.config), base_prefix(model)
    absent = {name for name, _ in default.named_children()} - {name for name, _ in base.named_children()}
    names = {name for name in default.state_dict() if name.partition(".")[0] in absent}
    return {key for key in unknown if renamed[key].removeprefix(prefix) in names}


def _is_in_layers(key: str) -> bool:
    """Return True for tensors in a stack of layers, but not in a short sequence such as `classifier.0.weight`."""
    parts = key.split(".")
    return any(part.isdecimal() and len(parts) - position > LAYER_DEPTH for position, part in enumerate(parts))


def _head_classes(model: PreTrainedModel) -> Iterator[Any]:
    """Yield classes with a head over the same base model: the one that the configuration names, or transformers'."""
    config, yielded = model.config, 0
    for architecture in config.architectures or ():
        for head_class in _classes_named(architecture, model):
            if _is_head_class(head_class, model):
                yield head_class
                yielded += 1
    if yielded or (config.architectures and not is_base_model(model)):
        return
    candidates = (*shared_classes(config), *_known_classes(config))
    yield from (head_class for head_class in candidates if _is_head_class(head_class, model))


def _is_head_class(head_class: Any, model: PreTrainedModel) -> bool:
    if head_class.__name__ == type(model).__name__ or getattr(head_class, "config_class", None) is None:
        return False
    return takes_config(head_class, model.config)


def _keys_outside_base(
    head_class: Any, config: PreTrainedConfig, keys: Iterable[str], key_mapping: Mapping[str, str] | None
) -> set[str]:
    """Return the keys of modules outside a class's base model. The class is built without weights, to get its names."""
    head = _on_meta(head_class, config)
    tensor_names, inside = set(head.state_dict()), f"{head.base_model_prefix}."
    conversions = get_model_conversion_mapping(head, dict(key_mapping) if key_mapping else None)
    names = renamed_keys(keys, conversions, Renaming())
    return {key for key, name in names.items() if name in tensor_names and not name.startswith(inside)}


def _composite_classes(model: PreTrainedModel, composite: PreTrainedConfig) -> Iterator[Any]:
    """Yield classes that are built from a composite configuration: the one that it names, or transformers'."""
    named = [model_class for name in composite.architectures or () for model_class in _classes_named(name, model)]
    for whole_class in (*named, *_known_classes(composite)):
        config_class = getattr(whole_class, "config_class", None)
        if config_class is not None and isinstance(composite, config_class):
            yield whole_class


def _classes_named(architecture: str, model: nn.Module) -> list[Any]:
    # The code of models that are not in transformers has all classes in one module.
    modules = (transformers, sys.modules[type(model).__module__])
    return [getattr(module, architecture) for module in modules if hasattr(module, architecture)]


def _known_classes(config: PreTrainedConfig) -> list[Any]:
    """Return the classes that transformers has for a model type, those of this package's auto classes first."""
    names = dict.fromkeys((*architectures_of(config.model_type), *_other_heads_of(config.model_type)))
    return [getattr(transformers, name) for name in names if hasattr(transformers, name)]


@cache
def _other_heads_of(model_type: str) -> tuple[str, ...]:
    """Return a model type's classes with heads that only other auto classes of transformers have."""
    entries = (getattr(modeling_auto, mapping, {}).get(model_type, ()) for mapping in OTHER_HEADS)
    return tuple(name for classes in entries for name in ((classes,) if isinstance(classes, str) else classes))


def _on_meta(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model without weights."""
    with BUILDING, torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(copy.deepcopy(config))
    return model
