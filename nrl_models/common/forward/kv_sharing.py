"""Models whose later layers attend to earlier layers' keys and values (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nrl_models.common.switches import is_off
from nrl_models.errors import UnknownArgumentError


class SharedKeyValues:
    """Mixin for a family, before `FamilyModel`: loading, saving and training of layers that share keys and values.

    Layers that share have no projections of keys and values. Checkpoints hold some for them all the same, never
    trained, and engines may read them: they stay with the model as they are in the file and are saved again
    (transformers drops them).

    Attributes:
        keeps_unused: see `FamilyModel`.
    """

    keeps_unused: ClassVar[tuple[str, ...]] = (r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, without the reentrant variant.

        Keys and values go from layer to layer beside the checkpointed outputs. The reentrant variant computes them
        without a graph, so gradients would silently not reach the layers they come from.

        Raises:
            UnknownArgumentError: `use_reentrant=True`.
        """
        _refuse_reentrant(self, args, kwargs)
        super().gradient_checkpointing_enable(*args, **kwargs)  # type: ignore[misc]

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """The same by its newer name."""
        _refuse_reentrant(self, args, kwargs)
        super().activation_checkpointing_enable(*args, **kwargs)  # type: ignore[misc]


def _refuse_reentrant(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if is_off("shared-kv-reentrant-checkpointing"):
        return
    shares = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    given = [options for options in (*args, *kwargs.values()) if isinstance(options, Mapping)]
    if shares and any(options.get("use_reentrant") for options in given):
        raise UnknownArgumentError(
            f"use_reentrant=True: {shares} layers of this model attend to earlier ones' keys and values, through which "
            "reentrant checkpointing passes no gradient. Leave it out, or pass use_reentrant=False."
        )
