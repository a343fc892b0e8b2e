"""Flags: what a trainer has to know about a model beyond its configuration."""

from __future__ import annotations

from enum import Flag, auto


class ModelFlag(Flag):
    """Special handling that a family needs from the trainer or engine around it.

    A family declares its flags on its classes (`flags = ModelFlag.VLLM_LOAD_FORMAT_AUTO`). Names and
    meaning follow NeMo RL's `ModelFlag`.
    """

    NONE = 0
    SKIP_DTENSOR_TIED_WEIGHTS_CHECK = auto()
    """Every size ties its embeddings, large ones too: tying must not forbid tensor parallelism.
    Embedding and head are then left out of the tensor-parallel plan, or sharded alike."""
    VLLM_LOAD_FORMAT_AUTO = auto()
    """vLLM's dummy initialisation must not be used: the engine has buffers that no weight update
    reaches, so it has to load the real checkpoint at start."""

    @property
    def names(self) -> list[str]:
        """The names of the flags that are set."""
        return [flag.name for flag in type(self) if flag in self and flag.name is not None]
