"""Model types that transformers serves through another family's class.

`exaone` has a configuration class but no model class: transformers builds `LlamaForCausalLM` from an `ExaoneConfig`.
The names in its checkpoints follow from `model_type`, so one class has several key mappings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.common.upstream import architectures_of, text_part
from nrl_models.common.upstream_conversions import has_key_mapping


def takes_config(model_class: Any, config: PreTrainedConfig) -> bool:
    """Return True if a class can be built from `config` directly.

    Either the class declares this configuration class, or transformers' auto classes map the model type to a class with
    the same configuration class as `model_class`.
    """
    wanted = model_class.config_class
    # By name too, because code that comes with a checkpoint may be imported twice.
    if wanted is None or isinstance(config, wanted) or type(config).__name__ == wanted.__name__:
        return True
    return any(shared.config_class is wanted for shared in shared_classes(config))


def shared_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Yield the classes of other families that transformers builds from `config`, heads before base models.

    If only the text part of a configuration belongs to the other class, no class is shared (`Qwen3_5Config`).
    """
    text = text_part(config)
    for name in architectures_of(config.model_type):
        model_class: Any = getattr(transformers, name, None)
        try:
            wanted = getattr(model_class, "config_class", None)
        except ImportError:  # the class needs a package that is not installed
            continue
        if wanted is not None and not isinstance(config, wanted) and not isinstance(text, wanted):
            yield model_class


def shared_class_note(config: PreTrainedConfig) -> str:
    """Return a sentence for errors: the family and key mapping that serve `config`; empty if nothing is shared."""
    shared = next(shared_classes(config), None)
    if shared is None:
        return ""
    version, family = transformers.__version__, shared.__module__.split(".")[-2]
    if has_key_mapping(config.model_type):
        mapping = f"with the key mapping of model_type {config.model_type!r}"
    else:
        mapping = (
            f"and has no key mapping for model_type {config.model_type!r}: names must be {family}'s, or pass "
            "key_mapping={pattern: replacement}"
        )
    return f"transformers {version} serves it through {shared.__name__} (family {family}), {mapping}"


def shared_class_sentence(config: PreTrainedConfig) -> str:
    """Return `shared_class_note` as a sentence after another one; empty if nothing is shared."""
    note = shared_class_note(config)
    return f" {note[0].upper()}{note[1:]}." if note else ""


def class_of_user(served: Sequence[type[PreTrainedModel]], architecture: str) -> type[PreTrainedModel] | None:
    """Return the class that a user registered with an auto class of transformers for a configuration, if there is one.

    transformers builds it for every architecture that the configuration names, even those of transformers' classes.

    Args:
        served: Classes of the auto class for the configuration.
        architecture: Name to prefer, if there are several.
    """
    classes = [each for each in served if each.__module__.partition(".")[0] not in ("transformers", "nrl_models")]
    return next((each for each in classes if each.__name__ == architecture), next(iter(classes), None))
