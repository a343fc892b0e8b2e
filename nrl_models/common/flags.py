"""Flags: properties of a model that trainers need, and that are not in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, StrEnum, auto
from functools import cache
from typing import Any


class ModelFlag(Flag):
    """Special handling that a family needs from a trainer or engine.

    A family declares its flags on its classes (`flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO`). Flags in `follow_from` are
    derived from configurations instead. Names and meaning follow NeMo RL's `ModelFlag`.
    """

    NONE = 0
    SKIP_DTENSOR_TIED_WEIGHTS_CHECK = auto()
    """All sizes tie their embeddings, even large ones, so tied embeddings must not prevent tensor parallelism. For
    trainers that do not shard tied models. This library does not read the flag, because `parallelize` shards embedding
    and head together or not at all. Derived from the configurations."""
    VLLM_LOAD_FORMAT_AUTO = auto()
    """vLLM's dummy initialization must not be used: the engine has buffers that no weight update
    reaches, so it has to load the real checkpoint at start. `nrl_models.engines.start_engine` does."""

    @property
    def names(self) -> list[str]:
        """The names of the flags that are set."""
        return [flag.name for flag in type(self) if flag in self and flag.name is not None]


MEANINGS = {
    ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK: "trainers that refuse to shard tied embeddings may shard this model",
    ModelFlag.VLLM_LOAD_FORMAT_AUTO: "vLLM starts on the checkpoint's weights, not on random ones",
}
"""Each flag in a few words."""


class MTPForm(StrEnum):
    """Structure of a family's layer of multi-token prediction, for training it (`nrl_models.MTPLayer`)."""

    NUMBERED = auto()
    """As in DeepSeek-V3: numbered after the decoder's layers, with `enorm`, `hnorm` and `eh_proj` before the layer, and
    `shared_head.norm` after it. Engines use zeros as embedding of a sequence's second token."""
    PREFIXED = auto()
    """As in Qwen3-Next: `mtp.layers.0`, with `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.fc` before
    it and `mtp.norm` after it."""


class Flags:
    """Class attribute with the flags that a family declares, and those derived from its configurations.

    The flags are computed on first access, because that builds configurations.
    """

    def __init__(self, declared: ModelFlag) -> None:
        self.declared = declared

    def __get__(self, model: object, model_class: Any) -> ModelFlag:
        return self.declared | _following(model_class)


@cache
def _following(model_class: Any) -> ModelFlag:
    return follow_from(model_class.config_class, model_class.published)


def follow_from(config_class: Any, published: Mapping[str, Mapping[str, Any]]) -> ModelFlag:
    """Derive flags from a class's default configuration and those of its published models.

    Args:
        config_class: Configuration class of the model.
        published: Configuration values of published models, by name.
    """
    try:
        default = config_class()
    except Exception:  # there is no default configuration
        return ModelFlag.NONE
    if _ties(default) and all(_ties(config_class(**values)) for values in published.values()):
        return ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK
    return ModelFlag.NONE


def _ties(config: Any) -> bool:
    """Return True if a configuration ties embedding and head, and so does its decoder's part if that has the key."""
    values = {getattr(part, "tie_word_embeddings", None) for part in (config, config.get_text_config())}
    return True in values and False not in values
