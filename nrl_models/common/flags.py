"""Flags: what a trainer has to know about a model beyond its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, StrEnum, auto
from functools import cache
from typing import Any


class ModelFlag(Flag):
    """Special handling that a family needs from the trainer or engine around it.

    A family declares its flags on its classes (`flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO`), but for those that follow
    from its configurations (`follow_from`). Names and meaning follow NeMo RL's `ModelFlag`.
    """

    NONE = 0
    SKIP_DTENSOR_TIED_WEIGHTS_CHECK = auto()
    """Every size ties its embeddings, large ones too: tying must not forbid tensor parallelism. It is for trainers that
    refuse to divide tied models: nothing here reads it, because `parallelize` divides embedding and head alike, or
    neither, for every family. It follows from the configurations."""
    VLLM_LOAD_FORMAT_AUTO = auto()
    """vLLM's dummy initialisation must not be used: the engine has buffers that no weight update
    reaches, so it has to load the real checkpoint at start. `nrl_models.engines.start_engine` does."""

    @property
    def names(self) -> list[str]:
        """The names of the flags that are set."""
        return [flag.name for flag in type(self) if flag in self and flag.name is not None]


class MTPForm(StrEnum):
    """How a family's layer of multi-token prediction is made, by which it can be trained (`nrl_models.MTPLayer`)."""

    NUMBERED = auto()
    """As in DeepSeek-V3: numbered on after the decoder's layers, with `enorm`, `hnorm` and `eh_proj` before it and
    `shared_head.norm` after it. Engines take nothing for the embedding of a sequence's second word."""
    PREFIXED = auto()
    """As in Qwen3-Next: `mtp.layers.0`, with `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.fc` before
    it and `mtp.norm` after it."""


class Flags:
    """A class attribute: the flags that a family declares, and those that follow from its configurations.

    They are found when the attribute is first read, because that builds configurations.
    """

    def __init__(self, declared: ModelFlag) -> None:
        self.declared = declared

    def __get__(self, model: object, model_class: Any) -> ModelFlag:
        return self.declared | _following(model_class)


@cache
def _following(model_class: Any) -> ModelFlag:
    return follow_from(model_class.config_class, model_class.published)


def follow_from(config_class: Any, published: Mapping[str, Mapping[str, Any]]) -> ModelFlag:
    """The flags that follow from a class's default configuration and those of its published models.

    Args:
        config_class: of the model.
        published: configuration values of published models, by name.
    """
    try:
        default = config_class()
    except Exception:  # it has none: what its configurations say is up to each
        return ModelFlag.NONE
    if _ties(default) and all(_ties(config_class(**values)) for values in published.values()):
        return ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK
    return ModelFlag.NONE


def _ties(config: Any) -> bool:
    """Whether a configuration ties embedding and head: it, and its part with the decoder, if they have a say."""
    values = {getattr(part, "tie_word_embeddings", None) for part in (config, config.get_text_config())}
    return True in values and False not in values
