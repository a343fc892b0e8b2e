"""Compare a saved configuration with a model's: find keys that give the same weights other names or outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.config.ignored import key_names
from nrl_models.common.config.keys import BOOKKEEPING, generation_keys, is_read
from nrl_models.common.config.recorded_keys import keys_of_training
from nrl_models.common.config.walk import own_values, walk
from nrl_models.common.upstream import config_from_json
from nrl_models.errors import Problem, ProblemKind, shown

_CLASS = frozenset({"model_type"})
"""Keys that choose the class of a configuration or of a part. They are compared, although they are bookkeeping."""

_RETURNED = frozenset({"output_router_logits", "return_dict"})
"""Keys that choose what a forward returns, in addition to those of generation."""

_OF_TRAINING = re.compile(
    r"loss|dropout|pdrop|drop_path|layerdrop|initializer_|jitter|label_smoothing|^mask_(time|feature)_|^problem_type$"
)
"""Names of keys that change only training or new weights, whatever the ledger saw in tiny models."""

_ROPE_OF_ANY_LENGTH = frozenset({"default", "linear", "llama3", "proportional"})
"""Rotary embeddings that do not depend on `max_position_embeddings`."""


def differences(
    saved: Mapping[str, Any], model: PreTrainedModel, ignored: Collection[str] | str = ()
) -> Iterator[Problem]:
    """Yield a problem for each key whose saved value gives the model's weights another meaning.

    Keys of training, generation, precision, kernels, paths and versions may differ. So may keys that the model's code
    does not read.

    Args:
        saved: Content of a `config.json`.
        model: A model that shall load the weights saved with it.
        ignored: Names or paths of keys that may also differ.
    """
    ignored = key_names(ignored)
    config_class, current = type(model.config), json.loads(model.config.to_json_string())
    if saved == current:
        return
    if saved.get("model_type") != current.get("model_type"):
        detail = (
            f"is {shown(saved.get('model_type'))} in the checkpoint, {shown(current.get('model_type'))} in the model"
        )
        yield Problem(ProblemKind.CONFIG, "model_type", detail)
        return
    try:
        there, here = (config_from_json(config_class, each) for each in (saved, current))
    except Exception as error:  # configuration classes raise any exception
        yield Problem(ProblemKind.CONFIG, "config.json", f"cannot be read by {config_class.__name__}: {error}")
        return
    theirs, ours = ({path: value for path, _, _, value in walk(config)} for config in (there, here))
    owners = {path: (part, key) for config in (there, here) for path, part, key, _ in walk(config)}
    different = {
        path: f"is {shown(theirs.get(path))} in the checkpoint, {shown(ours.get(path))} in the model"
        for path, (part, key) in owners.items()
        if theirs.get(path) != ours.get(path) and not {path, key} & ignored and _has_meaning(key, part, model)
    }
    advice = "build the model with the checkpoint's config.json; if the difference is intended, pass "
    advice += f"ignore_config_keys={tuple(different)}"
    for path, detail in different.items():
        yield Problem(ProblemKind.CONFIG, path, detail, advice=advice)


def _has_meaning(key: str, part: PreTrainedConfig, model: PreTrainedModel) -> bool:
    """Return True if a key of a configuration or of a part can change what a model computes with its weights."""
    if key in _CLASS:
        return True
    if key.startswith("_") or key in BOOKKEEPING | _RETURNED | generation_keys() | keys_of_training():
        return False
    if _OF_TRAINING.search(key) or (key == "max_position_embeddings" and _has_any_length(part)):
        return False
    names = {key, *(name for name, target in part.attribute_map.items() if target == key)}
    return any(is_read(name, type(model), model.config) for name in names)


def _has_any_length(part: PreTrainedConfig) -> bool:
    """Return True if the model has rotary embeddings, and they do not depend on `max_position_embeddings`."""
    rope = own_values(part).get("rope_parameters")
    if not isinstance(rope, Mapping):
        return False
    layers = [layer for layer in rope.values() if isinstance(layer, Mapping)] or [rope]
    return all((layer.get("rope_type") or "default") in _ROPE_OF_ANY_LENGTH for layer in layers)
